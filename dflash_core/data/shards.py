"""Token rows on disk: a directory that `datasets.load_from_disk` opens, and its manifest.

    record batches --write_shards--> DIR/data-00000-of-00002.arrow ...  dataset_info.json  state.json  manifest.json

Files are Arrow *streams* of one record batch each. A directory is written beside its final name, every file fsynced, and renamed,
so it is complete or absent. Reading is `reader.TokenDataset`, checking is `verification`.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dflash_core.data.arrow import map_shard
from dflash_core.data.mapped import row_sums
from dflash_core.files import file_sha256, sync, write_json, written_beside
from dflash_core.records import Manifest, ShardFile, TokenRow

ROWS = pa.schema([pa.field("input_ids", pa.list_(pa.int32())), pa.field("loss_mask", pa.list_(pa.int8()))])
SCHEMA = ROWS.append(pa.field("seq_len", pa.int32())).append(pa.field("supervised", pa.int32()))
MANIFEST = "manifest.json"
TOKEN_BYTES, ROW_BYTES = 5, 16  # what a token and a row weigh in a shard
MOST_TOKENS = 2**30  # of a shard: Arrow's list offsets end at 2**31
SHARD_BYTES = 2**30  # a shard is built in memory


# ---- rows between steps ----------------------------------------------------------------------------------------------


def batches_of(rows: Iterable[TokenRow], *, batch_rows: int = 1024) -> Iterator[pa.RecordBatch]:
    """Token rows as record batches of the schema ROWS, `batch_rows` at a time."""
    chunk: list[TokenRow] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == batch_rows:
            yield _batch(chunk)
            chunk = []
    if chunk:
        yield _batch(chunk)


def _batch(rows: list[TokenRow]) -> pa.RecordBatch:
    columns = [[row.input_ids for row in rows], [row.loss_mask for row in rows]]
    return pa.RecordBatch.from_arrays([pa.array(c, f.type) for c, f in zip(columns, ROWS, strict=True)], schema=ROWS)


def write_batches(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Record batches of the schema ROWS into one Arrow stream file, written beside and renamed; returns the number of rows."""
    count = 0
    with written_beside(path) as place, pa.OSFile(str(place), "wb") as sink, pa.ipc.new_stream(sink, ROWS) as writer:
        for batch in batches:
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def write_stream(path: Path, rows: Iterable[TokenRow], *, batch_rows: int = 1024) -> int:
    """Token rows into one Arrow stream file, written beside and renamed; returns the number of rows."""
    return write_batches(path, batches_of(rows, batch_rows=batch_rows))


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow stream file, in order; they lie in the mapped file, so a batch costs no memory."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        yield from stream


def read_stream(path: Path) -> Iterator[TokenRow]:
    """The rows of a file that `write_stream` made, in order."""
    for batch in read_batches(path):
        for row in batch.to_pylist():
            yield TokenRow(id="", input_ids=row["input_ids"], loss_mask=row["loss_mask"])


# ---- shards ----------------------------------------------------------------------------------------------------------


def write_shards(
    directory: Path,
    batches: Iterable[pa.RecordBatch],
    *,
    shard_tokens: int,
    fingerprint: str,
    ingredients: dict[str, Any],
    ledger: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Record batches with the columns of ROWS into `directory` (which must not exist), in order, and the manifest.

    A shard is closed when it holds `shard_tokens` tokens or weighs `shard_bytes`; one shard at a time is in memory. Whatever goes
    wrong, no directory of that name appears. Raises ValueError for a row that is empty, null, or as long as its mask is not, and
    FileExistsError where `directory` exists.
    """
    if not 1 <= shard_tokens <= MOST_TOKENS:
        raise ValueError(f"shard_tokens {shard_tokens}: outside 1..{MOST_TOKENS}, Arrow's list offsets are 32-bit")
    if directory.exists():
        raise FileExistsError(f"{directory} exists; shards are never written over")
    beside = directory.with_name(directory.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    groups = _groups(batches, shard_tokens, shard_bytes)
    written = [_write_shard(beside / f"shard-{number}", group) for number, group in enumerate(groups)]
    names = [f"data-{number:05d}-of-{len(written):05d}.arrow" for number in range(len(written))]
    for shard, name in zip(written, names, strict=True):
        os.rename(beside / shard.name, beside / name)
    shards = tuple(dataclasses.replace(shard, name=name) for shard, name in zip(written, names, strict=True))
    manifest = Manifest(
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        supervised=sum(shard.supervised for shard in shards),
        fingerprint=fingerprint,
        ingredients=ingredients,
        ledger=ledger,
    )
    write_json(beside / "dataset_info.json", _dataset_info(), durable=True)
    write_json(beside / "state.json", _dataset_state(names, fingerprint), durable=True)
    write_json(beside / MANIFEST, dataclasses.asdict(manifest), durable=True)
    sync(beside)
    os.rename(beside, directory)
    sync(directory.parent)
    return manifest


def _groups(batches: Iterable[pa.RecordBatch], shard_tokens: int, shard_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """The batches of each shard, cut where a shard is full."""
    group: list[pa.RecordBatch] = []
    tokens = rows = 0
    for batch in batches:
        batch = batch.select(ROWS.names)
        lengths = _lengths(batch)
        while batch.num_rows:
            tokens_after = tokens + np.cumsum(lengths, dtype=np.int64)
            bytes_after = TOKEN_BYTES * tokens_after + ROW_BYTES * (rows + 1 + np.arange(batch.num_rows))
            full = np.flatnonzero((tokens_after >= shard_tokens) | (bytes_after >= shard_bytes))
            taken = int(full[0]) + 1 if full.size else batch.num_rows
            group.append(batch.slice(0, taken))
            tokens, rows = int(tokens_after[taken - 1]), rows + taken
            if full.size:
                yield group
                group, tokens, rows = [], 0, 0
            batch, lengths = batch.slice(taken), lengths[taken:]
    if group:
        yield group


def _lengths(batch: pa.RecordBatch) -> np.ndarray:
    """int32 [rows] of a batch whose rows can be written."""
    if batch.schema.remove_metadata() != ROWS:
        raise ValueError(f"token rows must have the columns {ROWS}, not {batch.schema}")
    if batch.column(0).null_count or batch.column(1).null_count:
        raise ValueError("a token row is null; rows to write have ids and a mask")
    ids, mask = (pc.list_value_length(column).to_numpy() for column in batch.columns)
    if (bad := np.flatnonzero((ids != mask) | (ids < 1))).size:
        at = int(bad[0])
        raise ValueError(f"a token row has {ids[at]} input_ids and {mask[at]} loss_mask values; both must be there, and as many")
    return ids


def _write_shard(path: Path, group: list[pa.RecordBatch]) -> ShardFile:
    ids, mask = (pa.concat_arrays([batch.column(i) for batch in group]) for i in range(2))
    group.clear()
    values = mask.flatten().to_numpy()
    offsets = mask.offsets.to_numpy()
    supervised = row_sums(offsets - offsets[0], values)
    seq_len = np.diff(offsets).astype(np.int32, copy=False)
    batch = pa.RecordBatch.from_arrays([ids, mask, pa.array(seq_len), pa.array(supervised)], schema=SCHEMA)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch)
    sync(path)
    return ShardFile(
        name=path.name,
        rows=batch.num_rows,
        tokens=len(values),
        supervised=int(supervised.sum(dtype=np.int64)),
        max_id=int(ids.flatten().to_numpy().max()),
        places=map_shard(path).places(0),
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
            "supervised": feature("int32"),
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


# ---- the manifest ----------------------------------------------------------------------------------------------------


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a complete shard directory, None where there is none. Raises ValueError for one of another version."""
    path = directory / MANIFEST
    return parse_manifest(path.read_bytes(), str(path)) if path.is_file() else None


def parse_manifest(text: bytes, name: str) -> Manifest:
    """A manifest from its file's bytes; `name` stands in errors."""
    try:
        value = json.loads(text)
        return Manifest(**{**value, "shards": tuple(_shard_file(shard) for shard in value["shards"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name}: no manifest of this version ({error}); prepare the data anew") from error


def _shard_file(value: dict[str, Any]) -> ShardFile:
    return ShardFile(**{**value, "places": tuple(value["places"])})


def check_shards(directory: Path, manifest: Manifest, *, checksums: bool = False) -> None:
    """Raises ValueError naming the first shard whose size (or, if asked, sha256) is not the manifest's."""
    remedy = f"delete {directory} and run again to prepare the data anew"
    for shard in manifest.shards:
        path = directory / shard.name
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            raise ValueError(f"shard {path}: missing; {remedy}") from None
        if size != shard.bytes:
            raise ValueError(f"shard {path}: {size} bytes, the manifest says {shard.bytes}; {remedy}")
        if checksums and file_sha256(path) != shard.sha256:
            raise ValueError(f"shard {path}: its sha256 is not the manifest's; {remedy}")
