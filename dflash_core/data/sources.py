"""Sources to raw rows: files of any kind, directories, globs, S3 prefixes and hub data sets.

    SourceConfig --locate--> Location: files, ignored, empty  |  hub data set
                 --read_rows--> RawRow, RawRow, ...             one row (Parquet, Arrow: one batch) in memory at a time

A directory that `save_to_disk` wrote is read by its own list of files, so left-over cache files in it are not taken for rows.
"""

import bz2
import glob
import gzip
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from dflash_core.data.json_values import array_values, is_array, object_or_lines
from dflash_core.data_config import SourceConfig
from dflash_core.files import begins_at, file_sha256

Kind = Literal["lines", "json", "parquet", "arrow"]
KINDS: dict[str, Kind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
SCHEMES = ("s3", "hf", "file")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
BATCH_ROWS = 256


class RawRow(NamedTuple):
    """What stands at one place of a source, before anything is known about its shape."""

    value: Any
    file: str
    number: int  # line or row of the file, from 1
    unit: str = "row"
    columnar: bool = False  # from Parquet or Arrow, whose schema fills absent fields with null
    fault: str = ""  # why nothing could be read here

    @property
    def place(self) -> str:
        """`chats.jsonl, line 3`, for messages."""
        return f"{self.file}, {self.unit} {self.number}"


class DataFile(NamedTuple):
    """One file to read."""

    path: str  # as its file system writes it
    kind: Kind
    size: int


@dataclass(frozen=True, kw_only=True)
class Location:
    """What a source's path stands for: files of one file system, or a data set of the hub."""

    filesystem: Any = None
    files: tuple[DataFile, ...] = ()
    ignored: tuple[str, ...] = ()  # no kind that is read
    empty: tuple[str, ...] = ()  # zero bytes
    hub: str = ""  # owner/name


def locate(source: SourceConfig) -> Location:
    """Finds the files of a source, sorted by name. Raises ValueError where there are none; never asks the network about a name
    that may be a misspelt path.

    An existing path wins over a hub id; `owner/name` is a hub id only where no directory `owner` exists and `name` has no suffix
    of a data file; `hf://owner/name` always is.
    """
    from fsspec.core import url_to_fs

    path, complaint = source.path, f"data.conversations {source.path!r}"
    scheme = re.match(r"([A-Za-z][\w+.-]*)://", path)
    if scheme and scheme[1] not in SCHEMES:
        raise ValueError(f"{complaint}: unknown scheme; known are {', '.join(f'{name}://' for name in SCHEMES)}")
    if scheme and scheme[1] == "hf":
        return Location(hub=path.removeprefix("hf://"))
    filesystem, root = url_to_fs(path if scheme else os.path.expanduser(path))
    filesystem.invalidate_cache()  # another process may have written since it was listed
    if _exists(filesystem, root, complaint):
        found = [root]
    elif glob.has_magic(path):
        found = sorted(filesystem.glob(root))
    else:
        found = []
    if found:
        return _listed(filesystem, found, source, named=found == [root])
    if not scheme and HUB_ID.fullmatch(path) and _kind(path) is None and not os.path.isdir(path.split("/")[0]):
        return Location(hub=path)
    remedy = "" if scheme else "; a data set of the Hugging Face hub is written hf://owner/name"
    raise ValueError(f"{complaint}: no such path{begins_at(path)}{remedy}")


def _exists(filesystem: Any, root: str, complaint: str) -> bool:
    from botocore.exceptions import NoCredentialsError

    try:
        return bool(filesystem.exists(root))
    except (PermissionError, NoCredentialsError) as error:
        raise ValueError(f"{complaint}: {error}; AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY give access to S3") from error


def _listed(filesystem: Any, found: list[str], source: SourceConfig, *, named: bool) -> Location:
    files: list[DataFile] = []
    ignored: list[str] = []
    for path in found:
        info = filesystem.info(path)
        if info["type"] == "directory":
            _list_directory(filesystem, path, source, files, ignored)
        elif kind := _kind(path) or (_sniff(filesystem, path) if named else None):
            files.append(DataFile(path, kind, info["size"]))
        else:
            ignored.append(path)
    if not files:
        listed = f"; ignored: {', '.join(os.path.basename(path) for path in ignored[:5])}" if ignored else ""
        raise ValueError(f"data.conversations {source.path!r}: no data files there ({', '.join(KINDS)}){listed}")
    return Location(
        filesystem=filesystem,
        files=tuple(file for file in files if file.size),
        ignored=tuple(ignored),
        empty=tuple(file.path for file in files if not file.size),
    )


def _list_directory(filesystem: Any, directory: str, source: SourceConfig, files: list[DataFile], ignored: list[str]) -> None:
    entries = {entry["name"].rstrip("/"): entry for entry in filesystem.ls(directory, detail=True)}
    entries.pop(directory.rstrip("/"), None)  # S3 lists a directory's marker in itself
    names = {os.path.basename(name) for name in entries}
    if "dataset_dict.json" in names:
        splits = json.loads(filesystem.cat_file(f"{directory}/dataset_dict.json"))["splits"]
        for split in choose_splits(splits, source):
            _list_directory(filesystem, f"{directory}/{split}", source, files, ignored)
        return
    if {"state.json", "dataset_info.json"} <= names:
        files += _saved(filesystem, directory)
        return
    for name, entry in sorted(entries.items()):
        kind = _kind(name)
        if os.path.basename(name).startswith(".") or (entry["type"] == "file" and kind is None):
            ignored.append(name)
        elif entry["type"] == "directory":
            _list_directory(filesystem, name, source, files, ignored)
        elif kind:
            files.append(DataFile(name, kind, entry["size"]))


def _saved(filesystem: Any, directory: str) -> Iterator[DataFile]:
    """The files of a directory that `datasets` saved, in its order (datasets.arrow_dataset, `state.json`)."""
    state = json.loads(filesystem.cat_file(f"{directory}/state.json"))
    if state.get("_indices_data_files"):
        raise ValueError(f"{directory}: saved with a selection of rows beside it; save it again after `flatten_indices()`")
    for file in state["_data_files"]:
        path = f"{directory}/{file['filename']}"
        yield DataFile(path, "arrow", filesystem.info(path)["size"])


def choose_splits(splits: Sequence[str], source: SourceConfig) -> list[str]:
    """The splits to read: the one named, all of them, else `train` or the only one. Raises ValueError with those there are."""
    if source.split == "all":
        return list(splits)
    wanted = source.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
    if wanted not in splits:
        raise ValueError(
            f"data.conversations {source.path!r}: no split {wanted!r}; name one by `split`: {', '.join(splits)}, all"
        )
    return [wanted]


def _kind(path: str) -> Kind | None:
    stem, suffix = os.path.splitext(path.lower())
    if suffix in COMPRESSED:
        kind = KINDS.get(os.path.splitext(stem)[1])
        return kind if kind in ("lines", "json") else None
    return KINDS.get(suffix)


def _sniff(filesystem: Any, path: str) -> Kind:
    """The kind of a file that is named in the config and has no known suffix."""
    with filesystem.open(path, "rb") as file:
        head = file.read(6)
    return "parquet" if head[:4] == b"PAR1" else "arrow" if head == b"ARROW1" or head[:4] == b"\xff" * 4 else "lines"


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_rows(source: SourceConfig, location: Location) -> Iterator[RawRow]:
    """Rows of a source in the order of its files; a line or file that cannot be read is a row with a fault."""
    if location.hub:
        yield from _hub_rows(source, location.hub)
    for file in location.files:
        number = 0
        try:
            for row in _file_rows(location.filesystem, file):
                number = row.number
                yield row
        except _unreadable() as error:
            if isinstance(error, OSError) and error.errno is not None:  # the disk or network, not what the file holds
                raise
            yield RawRow(None, file.path, number + 1, fault=f"unreadable {file.kind} file: {str(error).splitlines()[0][:80]}")


def _unreadable() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowInvalid, UnicodeDecodeError, EOFError, zlib.error, lzma.LZMAError, OSError)


def _file_rows(filesystem: Any, file: DataFile) -> Iterator[RawRow]:
    with _open(filesystem, file.path) as stream:
        if file.kind == "parquet" or file.kind == "arrow":
            batches = _parquet_batches(stream) if file.kind == "parquet" else _arrow_batches(stream)
            values = (value for batch in batches for value in batch.to_pylist())
            yield from (RawRow(value, file.path, number, columnar=True) for number, value in enumerate(values, 1))
        elif file.kind == "json" and is_array(stream):
            for number, (value, fault) in enumerate(array_values(stream), 1):
                yield RawRow(value, file.path, number, fault=fault)
        else:
            for number, value, fault in object_or_lines(stream, lines_only=file.kind == "lines"):
                yield RawRow(value, file.path, number, "line", fault=fault)


@contextmanager
def _open(filesystem: Any, path: str) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked; mapped files are of no use here, where every byte is read once."""
    with ExitStack() as stack:
        stream: Any = stack.enter_context(filesystem.open(path, "rb"))
        if "file" not in filesystem.protocol:
            stream = stack.enter_context(BufferedReader(stream, 2**20))  # a line costs no call into the S3 client
        if unpack := COMPRESSED.get(os.path.splitext(path.lower())[1]):
            stream = stack.enter_context(unpack(stream))
        yield stream


def _parquet_batches(stream: IO[bytes]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(stream).iter_batches(batch_size=BATCH_ROWS)


def _arrow_batches(stream: IO[bytes]) -> Iterator[Any]:
    """Record batches of the stream or file format, cut into small ones."""
    import pyarrow as pa

    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if is_file:
        reader = pa.ipc.open_file(stream)
        batches: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        batches = pa.ipc.open_stream(stream)
    for batch in batches:
        yield from (batch.slice(start, BATCH_ROWS) for start in range(0, batch.num_rows, BATCH_ROWS))


def _hub_rows(source: SourceConfig, name: str) -> Iterator[RawRow]:
    """Rows of a hub data set, streamed."""
    from datasets import load_dataset

    data = load_dataset(name, source.subset, revision=source.revision, streaming=True)
    for split in choose_splits(list(data), source):
        for number, value in enumerate(data[split], 1):
            yield RawRow(value, f"hf://{name} {split}", number, columnar=True)


# ---- fingerprint -----------------------------------------------------------------------------------------------------


def source_ingredients(sources: Sequence[SourceConfig]) -> list[dict[str, Any]]:
    """What decides the rows of the sources: the content of their files and how each is read, but not where it lies.

    Content is the sha256 of a local file, size and ETag on S3, the commit of a hub data set. Raises ValueError as `locate` does.
    """
    return [source.model_dump(mode="json", exclude={"path", "revision"}) | {"content": _content(source)} for source in sources]


def _content(source: SourceConfig) -> list[str]:
    location = locate(source)
    if location.hub:
        from huggingface_hub import HfApi

        return [location.hub, str(HfApi().dataset_info(location.hub, revision=source.revision).sha)]
    filesystem = location.filesystem
    if "file" in filesystem.protocol:
        return [file_sha256(Path(file.path)) for file in location.files]
    return [f"{file.size} {filesystem.info(file.path).get('ETag') or filesystem.checksum(file.path)}" for file in location.files]
