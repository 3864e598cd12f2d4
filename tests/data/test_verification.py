"""Broken, rewritten and foreign shards: named, and before their rows are used."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dflash_core.data.reader import ShardSet, TokenDataset, find_shards
from dflash_core.data.shards import batches_of, read_manifest, write_shards
from dflash_core.data.verification import BackgroundVerifier, check_tokenizer, verified_dataset, verify_shards
from dflash_core.files import file_sha256
from dflash_core.records import Manifest, TokenRow
from tests.data.test_reader import make_rows, record_batch, save

VOCAB = 100


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A directory of several shards with ids 0..99."""
    rows = [TokenRow(id="", input_ids=ids, loss_mask=mask) for ids, mask in make_rows(60, vocab=VOCAB)]
    write_shards(
        tmp_path / "shards",
        batches_of(rows),
        shard_tokens=300,
        fingerprint="f",
        ingredients={"tokenizer": {"tokenizer.json": "abc"}, "target": {"path": "Qwen/Qwen3-8B"}},
        ledger={"rows_in": 60, "kept": 60, "cut": 0, "dropped": {}},
    )
    return tmp_path / "shards"


def damage_ids(path: Path, value: int) -> None:
    """Overwrites the first token of a file, whose size stays."""
    with pa.memory_map(str(path)) as source:
        first = pa.ipc.open_stream(source).read_all().column("input_ids").chunk(0).values[:8].to_numpy().tobytes()
    raw = path.read_bytes()
    path.write_bytes(raw.replace(first, np.int32(value).tobytes() + first[4:], 1))


def reseal(directory: Path, **changes: Any) -> None:
    """Rewrites the manifest as if the second shard were as it is now, with other counts."""
    manifest = read_manifest(directory)
    shards = list(manifest.shards)
    sealed = {"sha256": file_sha256(directory / shards[1].name), **changes}
    shards[1] = dataclasses.replace(shards[1], **sealed)
    value = dataclasses.asdict(dataclasses.replace(manifest, shards=tuple(shards)))
    (directory / "manifest.json").write_text(json.dumps(value))


# ---- all at once -----------------------------------------------------------------------------------------------------


def test_a_good_directory_gives_its_manifest(shards: Path) -> None:
    assert verify_shards(shards, vocab_size=VOCAB) == read_manifest(shards)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, the manifest says"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: damage_ids(path, 5), "its sha256 is not the manifest's"),
    ],
)
def test_a_damaged_shard_is_named(shards: Path, fault: Callable[[Path], Any], words: str) -> None:
    path = shards / read_manifest(shards).shards[1].name
    fault(path)
    with pytest.raises(ValueError, match=rf"{path.name}: .*{words}"):
        verify_shards(shards)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 3}, r"\d+ tokens, the manifest says 3"),
        ({"supervised": 3}, r"\d+ supervised.*the manifest says 3"),
        ({"rows": 3}, r"\d+ rows, the manifest says 3"),
        ({"max_id": 3}, r"largest token id 99 and buffers at .*, the manifest says 3 and"),
        (
            {"places": (80, 120, 200, 1200, 300)},
            r"largest token id 99 and buffers at .*, the manifest says 99 and \(80, 120, 200",
        ),
    ],
)
def test_a_manifest_that_counts_wrong_is_seen(shards: Path, changes: dict[str, int], words: str) -> None:
    reseal(shards, **changes)
    with pytest.raises(ValueError, match=rf"data-00001-\S+: {words}"):
        verify_shards(shards)


@pytest.mark.parametrize("value", [VOCAB, 2**30, -1])
def test_ids_outside_the_vocabulary_are_named(shards: Path, value: int) -> None:
    path = shards / read_manifest(shards).shards[1].name
    damage_ids(path, value)
    reseal(shards, max_id=max(99, value))
    with pytest.raises(
        ValueError, match=rf"{path.name}: row 0 has the token id {value}, outside the target's vocabulary of {VOCAB}"
    ):
        verify_shards(shards, vocab_size=VOCAB)


def test_a_manifest_that_points_outside_the_file_is_refused(shards: Path) -> None:
    size = read_manifest(shards).shards[1].bytes
    for places in ((80, size // 4, 200, 1200, 300), (80, 120, 200, size, 300), (80, 120, 200, 1200, -1)):
        reseal(shards, places=places)
        with pytest.raises(ValueError, match=r"data-00001-\S+: \d+ bytes are not what its manifest says"):
            TokenDataset(shards)


def test_totals_must_be_the_sum_of_the_shards(shards: Path) -> None:
    value = json.loads((shards / "manifest.json").read_text())
    (shards / "manifest.json").write_text(json.dumps({**value, "tokens": 5}))
    with pytest.raises(ValueError, match=r"its shards hold \d+ tokens, the manifest says 5"):
        verify_shards(shards)


def test_state_and_manifest_must_name_the_same_files(shards: Path) -> None:
    value = json.loads((shards / "state.json").read_text())
    (shards / "state.json").write_text(json.dumps({**value, "_data_files": value["_data_files"][:-1]}))
    with pytest.raises(ValueError, match="name other files"):
        verify_shards(shards)


def test_a_directory_without_manifest_is_verified_by_its_content(tmp_path: Path) -> None:
    rows = make_rows(30, vocab=VOCAB)
    directory = save(tmp_path / "theirs", [[record_batch(rows[:10])], [record_batch(rows[10:])]])
    manifest = verify_shards(directory, vocab_size=VOCAB)
    assert (manifest.rows, manifest.tokens) == (30, sum(len(ids) for ids, _ in rows))
    with pytest.raises(ValueError, match=r"part-\d\.arrow: row \d+ has the token id 99, outside the target's vocabulary of 99"):
        verify_shards(directory, vocab_size=99)


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def test_shards_of_another_tokenizer_are_refused_with_both_names(shards: Path) -> None:
    sets = [find_shards(shards)]
    check_tokenizer(sets, target="mine", tokenizer={"tokenizer.json": "abc"}, vocab_size=VOCAB)
    with pytest.raises(
        ValueError, match=r"tokenized for Qwen/Qwen3-8B, this run's target is mine.*\(merges\.txt, tokenizer\.json\)"
    ):
        check_tokenizer(sets, target="mine", tokenizer={"tokenizer.json": "abd", "merges.txt": "1"}, vocab_size=VOCAB)
    with pytest.raises(ValueError, match=r"token id 99, outside the vocabulary of 99 of mine"):
        check_tokenizer(sets, target="mine", tokenizer={"tokenizer.json": "abc"}, vocab_size=99)


def test_what_has_no_manifest_names_no_tokenizer() -> None:
    check_tokenizer([ShardSet(name="x", files=(), manifest=None)], target="mine", tokenizer={"a": "b"}, vocab_size=1)


# ---- in the background -----------------------------------------------------------------------------------------------


def test_each_check_runs_once_whoever_asks_first() -> None:
    ran: list[int] = []
    gate = threading.Event()

    def check(shard: int) -> None:
        if shard == 0:
            gate.wait(10)
        ran.append(shard)

    with BackgroundVerifier([lambda shard=shard: check(shard) for shard in range(5)]) as verifier:
        verifier.wait_for(3)  # while the thread is held at shard 0
        assert ran == [3]
        gate.set()
        for shard in range(5):
            verifier.wait_for(shard)
    assert sorted(ran) == [0, 1, 2, 3, 4]


def test_a_failed_check_is_raised_where_its_shard_is_used_and_nowhere_else() -> None:
    def fail() -> None:
        raise ValueError("shard b is bad")

    with BackgroundVerifier([lambda: None, fail, lambda: None]) as verifier:
        verifier.wait_for(0)
        verifier.wait_for(2)
        for _ in range(2):
            with pytest.raises(ValueError, match="shard b is bad"):
                verifier.wait_for(1)


def test_leaving_ends_the_checks() -> None:
    started, gate, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        gate.wait(10)

    with BackgroundVerifier([first, lambda: ran.append(1)]) as verifier:
        started.wait(10)
    gate.set()
    verifier._thread.join(10)
    assert (verifier._thread.is_alive(), ran) == (False, [])


def read_all(directory: Path, index: Path, vocab_size: int = VOCAB) -> int:
    with verified_dataset([find_shards(directory)], index=index, vocab_size=vocab_size) as dataset:
        return sum(int(dataset.row(i)[0].sum()) for i in range(len(dataset)))


def test_a_rewritten_shard_is_named_at_its_first_row(shards: Path, tmp_path: Path) -> None:
    total = read_all(shards, tmp_path / "index")
    assert read_all(shards, tmp_path / "index") == total
    manifest = read_manifest(shards)
    damage_ids(shards / manifest.shards[1].name, 5)
    with verified_dataset([find_shards(shards)], index=tmp_path / "index", vocab_size=VOCAB) as dataset:
        dataset.row(0)
        with pytest.raises(ValueError, match=rf"{manifest.shards[1].name}: its sha256 is not the manifest's"):
            dataset.row(manifest.shards[0].rows)


def test_what_was_checked_is_not_read_again(shards: Path, tmp_path: Path) -> None:
    """The notes beside the run stand for the bytes as long as size, times and inode are the same."""
    read_all(shards, tmp_path / "index")
    notes = sorted((tmp_path / "index").glob("*.json"))
    assert len(notes) == len(read_manifest(shards).shards)
    written = {note: note.stat().st_mtime_ns for note in notes}
    read_all(shards, tmp_path / "index")
    assert {note: note.stat().st_mtime_ns for note in notes} == written
    copy = shutil.copytree(shards, tmp_path / "copy")
    shutil.rmtree(shards)
    copy.rename(shards)
    read_all(shards, tmp_path / "index")
    assert all(note.stat().st_mtime_ns > before for note, before in written.items())


def test_files_without_manifest_are_remembered_and_their_ids_checked(tmp_path: Path) -> None:
    rows = make_rows(40, vocab=VOCAB)
    directory = save(tmp_path / "theirs", [[record_batch(rows[:20])], [record_batch(rows[20:])]])
    assert read_all(directory, tmp_path / "index") == sum(sum(ids) for ids, _ in rows)
    with pytest.raises(ValueError, match="token id 99, outside the target's vocabulary of 99"):
        read_all(directory, tmp_path / "index", vocab_size=99)
    damage_ids(directory / "part-1.arrow", 7)
    with pytest.raises(ValueError, match=r"part-1\.arrow: its sha256 is not the one it had when this run first read it"):
        read_all(directory, tmp_path / "index")


def test_two_manifests_of_one_run_are_equal(shards: Path) -> None:
    """What the trainer depends on: the manifest of the data as it was opened."""
    with verified_dataset([find_shards(shards)], index=shards.parent / "index", vocab_size=VOCAB) as dataset:
        manifest: Manifest = dataset.manifest()
    assert manifest == read_manifest(shards)
