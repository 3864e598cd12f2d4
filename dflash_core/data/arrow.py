"""Any Arrow file of token rows: what it holds is checked, and where its record batches lie is read out of its messages.

Stream and file format, list and large_list, any batching and any integers; masks may be bits.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from dflash_core.data.mapped import BatchPlaces, Lists, MappedShard, count_rows, lists_of, map_file

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
FILE_MAGIC = b"ARROW1"


class Columns(NamedTuple):
    """Names of the two list columns; files written here count the supervised tokens of a row in a third, `supervised`."""

    input_ids: str = "input_ids"
    loss_mask: str = "loss_mask"


COLUMNS = Columns()


def map_shard(path: Path, *, columns: Columns = COLUMNS) -> MappedShard:
    """Maps one Arrow file. Raises ValueError that names it where it is cut short, compressed, or has other columns."""
    memory = map_file(path)
    try:
        schema, batches = _read(path, memory)
        shard = _empty_shard(path, memory, schema, columns)
        for batch in batches:
            if batch.num_rows:
                shard.add(batch.num_rows, _places(shard, batch, columns))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cut short or no Arrow file ({error}); copy or prepare it anew") from error
    memory.madvise(mmap.MADV_RANDOM)  # rows are read in shuffled order: plain readahead reads far more than is used
    return shard


def _read(path: Path, memory: mmap.mmap) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    buffer, size = pa.py_buffer(memory), len(memory)
    if memory[: len(FILE_MAGIC)] == FILE_MAGIC:
        file = pa.ipc.open_file(buffer)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
    modern = memory[:4] == END_OF_STREAM[:4]
    mark = END_OF_STREAM if modern else END_OF_STREAM[4:]  # streams of Arrow before 0.15 have no continuation marks
    if memory[max(0, size - len(mark)) :] != mark:
        raise ValueError(f"{path}: cut short: {size} bytes do not end with Arrow's end-of-stream mark; copy or prepare it anew")
    stream = pa.ipc.open_stream(buffer)
    return stream.schema, stream


def _empty_shard(path: Path, memory: mmap.mmap, schema: pa.Schema, columns: Columns) -> MappedShard:
    lists = []
    for name, bits_allowed in zip(columns, (False, True), strict=True):
        kind = schema.field(name).type if schema.get_field_index(name) >= 0 else None
        lists.append(_list_views(path, memory, name, kind, schema, bits_allowed=bits_allowed))
    return MappedShard(path, memory, *lists)


def _list_views(path: Path, memory: mmap.mmap, name: str, kind: Any, schema: pa.Schema, *, bits_allowed: bool) -> Lists:
    if kind is None:
        raise ValueError(f"{path}: no column {name!r}, it has {', '.join(schema.names)}; name the columns in the config")
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    bits = is_list and bits_allowed and pa.types.is_boolean(kind.value_type)
    if not is_list or not (bits or pa.types.is_integer(kind.value_type)):
        raise ValueError(f"{path}: column {name!r} is {kind}; it must be list or large_list of integers")
    values = np.dtype(np.uint8) if bits else np.dtype(str(kind.value_type))  # to_pandas_dtype would import pandas
    return lists_of(memory, np.int64 if pa.types.is_large_list(kind) else np.int32, values, bits=bits)


def _places(shard: MappedShard, batch: pa.RecordBatch, columns: Columns) -> BatchPlaces:
    """Where in the file a record batch keeps its buffers."""
    id_offsets, ids = _list_places(shard, shard.ids, batch, columns.input_ids)
    mask_offsets, mask = _list_places(shard, shard.mask, batch, columns.loss_mask)
    number = batch.schema.get_field_index("supervised")
    counts = batch.column(number) if number >= 0 and batch.schema.field(number).type == pa.int32() else None
    supervised = -1 if counts is None else (counts.buffers()[1].address - _base(shard)) // 4 + counts.offset
    return BatchPlaces(id_offsets, ids, mask_offsets, mask, supervised)


def _base(shard: MappedShard) -> int:
    return shard.ids.offsets.ctypes.data


def _list_places(shard: MappedShard, lists: Lists, batch: pa.RecordBatch, name: str) -> tuple[int, int]:
    """(place of the first offset, place of the value that offset 0 means)."""
    column = batch.column(name)
    column.validate()
    _refuse_nulls(shard.path, shard.rows, name, column)
    _, offsets, _, values = column.buffers()
    at = offsets.address - _base(shard)
    zero = values.address - _base(shard) if values is not None and values.size else 0
    if not (0 <= at < len(shard.memory) and 0 <= zero < len(shard.memory)):
        raise ValueError(f"{shard.path}: its record batches are compressed and cannot be mapped; save it uncompressed")
    if at % lists.offsets.itemsize or zero % lists.values.itemsize:
        raise ValueError(f"{shard.path}: its buffers are not aligned to their type; save it again with pyarrow")
    first_value = zero * 8 if lists.bits else zero // lists.values.itemsize
    return at // lists.offsets.itemsize + column.offset, first_value + column.values.offset


def _refuse_nulls(path: Path, first: int, name: str, column: pa.Array) -> None:
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{path}: row {row} has no {name} (null), so have {count_rows(column.null_count)}; filter them out")
    if column.values.null_count and column.flatten().null_count:
        place = int(np.flatnonzero(column.flatten().is_null().to_numpy(zero_copy_only=False))[0])
        offsets = column.offsets.to_numpy()
        row = first + int(np.searchsorted(offsets, place + offsets[0], side="right")) - 1
        raise ValueError(f"{path}: row {row} has a null among its {name}; filter such rows out")
