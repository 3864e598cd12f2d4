"""Token rows on disk: a directory that `datasets.load_from_disk` opens, read through memory maps.

    TokenRow ... --write_shards--> DIR/data-00000-of-00002.arrow ...  dataset_info.json  state.json  manifest.json
                                     |
    TokenDataset(DIR): row i -> numpy views into the mapped buffers, no copy, nothing read before it is asked for

Files are Arrow *streams* with one record batch each when written here; any batching, slices and offsets are read.
A directory is written beside its final name and renamed, so it is complete or absent.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash_core.records import Manifest, ShardFile, TokenRow

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.int8())),
        pa.field("seq_len", pa.int32()),
    ]
)
MANIFEST = "manifest.json"


def _record_batch(rows: list[TokenRow]) -> pa.RecordBatch:
    columns = [
        pa.array([row.input_ids for row in rows], SCHEMA.field("input_ids").type),
        pa.array([row.loss_mask for row in rows], SCHEMA.field("loss_mask").type),
        pa.array([len(row.input_ids) for row in rows], pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def write_stream(path: Path, rows: Iterable[TokenRow], *, batch_rows: int = 1024) -> int:
    """Token rows into one Arrow stream file, written beside and renamed; returns the number of rows."""
    beside = path.with_name(path.name + ".partial")
    count = 0
    with pa.OSFile(str(beside), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        for chunk in _chunks(rows, batch_rows):
            writer.write_batch(_record_batch(chunk))
            count += len(chunk)
    os.replace(beside, path)
    return count


def _chunks(rows: Iterable[TokenRow], size: int) -> Iterator[list[TokenRow]]:
    chunk: list[TokenRow] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def read_stream(path: Path) -> Iterator[TokenRow]:
    """The rows of a file that `write_stream` made, in order."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            for row in batch.to_pylist():
                yield TokenRow(id="", input_ids=row["input_ids"], loss_mask=row["loss_mask"])


def write_shards(
    directory: Path,
    rows: Iterable[TokenRow],
    *,
    shard_tokens: int,
    fingerprint: str,
    ingredients: dict[str, Any],
    ledger: dict[str, Any],
) -> Manifest:
    """Rows into `directory` (which must not exist): shards of about `shard_tokens` tokens and the manifest.

    Whatever goes wrong, no directory of that name appears.
    """
    beside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    shards: list[ShardFile] = []
    for group in _by_tokens(rows, shard_tokens):
        shards.append(_write_shard(beside, len(shards), group))
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for shard, name in zip(shards, names, strict=True):
        os.rename(beside / shard.name, beside / name)
    shards = [dataclasses.replace(shard, name=name) for shard, name in zip(shards, names, strict=True)]
    manifest = Manifest(
        shards=tuple(shards),
        rows=sum(shard.rows for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        supervised=sum(shard.supervised for shard in shards),
        fingerprint=fingerprint,
        ingredients=ingredients,
        ledger=ledger,
    )
    _write_json(beside / "dataset_info.json", _dataset_info())
    _write_json(beside / "state.json", _dataset_state(names, fingerprint))
    _write_json(beside / MANIFEST, dataclasses.asdict(manifest))
    os.rename(beside, directory)
    return manifest


def _by_tokens(rows: Iterable[TokenRow], limit: int) -> Iterator[list[TokenRow]]:
    group: list[TokenRow] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += len(row.input_ids)
        if tokens >= limit:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _write_shard(directory: Path, index: int, rows: list[TokenRow]) -> ShardFile:
    path = directory / f"shard-{index}"
    write_stream(path, rows, batch_rows=len(rows))
    return ShardFile(
        name=path.name,
        rows=len(rows),
        tokens=sum(len(row.input_ids) for row in rows),
        supervised=sum(sum(row.loss_mask) for row in rows),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def _dataset_info() -> dict[str, Any]:
    def feature(dtype: str) -> dict[str, str]:
        return {"dtype": dtype, "_type": "Value"}

    return {
        "citation": "",
        "description": "",
        "homepage": "",
        "license": "",
        "features": {
            "input_ids": {"feature": feature("int32"), "_type": "List"},
            "loss_mask": {"feature": feature("int8"), "_type": "List"},
            "seq_len": feature("int32"),
        },
    }


def _dataset_state(names: list[str], fingerprint: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a complete shard directory, None where there is none."""
    path = directory / MANIFEST
    if not path.is_file():
        return None
    value = json.loads(path.read_text(encoding="utf-8"))
    return Manifest(**{**value, "shards": tuple(ShardFile(**shard) for shard in value["shards"])})


def check_shards(directory: Path, manifest: Manifest, *, checksums: bool = False) -> None:
    """Raises ValueError naming the first shard whose size (or, if asked, sha256) is not the manifest's."""
    remedy = f"delete {directory} and run again to prepare the data anew"
    for shard in manifest.shards:
        path = directory / shard.name
        if not path.is_file():
            raise ValueError(f"shard {path}: missing; {remedy}")
        if (size := path.stat().st_size) != shard.bytes:
            raise ValueError(f"shard {path}: {size} bytes, the manifest says {shard.bytes}; {remedy}")
        if checksums and file_sha256(path) != shard.sha256:
            raise ValueError(f"shard {path}: its sha256 is not the manifest's; {remedy}")


class TokenDataset:
    """Rows of a shard directory as numpy views; opening reads Arrow's messages, offsets and masks, but no ids.

    `lengths` and `supervised` are int32 [rows]. Views are read-only: the memory is the mapped file.
    """

    def __init__(self, directory: Path) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        starts = [0]
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        for entry in state["_data_files"]:
            path = directory / entry["filename"]
            for batch in pa.ipc.open_stream(pa.memory_map(str(path))):
                part = (*_list_views(batch.column("input_ids")), *_list_views(batch.column("loss_mask")))
                _check_lengths(path, starts[-1], part[0], part[2])
                self._parts.append(part)
                starts.append(starts[-1] + batch.num_rows)
        self._starts = np.asarray(starts)
        self.lengths = self._per_row(lambda part: np.diff(part[0]))
        self.supervised = self._per_row(lambda part: _sums(part[2], part[3]))

    def _per_row(self, count: Any) -> np.ndarray:
        if not self._parts:
            return np.zeros(0, np.int32)
        return np.concatenate([count(part) for part in self._parts]).astype(np.int32)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of one row: (input_ids [T], loss_mask [T])."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        id_offsets, ids, mask_offsets, mask = self._parts[part]
        place = index - self._starts[part]
        return ids[id_offsets[place] : id_offsets[place + 1]], mask[mask_offsets[place] : mask_offsets[place + 1]]


def _list_views(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [rows+1], values): `.offsets` honours a slice, and indexes into the values before `.flatten`."""
    return column.offsets.to_numpy(zero_copy_only=True), column.values.to_numpy(zero_copy_only=True)


def _check_lengths(path: Path, first_row: int, id_offsets: np.ndarray, mask_offsets: np.ndarray) -> None:
    ids, mask = np.diff(id_offsets), np.diff(mask_offsets)
    if (unequal := np.flatnonzero(ids != mask)).size:
        place = int(unequal[0])
        raise ValueError(f"{path}: row {first_row + place} has {ids[place]} input_ids, {mask[place]} loss_mask values")


def _sums(offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    totals = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return totals[offsets[1:]] - totals[offsets[:-1]]
