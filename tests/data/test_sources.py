"""Sources: every kind of file gives the same rows, paths mean what they should, and what is not read is said."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.data.shapes import without_nulls
from dflash_core.data.sources import RawRow, choose_splits, locate, read_rows, source_ingredients
from dflash_core.data_config import SourceConfig
from tests.fakes import chats, write_jsonl

ROWS = chats(600)
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(path: Path | str, **options: Any) -> list[RawRow]:
    source = SourceConfig(path=str(path), **options)
    return list(read_rows(source, locate(source)))


def values(path: Path | str, **options: Any) -> list[Any]:
    rows = read(path, **options)
    assert [row.fault for row in rows if row.fault] == []
    return [without_nulls(row.value, columnar=row.columnar) for row in rows]


def write_arrow(path: Path, rows: list[Any], *, kind: str, batch: int = 100) -> None:
    table = pa.Table.from_pylist(rows)
    opened = pa.ipc.new_stream(path, table.schema) if kind == "stream" else pa.ipc.new_file(path, table.schema)
    with opened as writer:
        writer.write_table(table, max_chunksize=batch)


def write_kind(kind: str, path: Path) -> Path:
    """The rows as a file or directory of this kind; returns its path."""
    import datasets

    file = path / f"rows.{kind}"
    if kind in ("stream.arrow", "file.arrow"):
        write_arrow(file, ROWS, kind=kind.split(".")[0])
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=150)
    elif kind == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(file, num_shards=3)
    elif kind == "saved dict":
        train, test = datasets.Dataset.from_list(ROWS), datasets.Dataset.from_list(ROWS[:5])
        datasets.DatasetDict({"test": test, "train": train}).save_to_disk(file)
    elif kind == "indented.json":
        file.write_text(json.dumps(ROWS, indent=2))
    elif kind == "json":
        file.write_text(json.dumps(ROWS))
    else:
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(kind.split(".")[-1], bytes)
        file.write_bytes(pack(JSONL.encode()))
    return file


KINDS = ("jsonl", "ndjson", "lines.json", "json", "indented.json", "jsonl.gz", "jsonl.bz2", "json.xz", "unknown")
KINDS += ("parquet", "stream.arrow", "file.arrow", "saved", "saved dict")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_rows_in_order(kind: str, tmp_path: Path) -> None:
    path = write_kind(kind, tmp_path)
    assert values(path) == ROWS
    places = [row.number for row in read(path)]
    assert places[:3] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["parquet", "stream.arrow"])
def test_a_columnar_file_without_suffix_is_known_by_its_first_bytes(kind: str, tmp_path: Path) -> None:
    assert values(write_kind(kind, tmp_path).rename(tmp_path / "rows")) == ROWS


def test_two_files_whose_columns_differ_are_read_each_by_its_own(tmp_path: Path) -> None:
    """`tool_calls` null in one and structs in the other; ids numbers in one and text in the other."""
    call = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}]
    plain = [{"id": 1, "messages": [{"role": "user", "content": "a", "tool_calls": None}]}]
    calling = [{"id": "one", "messages": [{"role": "assistant", "content": None, "tool_calls": call}]}]
    for suffix, write in (
        ("jsonl", write_jsonl),
        ("parquet", lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path)),
    ):
        folder = tmp_path / suffix
        folder.mkdir()
        write(folder / f"a.{suffix}", plain)
        write(folder / f"b.{suffix}", calling)
        assert values(folder) == [
            {"id": 1, "messages": [{"role": "user", "content": "a"}]},
            {"id": "one", "messages": [{"role": "assistant", "tool_calls": call}]},
        ]


# ---- directories ----------------------------------------------------------------------------------------------------


def mixed_folder(path: Path) -> Path:
    """Two data files in folders, a saved data set, and what else lies in such places."""
    (path / "deep").mkdir(parents=True)
    write_jsonl(path / "a.jsonl", ROWS[:3])
    pq.write_table(pa.Table.from_pylist(ROWS[3:6]), path / "deep" / "b.parquet")
    (path / "README.md").write_text("about")
    (path / ".DS_Store").write_bytes(b"\0" * 9)
    (path / ".cache").mkdir()
    write_jsonl(path / ".cache" / "old.jsonl", ROWS)
    (path / "zero.jsonl").write_bytes(b"")
    return path


def test_a_directory_is_read_file_by_file_and_the_rest_is_listed(tmp_path: Path) -> None:
    folder = mixed_folder(tmp_path / "data")
    location = locate(SourceConfig(path=str(folder)))
    assert [os.path.relpath(file.path, folder) for file in location.files] == ["a.jsonl", "deep/b.parquet"]
    assert [os.path.relpath(path, folder) for path in location.ignored] == [".DS_Store", ".cache", "README.md"]
    assert [os.path.relpath(path, folder) for path in location.empty] == ["zero.jsonl"]
    assert values(folder) == ROWS[:6]


def test_a_glob_takes_what_it_names_in_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_jsonl(tmp_path / f"part-{number}.jsonl", [ROWS[number]])
    write_jsonl(tmp_path / "other.jsonl", ROWS)
    (tmp_path / "part-3.md").write_text("notes")
    assert values(tmp_path / "part-*") == ROWS[:3]
    write_jsonl(tmp_path / "odd[1].jsonl", ROWS[5:6])
    assert values(tmp_path / "odd[1].jsonl") == ROWS[5:6], "a path that exists is no pattern"


def test_junk_of_every_kind_is_counted_and_the_other_files_are_read(tmp_path: Path) -> None:
    junk = bytes(range(256)) * 40
    for name in ("a.parquet", "b.arrow", "c.json", "d.jsonl.gz", "e.jsonl"):
        (tmp_path / name).write_bytes(junk)
    (tmp_path / "f.json").write_bytes(b"[" + junk)
    write_jsonl(tmp_path / "z.jsonl", ROWS[:2])
    rows = read(tmp_path)
    assert [row.value for row in rows if not row.fault] == ROWS[:2]
    faults = {os.path.basename(row.file): row.fault for row in rows if row.fault}
    assert {name: fault.split(":")[0] for name, fault in faults.items()} == {
        "a.parquet": "unreadable parquet file",
        "b.arrow": "unreadable arrow file",
        "c.json": "broken JSON",
        "d.jsonl.gz": "unreadable lines file",
        "e.jsonl": "broken JSON",
        "f.json": "unreadable json file",
    }


def test_a_file_cut_in_its_middle_gives_its_rows_up_to_there(tmp_path: Path) -> None:
    write_arrow(tmp_path / "rows.arrow", ROWS, kind="stream")
    whole = (tmp_path / "rows.arrow").read_bytes()
    (tmp_path / "rows.arrow").write_bytes(whole[: len(whole) // 2])
    rows = read(tmp_path / "rows.arrow")
    assert [row.value for row in rows[:-1]] == ROWS[: len(rows) - 1]
    assert len(rows) > 200
    assert rows[-1].fault.startswith("unreadable arrow file")
    assert rows[-1].number == len(rows)


def test_broken_lines_are_named_by_number(tmp_path: Path) -> None:
    row = json.dumps(ROWS[0])
    (tmp_path / "c.jsonl").write_text(f'{row}\n\n{{"id":"x","messages":[\n{row},\n{row}')
    rows = read(tmp_path / "c.jsonl")
    assert [(row.number, row.fault) for row in rows] == [(1, ""), (3, "broken JSON"), (4, "broken JSON"), (5, "")]
    assert rows[1].place == f"{tmp_path}/c.jsonl, line 3"


def test_left_over_files_of_a_saved_data_set_are_not_read(tmp_path: Path) -> None:
    path = write_kind("saved", tmp_path)
    shutil.copy(next(path.glob("data-*.arrow")), path / "cache-0123.arrow")
    assert values(path) == ROWS
    assert values(tmp_path) == ROWS, "also from the directory above"


def test_splits_are_named_or_train(tmp_path: Path) -> None:
    path = write_kind("saved dict", tmp_path)
    assert values(path, split="test") == ROWS[:5]
    assert len(values(path, split="all")) == 605
    with pytest.raises(ValueError, match=r"no split 'dev'; name one by `split`: test, train, all"):
        read(path, split="dev")
    source = SourceConfig(path="x")
    assert choose_splits(["validation"], source) == ["validation"], "the only one"
    with pytest.raises(ValueError, match=r"no split 'train'; name one by `split`: a, b, all"):
        choose_splits(["a", "b"], source)


def test_a_long_array_is_never_whole_in_memory(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "x" * 2000}]}
    for name, text in (
        ("rows.json", "[" + ",".join([json.dumps(row)] * 8000) + "]"),
        ("rows.jsonl", (json.dumps(row) + "\n") * 8000),
    ):
        (tmp_path / name).write_text(text)
        source = SourceConfig(path=str(tmp_path / name))
        location = locate(source)
        tracemalloc.start()
        count = sum(1 for _ in read_rows(source, location))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == 8000
        assert len(text) > 16e6 > 4 * peak, "a quarter of the file at most"


# ---- what a path means ----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data/train, and no way to the network."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr("socket.getaddrinfo", refused)
    (tmp_path / "data" / "train").mkdir(parents=True)
    write_jsonl(tmp_path / "data" / "train" / "a.jsonl", ROWS[:2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", ["data/train", "./data", "data", "data/train/a.jsonl", "data/*/a.jsonl", "file://{here}/data"])
def test_an_existing_path_wins_over_a_hub_id(path: str, here: Path) -> None:
    assert values(path.format(here=here)) == ROWS[:2]


@pytest.mark.parametrize(
    "path",
    ["data/tarin", "./owner/name", "owner/name.jsonl", "owner/name.parquet", "/nowhere/x", "a/b/c", "tarin", "data/tarin/*.jsonl"]
    + ["~/no such", "../owner/name", "file:///nowhere"],
)
def test_a_missing_path_is_an_error_and_no_question_to_the_network(path: str, here: Path) -> None:
    with pytest.raises(ValueError, match=r"no such path"):
        locate(SourceConfig(path=path))


def test_hub_ids(here: Path) -> None:
    assert locate(SourceConfig(path="HuggingFaceH4/ultrachat_200k")).hub == "HuggingFaceH4/ultrachat_200k"
    assert locate(SourceConfig(path="hf://data/train")).hub == "data/train", "the scheme is clear"


@pytest.mark.parametrize("path", ["S3://bucket/x", "s4://bucket/x", "https://host/x.jsonl"])
def test_an_unknown_scheme_is_refused(path: str, here: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown scheme; known are s3://, hf://, file://"):
        locate(SourceConfig(path=path))


def test_a_directory_without_data_names_what_lies_there(here: Path) -> None:
    (here / "notes").mkdir()
    (here / "notes" / "README.md").write_text("x")
    with pytest.raises(ValueError, match=r"'notes': no data files there .*; ignored: README\.md"):
        locate(SourceConfig(path="notes"))


# ---- S3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet", "stream.arrow", "file.arrow", "saved", "saved dict"])
def test_every_kind_from_s3(kind: str, tmp_path: Path, s3: str) -> None:
    path = write_kind(kind, tmp_path)
    filesystem, root = fsspec.core.url_to_fs(s3)
    filesystem.put(str(path), f"{root}/{path.name}", recursive=path.is_dir())
    assert values(f"{s3}/{path.name}") == ROWS
    if path.is_file():
        assert values(f"{s3}/rows.*") == ROWS
        assert values(s3) == ROWS


def test_missing_and_new_objects_on_s3(tmp_path: Path, s3: str) -> None:
    with pytest.raises(ValueError, match=rf"'{s3}/x\.jsonl': no such path$"):
        locate(SourceConfig(path=f"{s3}/x.jsonl"))
    filesystem, root = fsspec.core.url_to_fs(s3)
    other = type(filesystem)(skip_instance_cache=True)  # as another process, whose writing is not in our listing
    other.pipe_file(f"{root}/x.jsonl", JSONL.encode())
    assert values(f"{s3}/x.jsonl") == ROWS
    before = source_ingredients([SourceConfig(path=s3)])
    assert source_ingredients([SourceConfig(path=f"{s3}/*.jsonl")]) == before
    other.pipe_file(f"{root}/x.jsonl", JSONL.replace("heron", "horse").encode())
    assert source_ingredients([SourceConfig(path=s3)]) != before


# ---- fingerprint ----------------------------------------------------------------------------------------------------


def test_ingredients_are_content_and_how_it_is_read(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", ROWS)
    moved = Path(shutil.copy(first, tmp_path / "b.jsonl"))
    here = source_ingredients([SourceConfig(path=str(first))])
    assert source_ingredients([SourceConfig(path=str(moved))]) == here
    stat = moved.stat()
    moved.write_text(moved.read_text().replace("heron", "horse"))
    os.utime(moved, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert moved.stat().st_size == stat.st_size
    assert source_ingredients([SourceConfig(path=str(moved))]) != here
    for options in ({"weight": 2.0}, {"max_rows": 3}, {"shape": "messages"}, {"columns": {"messages": "m"}}):
        assert source_ingredients([SourceConfig(path=str(first), **options)]) != here
