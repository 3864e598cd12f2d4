"""Shards: opened by `datasets`, read as views equal to a slow read, complete or absent, and checked."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dflash_core.data.shards import (
    SCHEMA,
    TokenDataset,
    check_shards,
    file_sha256,
    read_manifest,
    read_stream,
    write_shards,
    write_stream,
)
from dflash_core.records import Manifest, TokenRow


def token_rows(count: int, seed: int = 0, longest: int = 40) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    return [
        TokenRow(id=f"r{i}", input_ids=rng.integers(0, 2**31 - 1, n).tolist(), loss_mask=rng.integers(0, 2, n).tolist())
        for i, n in enumerate(rng.integers(1, longest, count))
    ]


def write(directory: Path, rows: list[TokenRow] | Iterator[TokenRow], shard_tokens: int = 200) -> Manifest:
    return write_shards(
        directory,
        rows,
        shard_tokens=shard_tokens,
        fingerprint="0123456789abcdef" * 4,
        ingredients={"data": {"max_length": 40}, "text": "é"},
        ledger={"rows_in": 3, "kept": 2, "cut": 0, "dropped": {"empty": 1}},
    )


def by_hand(directory: Path, files: list[list[pa.RecordBatch]]) -> Path:
    """A directory as someone else may have written it: any batching, without a manifest."""
    directory.mkdir()
    names = []
    for number, batches in enumerate(files):
        names.append(f"part-{number}.arrow")
        with pa.OSFile(str(directory / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return directory


def record_batch(rows: list[TokenRow], list_type=pa.list_, ids=None, mask=None) -> pa.RecordBatch:
    columns = [
        pa.array([row.input_ids for row in rows], list_type(ids or pa.int32())),
        pa.array([row.loss_mask for row in rows], list_type(mask or pa.int8())),
        pa.array([len(row.input_ids) for row in rows], pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=SCHEMA.names)


def assert_reads(dataset: TokenDataset, rows: list[TokenRow]) -> None:
    """Every row, its length and its supervised tokens equal the list the directory was made from."""
    assert len(dataset) == len(rows)
    assert dataset.lengths.tolist() == [len(row.input_ids) for row in rows]
    assert dataset.supervised.tolist() == [sum(row.loss_mask) for row in rows]
    for i in [*range(len(rows)), *reversed(range(len(rows)))]:
        ids, mask = dataset.row(i)
        assert (ids.tolist(), mask.tolist()) == (rows[i].input_ids, rows[i].loss_mask)


# ---- written here ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_tokens", [1, 200, 10**6])
def test_datasets_opens_the_directory_and_reads_equal_rows(tmp_path: Path, shard_tokens: int) -> None:
    import datasets

    rows = token_rows(30)
    manifest = write(tmp_path / "shards", rows, shard_tokens)
    loaded = datasets.load_from_disk(str(tmp_path / "shards"))
    assert loaded.column_names == ["input_ids", "loss_mask", "seq_len"]
    assert loaded.features.arrow_schema.remove_metadata() == SCHEMA
    assert loaded[:] == {
        "input_ids": [row.input_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "seq_len": [len(row.input_ids) for row in rows],
    }
    assert len(manifest.shards) == {1: 30, 10**6: 1}.get(shard_tokens, len(manifest.shards))
    assert_reads(TokenDataset(tmp_path / "shards"), rows)


def test_a_directory_that_datasets_saved_is_read(tmp_path: Path) -> None:
    import datasets

    rows = token_rows(50)
    columns = {"input_ids": [row.input_ids for row in rows], "loss_mask": [row.loss_mask for row in rows]}
    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("int8"))}
    )
    saved = datasets.Dataset.from_dict(columns, features=features)
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert_reads(TokenDataset(tmp_path / "saved"), rows)


def test_manifest_counts_what_is_there_and_comes_back_equal(tmp_path: Path) -> None:
    rows = token_rows(40)
    manifest = write(tmp_path / "shards", rows)
    assert read_manifest(tmp_path / "shards") == manifest
    assert (manifest.rows, manifest.tokens) == (40, sum(len(row.input_ids) for row in rows))
    assert manifest.supervised == sum(sum(row.loss_mask) for row in rows)
    assert manifest.ledger["dropped"] == {"empty": 1}
    assert manifest.ingredients["text"] == "é"
    for shard in manifest.shards:
        path = tmp_path / "shards" / shard.name
        assert (shard.bytes, shard.sha256) == (path.stat().st_size, file_sha256(path))
        with pa.memory_map(str(path)) as source:
            batches = list(pa.ipc.open_stream(source))
        assert [batch.num_rows for batch in batches] == [shard.rows], "one record batch a shard"
        assert sum(batches[0].column("seq_len").to_pylist()) == shard.tokens
    stored = {path.name for path in (tmp_path / "shards").iterdir()}
    count = len(manifest.shards)
    assert stored == {f"data-{i:05d}-of-{count:05d}.arrow" for i in range(count)} | {
        *("dataset_info.json", "state.json", "manifest.json")
    }


def test_a_shard_is_closed_when_it_holds_its_tokens(tmp_path: Path) -> None:
    rows = [TokenRow(id="", input_ids=[1] * n, loss_mask=[1] * n) for n in (5, 5, 1, 9, 30, 2)]
    manifest = write(tmp_path / "shards", rows, shard_tokens=10)
    assert [(shard.rows, shard.tokens) for shard in manifest.shards] == [(2, 10), (2, 10), (1, 30), (1, 2)]


def test_file_sha256_is_sha256(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_stream_round_trip(tmp_path: Path, batch_rows: int) -> None:
    rows = token_rows(25)
    assert write_stream(tmp_path / "rows.arrow", iter(rows), batch_rows=batch_rows) == 25
    assert list(read_stream(tmp_path / "rows.arrow")) == [dataclasses.replace(row, id="") for row in rows]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"]


# ---- a writer that dies ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """As a KeyboardInterrupt or a lost worker: nobody catches it on the way."""


def dying(rows: list[TokenRow], after: int) -> Iterator[TokenRow]:
    yield from rows[:after]
    raise Killed


@pytest.mark.parametrize("after", [0, 1, 13, 39, 40])
def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path: Path, after: int) -> None:
    rows = token_rows(40)
    with pytest.raises(Killed):
        write(tmp_path / "shards", dying(rows, after))
    assert not (tmp_path / "shards").exists()
    assert read_manifest(tmp_path / "shards") is None
    with pytest.raises(Killed):
        write_stream(tmp_path / "rows.arrow", dying(rows, after), batch_rows=4)
    assert not (tmp_path / "rows.arrow").exists()
    assert write(tmp_path / "shards", rows).rows == 40, "the next try is not disturbed by what was left"
    assert_reads(TokenDataset(tmp_path / "shards"), rows)
    assert sorted(path.name for path in (tmp_path / "shards").glob("*.arrow")) == [
        shard.name for shard in read_manifest(tmp_path / "shards").shards
    ]


def test_an_existing_directory_is_not_written_over(tmp_path: Path) -> None:
    write(tmp_path / "shards", token_rows(5))
    with pytest.raises(OSError, match="shards"):
        write(tmp_path / "shards", token_rows(9))
    assert read_manifest(tmp_path / "shards").rows == 5


# ---- broken shards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("cut", [1, 100, 0.5])
def test_a_cut_shard_is_named(tmp_path: Path, which: int, cut: float) -> None:
    manifest = write(tmp_path / "shards", token_rows(60))
    check_shards(tmp_path / "shards", manifest, checksums=True)
    shard = manifest.shards[which]
    path = tmp_path / "shards" / shard.name
    kept = int(shard.bytes * cut) if cut < 1 else shard.bytes - int(cut)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{shard.name}: {kept} bytes, the manifest says {shard.bytes}") as error:
        check_shards(tmp_path / "shards", manifest)
    assert f"delete {tmp_path / 'shards'}" in str(error.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    manifest = write(tmp_path / "shards", token_rows(60))
    (tmp_path / "shards" / manifest.shards[1].name).unlink()
    with pytest.raises(ValueError, match=rf"{manifest.shards[1].name}: missing"):
        check_shards(tmp_path / "shards", manifest)


def test_a_flipped_byte_is_seen_by_the_checksums_only(tmp_path: Path) -> None:
    manifest = write(tmp_path / "shards", token_rows(60))
    path = tmp_path / "shards" / manifest.shards[2].name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    check_shards(tmp_path / "shards", manifest)
    with pytest.raises(ValueError, match=rf"{manifest.shards[2].name}: its sha256"):
        check_shards(tmp_path / "shards", manifest, checksums=True)


# ---- read from anyone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_any_batching_and_any_slices_equal_the_slow_read(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = token_rows(120, seed)
    list_type = (pa.list_, pa.large_list)[seed % 2]
    ids = (pa.int32(), pa.int64(), pa.uint32())[seed % 3]
    mask = (pa.int8(), pa.uint8(), pa.int64())[seed % 3]
    files, rows = [], []
    for _ in range(rng.integers(1, 4)):
        batches = []
        for _ in range(rng.integers(1, 6)):
            start, stop = sorted(rng.integers(0, len(source) + 1, 2))
            batches.append(record_batch(source, list_type, ids, mask).slice(start, stop - start))
            rows += source[start:stop]
        files.append(batches)
    assert_reads(TokenDataset(by_hand(tmp_path / "hand", files)), rows)


@pytest.mark.parametrize("list_array", [pa.ListArray, pa.LargeListArray])
def test_offsets_that_do_not_start_at_zero_and_slices_in_memory(list_array: type) -> None:
    """What a stream of another writer may hold: Arrow's own writer moves offsets to zero, so this is asked without a file."""
    from dflash_core.data.shards import _list_views

    offset_type = pa.int32() if list_array is pa.ListArray else pa.int64()
    values = pa.array(range(100), pa.int32())[10:]
    column = list_array.from_arrays(pa.array([3, 5, 5, 9, 20], offset_type), values)
    for part in (column, column[1:], column[2:3], column[1:3][1:]):
        offsets, flat = _list_views(part)
        assert [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)] == part.to_pylist()


def test_rows_of_length_zero_and_empty_batches(tmp_path: Path) -> None:
    rows = token_rows(6)
    none = [TokenRow(id="", input_ids=[], loss_mask=[])]
    files = [
        [record_batch([]), record_batch(none + rows[:2] + none)],
        [record_batch([])],
        [record_batch(none), record_batch(rows)],
    ]
    assert_reads(TokenDataset(by_hand(tmp_path / "hand", files)), none + rows[:2] + none + none + rows)


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    dataset = TokenDataset(by_hand(tmp_path / "hand", [[record_batch([])]]))
    assert (len(dataset), dataset.lengths.tolist(), dataset.supervised.tolist()) == (0, [], [])


def test_views_are_read_only_and_share_the_mapped_file(tmp_path: Path) -> None:
    write(tmp_path / "shards", token_rows(10))
    dataset = TokenDataset(tmp_path / "shards")
    for view in dataset.row(3):
        assert not view.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    again, _ = dataset.row(3)
    assert np.shares_memory(again, dataset.row(3)[0])


@pytest.mark.parametrize("index", [-1, -10, 10, 11, 10**6])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, index: int) -> None:
    write(tmp_path / "shards", token_rows(10))
    with pytest.raises(IndexError, match=rf"{index}.*10"):
        TokenDataset(tmp_path / "shards").row(index)


def test_ids_and_mask_of_different_length_are_refused(tmp_path: Path) -> None:
    bad = [TokenRow(id="", input_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1])]
    directory = by_hand(tmp_path / "hand", [[record_batch(token_rows(4)), record_batch(bad)]])
    with pytest.raises(ValueError, match=r"part-0\.arrow.*row 4.*4 input_ids, 3 loss_mask"):
        TokenDataset(directory)


def test_a_mapped_dataset_outlives_a_rename_of_its_directory(tmp_path: Path) -> None:
    """Preparation replaces shards by renaming the directory; a reader that is open keeps what it opened."""
    rows = token_rows(10)
    write(tmp_path / "shards", rows)
    dataset = TokenDataset(tmp_path / "shards")
    (tmp_path / "shards").rename(tmp_path / "old")
    assert_reads(dataset, rows)
