"""Reading rows from any Arrow layout equals `to_pylist`, without touching what is not asked for; bad files are named."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dflash_core.data.arrow import Columns, map_shard
from dflash_core.data.mapped import PIECE, row_sums
from dflash_core.data.reader import TokenDataset, find_shards
from dflash_core.data.shards import batches_of, write_shards
from dflash_core.records import TokenRow

Row = tuple[list[int], list[int]]  # ids, mask
INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


def make_rows(count: int, seed: int = 0, longest: int = 40, vocab: int = 100) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, vocab, n).tolist(), rng.integers(0, 2, n).tolist()) for n in rng.integers(1, longest, count)]


def record_batch(rows: Sequence[Row], ids: Any = None, mask: Any = None, names: Sequence[str] = Columns()) -> pa.RecordBatch:
    columns = [pa.array([row[0] for row in rows]), pa.array([row[1] for row in rows])]
    if not rows:
        columns = [pa.array([], pa.list_(pa.int64()))] * 2
    types = [ids or pa.list_(pa.int32()), mask or pa.list_(pa.int8())]
    return pa.RecordBatch.from_arrays([c.cast(t) for c, t in zip(columns, types, strict=True)], names=list(names))


def save(directory: Path, files: Sequence[Sequence[pa.RecordBatch]], writer: Callable[..., Any] = pa.ipc.new_stream) -> Path:
    """A directory as someone else may have written it."""
    directory.mkdir()
    names = []
    for number, batches in enumerate(files):
        names.append(f"part-{number}.arrow")
        with pa.OSFile(str(directory / names[-1]), "wb") as sink, writer(sink, batches[0].schema) as out:
            for batch in batches:
                out.write_batch(batch)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return directory


def assert_reads(dataset: TokenDataset, rows: Sequence[Row]) -> None:
    """Every row, its length and its supervised tokens are those of the lists."""
    assert len(dataset) == len(rows)
    assert dataset.lengths.tolist() == [len(ids) for ids, _ in rows]
    assert dataset.supervised.tolist() == [sum(mask) for _, mask in rows]
    for i in [*range(len(rows)), *reversed(range(len(rows)))]:
        ids, mask = dataset.row(i)
        assert (ids.tolist(), mask.tolist()) == rows[i]


# ---- any layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_layout_equals_the_slow_read(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    list_type = rng.choice([pa.list_, pa.large_list])
    ids = list_type(INTEGERS[seed % len(INTEGERS)])
    mask = list_type([*INTEGERS, pa.bool_(), pa.bool_()][rng.integers(len(INTEGERS) + 2)])
    source = make_rows(120, seed)
    files, rows = [], []
    for _ in range(rng.integers(1, 4)):
        batches = []
        for _ in range(rng.integers(1, 6)):
            start, stop = sorted(rng.integers(0, len(source) + 1, 2))
            batches.append(record_batch(source, ids, mask).slice(start, stop - start))
            rows += source[start:stop]
        files.append(batches)
    directory = save(tmp_path / "hand", files, [pa.ipc.new_stream, pa.ipc.new_file][seed % 2])
    slow = []
    for path in sorted(directory.glob("*.arrow")):
        opened = [pa.ipc.open_stream, pa.ipc.open_file][seed % 2](pa.memory_map(str(path)))
        slow += opened.read_all().to_pylist()
    assert [(row["input_ids"], [int(value) for value in row["loss_mask"]]) for row in slow] == rows
    assert_reads(TokenDataset(directory), rows)


def test_offsets_that_do_not_start_at_zero(tmp_path: Path) -> None:
    """Arrow's own writer moves them to zero; others do not have to. So they are moved back in the file, values in front and behind."""
    offsets = np.array([0, 2, 7, 20, 100], np.int32)
    moved = np.array([5, 7, 12, 25, 60], np.int32)
    values = np.arange(100, dtype=np.int32)
    ids = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
    mask = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values % 2, pa.int8()))
    path = save(tmp_path / "hand", [[pa.RecordBatch.from_arrays([ids, mask], names=Columns())]]) / "part-0.arrow"
    raw = path.read_bytes()
    assert raw.count(offsets.tobytes()) == 2
    path.write_bytes(raw.replace(offsets.tobytes(), moved.tobytes()))
    expected = [(list(range(a, b)), [i % 2 for i in range(a, b)]) for a, b in itertools.pairwise(moved.tolist())]
    assert_reads(TokenDataset(tmp_path / "hand"), expected)


@pytest.mark.parametrize("longest", [3, PIECE // 3, PIECE * 2])
def test_counting_in_pieces_equals_counting_whole(tmp_path: Path, longest: int) -> None:
    """Rows around and beyond the size in which files are scanned, as bytes and as bits."""
    rng = np.random.default_rng(longest)
    lengths = rng.integers(1, longest + 1, 7)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    mask = rng.integers(0, 2, offsets[-1]).astype(np.int8)
    expected = [int(mask[a:b].sum()) for a, b in itertools.pairwise(offsets)]
    for name, values in (("bytes", pa.array(mask)), ("bits", pa.array(mask.astype(bool)))):
        columns = [pa.ListArray.from_arrays(offsets, pa.array(np.arange(len(mask), dtype=np.int32)))]
        columns.append(pa.ListArray.from_arrays(offsets, values))
        shard = map_shard(
            save(tmp_path / name, [[pa.RecordBatch.from_arrays(columns, names=Columns())]] * 1) / "part-0.arrow",
        )
        assert shard.count_masks().tolist() == expected
        assert shard.id_range() == (0, len(mask) - 1)


def test_row_sums_of_empty_spans() -> None:
    values = np.array([1, 1, 0, 1, 1], np.int8)
    assert row_sums(np.array([0, 0, 2, 2, 5, 5]), values).tolist() == [0, 2, 0, 2, 0]
    assert row_sums(np.array([0, 0]), values[:0]).tolist() == [0]


def test_long_rows_do_not_wrap_in_small_types(tmp_path: Path) -> None:
    rows = [([1] * 1000, [1] * 1000)]
    assert TokenDataset(save(tmp_path / "hand", [[record_batch(rows)]])).supervised.tolist() == [1000]


# ---- directories of users --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["int8", "bool", "int64"])
def test_a_directory_that_datasets_saved_is_read(tmp_path: Path, mask: str) -> None:
    import datasets

    rows = make_rows(50)
    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int64")), "loss_mask": datasets.List(datasets.Value(mask))}
    )
    columns = {"input_ids": [row[0] for row in rows], "loss_mask": [row[1] for row in rows]}
    saved = datasets.Dataset.from_dict(columns, features=features)
    chosen = saved.shuffle(seed=1).select(range(5, 40))
    chosen.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    expected = [(row["input_ids"], [int(value) for value in row["loss_mask"]]) for row in chosen]
    assert sorted(expected) != expected
    assert_reads(TokenDataset(tmp_path / "saved"), expected)


def test_columns_of_other_names_and_types_beside_ours(tmp_path: Path) -> None:
    rows = make_rows(20)
    columns = [record_batch(rows).column(i) for i in range(2)]
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["text"] * 20), columns[1], pa.array([{"a": 1}] * 20), columns[0], pa.array([7] * 20, pa.int32())],
        names=["source", "labels_mask", "meta", "tokens", "supervised"],
    )
    directory = save(tmp_path / "hand", [[batch]])
    assert_reads(TokenDataset(directory, columns=Columns("tokens", "labels_mask")), rows)
    with pytest.raises(ValueError, match=r"part-0\.arrow: no column 'input_ids', it has source, labels_mask, meta, tokens"):
        TokenDataset(directory)


def test_several_directories_are_one_dataset(tmp_path: Path) -> None:
    ours, theirs = make_rows(30, 1), make_rows(20, 2)
    own = batches_of([TokenRow(id="", input_ids=ids, loss_mask=mask) for ids, mask in ours])
    write_shards(tmp_path / "ours", own, shard_tokens=150, fingerprint="f", ingredients={}, ledger={})
    save(tmp_path / "theirs", [[record_batch(theirs[:5])], [record_batch(theirs[5:])]])
    dataset = TokenDataset([find_shards(tmp_path / "ours"), find_shards(tmp_path / "theirs")])
    assert_reads(dataset, ours + theirs)
    manifest = dataset.manifest()
    assert (manifest.rows, manifest.tokens) == (50, sum(len(ids) for ids, _ in ours + theirs))
    assert manifest.supervised == sum(sum(mask) for _, mask in ours + theirs)
    assert TokenDataset(tmp_path / "ours").manifest().fingerprint == "f"


def test_the_fingerprint_of_a_directory_without_manifest_follows_its_content(tmp_path: Path) -> None:
    rows = make_rows(20)
    changed = [*rows[:7], (rows[7][0], [1 - value for value in rows[7][1]]), *rows[8:]]
    prints = [
        TokenDataset(save(tmp_path / name, [[record_batch(content)]])).manifest().fingerprint
        for name, content in (("a", rows), ("b", rows), ("c", changed), ("d", rows[:-1]))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("where", ["nowhere", "bucket/data"])
def test_a_place_without_a_scheme_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path / where}: no such directory.*s3://"):
        find_shards(Path(where))


def test_directories_that_are_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a complete shard set: state\.json missing"):
        find_shards(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [], "_indices_files": [{"filename": "indices.arrow"}]}')
    with pytest.raises(ValueError, match="flatten_indices"):
        find_shards(tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=rf"splits train, test; name one of them, as {tmp_path}/train"):
        find_shards(tmp_path)


def test_a_read_only_folder_is_left_as_it_is(tmp_path: Path) -> None:
    """What is worked out is kept beside the run, and found there again."""
    rows = make_rows(30)
    directory = save(tmp_path / "theirs", [[record_batch(rows)]])
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    directory.chmod(0o555)
    try:
        assert_reads(TokenDataset(directory, index=tmp_path / "index"), rows)
        assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
        (kept,) = (tmp_path / "index").iterdir()
        np.save(kept, np.full(30, 3, np.int32))
        assert TokenDataset(directory, index=tmp_path / "index").supervised.tolist() == [3] * 30, "read, not counted again"
    finally:
        directory.chmod(0o755)
    os.utime(directory / "part-0.arrow")
    assert_reads(TokenDataset(directory, index=tmp_path / "index"), rows)


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([([5, 6, 7, 8], [0, 0, 1])], "row 4 has 4 input_ids and 3 loss_mask values; 1 row of"),
        ([([5], [0, 1]), ([], [])], "row 4 has 1 input_ids and 2 loss_mask values; 2 rows of"),
        ([([1], [1]), ([], [])], "row 5 has 0 input_ids and 0 loss_mask values; 1 row of"),
    ],
)
def test_rows_that_cannot_be_trained_are_named(tmp_path: Path, rows: list[Row], words: str) -> None:
    directory = save(tmp_path / "hand", [[record_batch(make_rows(4)), record_batch(rows)]])
    with pytest.raises(ValueError, match=rf"part-0\.arrow: {words}"):
        assert TokenDataset(directory).lengths is None


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([[1], None, [2], None], [[1], [1], [1], [1]], r"row 5 has no input_ids \(null\), so have 2 rows"),
        ([[1], [2], [3], [4]], [[1], [1], [1], None], r"row 7 has no loss_mask \(null\), so have 1 row"),
        ([[1], [2, 3], [4, None], [5]], [[1], [1, 1], [1, 1], [1]], r"row 6 has a null among its input_ids"),
    ],
)
def test_nulls_are_named(tmp_path: Path, ids: list, mask: list, words: str) -> None:
    bad = record_batch(list(zip(ids, mask, strict=True)))
    directory = save(tmp_path / "hand", [[record_batch(make_rows(4)), bad]])
    with pytest.raises(ValueError, match=words):
        TokenDataset(directory)


@pytest.mark.parametrize("value", [2, -1])
def test_a_mask_of_other_values_is_named(tmp_path: Path, value: int) -> None:
    rows = [*make_rows(4), ([1, 2, 3], [0, value, 1])]
    with pytest.raises(ValueError, match=rf"row 4 has the loss_mask value {value}"):
        assert TokenDataset(save(tmp_path / "hand", [[record_batch(rows)]])).supervised is None


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        (pa.list_(pa.float32()), None, r"'input_ids' is list<\w+: float"),
        (pa.list_(pa.int32(), 3), None, r"'input_ids' is fixed_size_list"),
        (pa.list_(pa.bool_()), None, r"'input_ids' is list<\w+: bool"),
        (None, pa.list_(pa.string()), r"'loss_mask' is list<\w+: string"),
    ],
)
def test_columns_of_wrong_type_are_named(tmp_path: Path, ids: Any, mask: Any, words: str) -> None:
    batch = record_batch([([1, 1, 1], [1, 1, 1])], ids, mask)
    with pytest.raises(ValueError, match=rf"part-0\.arrow: column {words}.*list or large_list of integers"):
        TokenDataset(save(tmp_path / "hand", [[batch]]))


@pytest.mark.parametrize("writer", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize("cut", [1, 100, 0.5, "header", "all"])
def test_a_cut_file_without_manifest_is_named(tmp_path: Path, writer: Callable[..., Any], cut: Any) -> None:
    batches = [record_batch(make_rows(50, seed)) for seed in range(4)]
    directory = save(tmp_path / "hand", [batches, batches], writer)
    path = directory / "part-1.arrow"
    size = path.stat().st_size
    header = len(batches[0].schema.serialize())
    path.write_bytes(
        path.read_bytes()[: {"header": header, "all": 0, 0.5: size // 2}.get(cut, size - 1 if cut == 1 else size - 100)]
    )
    with pytest.raises(ValueError, match=r"part-1\.arrow: (cut short|empty file)"):
        TokenDataset(directory)


def test_a_stream_cut_between_batches_is_named(tmp_path: Path) -> None:
    """Arrow itself takes a stream without its end mark for a shorter one."""
    directory = save(tmp_path / "hand", [[record_batch(make_rows(50))]])
    path = directory / "part-0.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    assert pa.ipc.open_stream(path.read_bytes()).read_all().num_rows == 50
    with pytest.raises(ValueError, match="end-of-stream mark"):
        TokenDataset(directory)


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    writer = lambda sink, schema: pa.ipc.new_stream(sink, schema, options=options)  # noqa: E731
    with pytest.raises(ValueError, match=r"part-0\.arrow: its record batches are compressed"):
        TokenDataset(save(tmp_path / "hand", [[record_batch(make_rows(500))]], writer))


# ---- views -----------------------------------------------------------------------------------------------------------


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    dataset = TokenDataset(save(tmp_path / "hand", [[record_batch([])]]))
    assert (len(dataset), dataset.lengths.tolist(), dataset.supervised.tolist()) == (0, [], [])


def test_views_are_read_only_and_share_the_mapped_file(tmp_path: Path) -> None:
    dataset = TokenDataset(save(tmp_path / "hand", [[record_batch(make_rows(10))]]))
    for view in dataset.row(3):
        assert not view.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert np.shares_memory(dataset.row(3)[0], dataset.row(3)[0])


@pytest.mark.parametrize("index", [-1, -10, 10, 11, 10**6])
def test_a_row_that_is_not_there_is_an_index_error(tmp_path: Path, index: int) -> None:
    dataset = TokenDataset(save(tmp_path / "hand", [[record_batch(make_rows(10))]]))
    with pytest.raises(IndexError, match=rf"{index}.*10"):
        dataset.row(index)


def test_a_mapped_dataset_outlives_its_directory(tmp_path: Path) -> None:
    """Preparation replaces shards by renaming the directory; a reader that is open keeps what it opened, and so does a view."""
    rows = make_rows(10)
    directory = save(tmp_path / "hand", [[record_batch(rows)]])
    dataset = TokenDataset(directory)
    directory.rename(tmp_path / "old")
    (tmp_path / "old" / "part-0.arrow").unlink()
    assert_reads(dataset, rows)
    view = dataset.row(4)[0]
    del dataset
    assert view.tolist() == rows[4][0]


def test_rows_can_be_announced(tmp_path: Path) -> None:
    """prefetch changes nothing that can be seen, whatever the place of a row in its page, bits included."""
    rows = make_rows(300, longest=700)
    for name, mask in (("bytes", pa.list_(pa.int8())), ("bits", pa.list_(pa.bool_()))):
        dataset = TokenDataset(save(tmp_path / name, [[record_batch(rows, mask=mask)]]))
        dataset.prefetch(range(300))
        assert_reads(dataset, rows)


def test_the_first_row_of_a_shard_waits_for_its_check(tmp_path: Path) -> None:
    rows = make_rows(30)
    directory = save(tmp_path / "hand", [[record_batch(rows[i : i + 10])] for i in (0, 10, 20)])
    asked: list[int] = []

    def check(shard: int) -> None:
        asked.append(shard)
        if shard == 2 and asked.count(2) == 1:
            raise ValueError("shard 2 is bad")

    dataset = TokenDataset([find_shards(directory)], before_use=check)
    assert dataset.lengths.tolist() == [len(ids) for ids, _ in rows], "lengths are for the plan and wait for nothing"
    assert asked == []
    for index in (15, 3, 12, 4, 19):
        dataset.row(index)
    assert asked == [1, 0]
    with pytest.raises(ValueError, match="shard 2 is bad"):
        dataset.row(25)
    assert dataset.row(25)[0].tolist() == rows[25][0], "a check that failed is asked again"
    assert asked == [1, 0, 2, 2]


def test_the_index_costs_bytes_a_batch_and_nothing_a_row(tmp_path: Path) -> None:
    counts = {}
    for rows in (100, 10_000):
        dataset = TokenDataset(save(tmp_path / str(rows), [[record_batch([([1], [1])] * rows)] * 3]))
        (shard,) = dataset._shards
        arrays = [shard.firsts, *(a for lists in (shard.ids, shard.mask) for a in (lists.first_offset, lists.first_value))]
        counts[rows] = sum(sys.getsizeof(one) for one in arrays)
        assert (dataset.lengths.nbytes + dataset.supervised.nbytes) / len(dataset) == 8
    assert counts[100] == counts[10_000] < 800
