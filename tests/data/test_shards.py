"""Shards: opened by `datasets`, read as views equal to a slow read, complete or absent, and checked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dflash_core.data.reader import TokenDataset
from dflash_core.data.shards import (
    MOST_TOKENS,
    ROWS,
    SCHEMA,
    batches_of,
    check_shards,
    parse_manifest,
    read_batches,
    read_manifest,
    read_stream,
    write_shards,
    write_stream,
)
from dflash_core.files import file_sha256
from dflash_core.records import Manifest, TokenRow


def token_rows(count: int, seed: int = 0, longest: int = 40) -> list[TokenRow]:
    rng = np.random.default_rng(seed)
    return [
        TokenRow(id=f"r{i}", input_ids=rng.integers(0, 2**31 - 1, n).tolist(), loss_mask=rng.integers(0, 2, n).tolist())
        for i, n in enumerate(rng.integers(1, longest, count))
    ]


def write(
    directory: Path, rows: list[TokenRow] | Iterator[TokenRow], shard_tokens: int = 200, shard_bytes: int = 2**30
) -> Manifest:
    return write_shards(
        directory,
        batches_of(rows, batch_rows=7),
        shard_tokens=shard_tokens,
        shard_bytes=shard_bytes,
        fingerprint="0123456789abcdef" * 4,
        ingredients={"data": {"max_length": 40}, "text": "é"},
        ledger={"rows_in": 3, "kept": 2, "cut": 0, "dropped": {"empty": 1}},
    )


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
    assert loaded.column_names == ["input_ids", "loss_mask", "seq_len", "supervised"]
    assert loaded.features.arrow_schema.remove_metadata() == SCHEMA
    assert loaded[:] == {
        "input_ids": [row.input_ids for row in rows],
        "loss_mask": [row.loss_mask for row in rows],
        "seq_len": [len(row.input_ids) for row in rows],
        "supervised": [sum(row.loss_mask) for row in rows],
    }
    assert len(manifest.shards) == {1: 30, 10**6: 1}.get(shard_tokens, len(manifest.shards))
    assert_reads(TokenDataset(tmp_path / "shards"), rows)


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
        assert max(token for ids in batches[0].column("input_ids").to_pylist() for token in ids) == shard.max_id
    stored = {path.name for path in (tmp_path / "shards").iterdir()}
    count = len(manifest.shards)
    assert stored == {f"data-{i:05d}-of-{count:05d}.arrow" for i in range(count)} | {
        *("dataset_info.json", "state.json", "manifest.json")
    }


def test_a_shard_is_closed_when_it_holds_its_tokens(tmp_path: Path) -> None:
    rows = [TokenRow(id="", input_ids=[1] * n, loss_mask=[1] * n) for n in (5, 5, 1, 9, 30, 2)]
    manifest = write(tmp_path / "shards", rows, shard_tokens=10)
    assert [(shard.rows, shard.tokens) for shard in manifest.shards] == [(2, 10), (2, 10), (1, 30), (1, 2)]


def test_a_shard_is_closed_when_it_weighs_its_bytes(tmp_path: Path) -> None:
    """5 bytes a token and 16 a row: short rows fill memory long before they are many tokens."""
    rows = [TokenRow(id="", input_ids=[1] * n, loss_mask=[1] * n) for n in (1, 1, 1, 20, 1)]
    manifest = write(tmp_path / "shards", rows, 10**6, shard_bytes=42)
    assert [(shard.rows, shard.tokens) for shard in manifest.shards] == [(2, 2), (2, 21), (1, 1)]


@pytest.mark.parametrize("batch_rows", [1, 3, 50, 1000])
def test_how_rows_come_in_does_not_decide_the_shards(tmp_path: Path, batch_rows: int) -> None:
    """Batches that span shards, and slices of a larger table, give the very bytes that one row at a time gives."""
    rows = token_rows(60)
    whole = next(batches_of([*token_rows(9, seed=5), *rows], batch_rows=100))
    slices = [whole.slice(start, min(batch_rows, 69 - start)) for start in range(9, 69, batch_rows)]
    one = write(tmp_path / "one", rows)
    other = write_shards(tmp_path / "other", slices, shard_tokens=200, fingerprint="", ingredients={}, ledger={})
    assert other.shards == one.shards
    assert len(one.shards) > 3


@pytest.mark.parametrize("tokens", [0, MOST_TOKENS + 1])
def test_a_shard_never_nears_the_end_of_32_bit_offsets(tmp_path: Path, tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"shard_tokens {tokens}: outside 1\.\.{MOST_TOKENS}"):
        write(tmp_path / "shards", token_rows(3), tokens)


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([[5, 6, 7]], [[0, 1]], "3 input_ids and 2 loss_mask values"),
        ([[5], []], [[0], []], "0 input_ids and 0 loss_mask values"),
        ([[5], None], [[0], [1]], "a token row is null"),
    ],
)
def test_rows_that_cannot_be_trained_are_not_written(tmp_path: Path, ids: list, mask: list, words: str) -> None:
    columns = [pa.array(ids, ROWS.field("input_ids").type), pa.array(mask, ROWS.field("loss_mask").type)]
    with pytest.raises(ValueError, match=words):
        write_shards(
            tmp_path / "shards",
            [pa.RecordBatch.from_arrays(columns, schema=ROWS)],
            shard_tokens=9, fingerprint="", ingredients={}, ledger={},
        )  # fmt: skip
    assert not (tmp_path / "shards").exists()


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "shards", token_rows(3))
    path = tmp_path / "shards" / "manifest.json"
    path.write_text(path.read_text().replace('"max_id"', '"largest"'))
    with pytest.raises(ValueError, match=r"manifest\.json: no manifest of this version.*largest"):
        read_manifest(tmp_path / "shards")
    with pytest.raises(ValueError, match="here: no manifest"):
        parse_manifest(b"{", "here")


def test_file_sha256_is_sha256(tmp_path: Path) -> None:
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_stream_round_trip(tmp_path: Path, batch_rows: int) -> None:
    rows = token_rows(25)
    assert write_stream(tmp_path / "rows.arrow", iter(rows), batch_rows=batch_rows) == 25
    assert list(read_stream(tmp_path / "rows.arrow")) == [dataclasses.replace(row, id="") for row in rows]
    sizes = [batch.num_rows for batch in read_batches(tmp_path / "rows.arrow")]
    assert (sum(sizes), max(sizes)) == (25, min(25, batch_rows))
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
