"""One file of token rows, mapped: row i is two views into it, nothing copied, nothing read before it is asked for.

Views span the whole file, one a column and kind of buffer, and a record batch is five numbers that place it in them: the index costs
48 bytes a record batch and nothing a row. Where the numbers come from: `arrow.map_shard` reads them out of any Arrow file; for files
written here the manifest has them, and `map_written` needs no parsing.
"""

from __future__ import annotations

import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PIECE = 2**20  # values looked at together, so that scanning a file needs no memory of the file's size


class BatchPlaces(NamedTuple):
    """Where a record batch keeps its buffers in the file, counted in items of the buffer's type (bits, for a mask of bits)."""

    id_offsets: int  # the first offset
    ids: int  # the value that offset 0 means
    mask_offsets: int
    mask: int
    supervised: int  # int32 supervised tokens of the first row; -1 where the file has no such column


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A list column over the whole file: offsets and values as the file's bytes give them when read in that type."""

    offsets: np.ndarray  # int32 or int64
    offset_at: memoryview  # the same; its items are Python's integers, at a third of the time
    values: np.ndarray  # any integer; uint8 with eight values each where `bits`
    bits: bool
    first_offset: array[int] = field(default_factory=lambda: array("q"))  # [batches]
    first_value: array[int] = field(default_factory=lambda: array("q"))  # [batches]

    def span(self, batch: int, place: int) -> tuple[int, int]:
        """First byte in the file of a row's values, and the one after its last."""
        at, zero, size = self.first_offset[batch] + place, self.first_value[batch], self.values.itemsize
        start, stop = zero + self.offset_at[at], zero + self.offset_at[at + 1]
        return (start // 8, -(-stop // 8)) if self.bits else (start * size, stop * size)

    def cut(self, start: int, stop: int) -> np.ndarray:
        """Values from one place to another, counted over the file: a view, or unpacked where they are bits."""
        if not self.bits:
            return self.values[start:stop]
        packed = self.values[start // 8 : -(-stop // 8)]
        return np.unpackbits(packed, count=stop - start // 8 * 8, bitorder="little")[start % 8 :]

    def offsets_of(self, batch: int, rows: int) -> np.ndarray:
        """Offsets [rows + 1] of a record batch."""
        at = self.first_offset[batch]
        return self.offsets[at : at + rows + 1]

    def pieces(self, batch: int, rows: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(first row, offsets, values) over a record batch, about PIECE values at a time; offsets count from the piece's start."""
        offsets, zero, start = self.offsets_of(batch, rows), self.first_value[batch], 0
        while start < rows:
            stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + PIECE, side="right")) - 1)
            begin, end = int(offsets[start]), int(offsets[stop])
            yield start, offsets[start : stop + 1] - begin, self.cut(zero + begin, zero + end)
            start = stop


class MappedShard:
    """Rows of one mapped file, numbered from 0; record batches are added in order. Views are read-only and keep the mapping alive."""

    def __init__(self, path: Path, memory: mmap.mmap, ids: Lists, mask: Lists) -> None:
        self.path, self.memory, self.ids, self.mask = path, memory, ids, mask
        self.firsts = array("q", [0])  # [batches + 1] first row of each record batch
        self.counts = array("q")  # [batches] place of the column `supervised`, -1 where there is none

    def add(self, rows: int, places: BatchPlaces) -> None:
        """The next record batch."""
        for lists, at, zero in ((self.ids, *places[:2]), (self.mask, *places[2:4])):
            lists.first_offset.append(at)
            lists.first_value.append(zero)
        self.counts.append(places.supervised)
        self.firsts.append(self.firsts[-1] + rows)

    def places(self, batch: int) -> BatchPlaces:
        """Where a record batch lies."""
        lists = (self.ids.first_offset, self.ids.first_value, self.mask.first_offset, self.mask.first_value, self.counts)
        return BatchPlaces(*(one[batch] for one in lists))

    @property
    def rows(self) -> int:
        return self.firsts[-1]

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """(record batch, its first row, its rows)."""
        for batch in range(len(self.firsts) - 1):
            yield batch, self.firsts[batch], self.firsts[batch + 1] - self.firsts[batch]

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids [T], loss_mask [T]) of a row that is there: views, or a mask unpacked where it is bits."""
        batch = bisect_right(self.firsts, index) - 1
        place = index - self.firsts[batch]
        ids, mask = self.ids, self.mask  # written out for both: a call a column is a third of the time that a row takes
        at, zero, offset_at = ids.first_offset[batch] + place, ids.first_value[batch], ids.offset_at
        values = ids.values[zero + offset_at[at] : zero + offset_at[at + 1]]
        at, zero, offset_at = mask.first_offset[batch] + place, mask.first_value[batch], mask.offset_at
        start, stop = zero + offset_at[at], zero + offset_at[at + 1]
        return values, mask.cut(start, stop) if mask.bits else mask.values[start:stop]

    def lengths(self) -> np.ndarray:
        """int32 [rows], from the offsets alone. Raises ValueError for an empty row or one whose mask has another length."""
        out = np.empty(self.rows, np.int32)
        for batch, first, rows in self.batches():
            offsets = [lists.offsets_of(batch, rows) for lists in (self.ids, self.mask)]
            for lists, part in zip((self.ids, self.mask), offsets, strict=True):
                start = lists.first_offset[batch] * part.itemsize
                self.will_need(start, start + part.nbytes)
            ids, mask = np.diff(offsets[0]), np.diff(offsets[1])
            if (bad := np.flatnonzero((ids != mask) | (ids < 1))).size:
                at = int(bad[0])
                raise ValueError(
                    f"{self.path}: row {first + at} has {ids[at]} input_ids and {mask[at]} loss_mask values; "
                    f"{count_rows(bad.size)} of this file must be as long as their mask and not empty: filter them out"
                )
            out[first : first + rows] = ids
        return out

    def supervised(self) -> np.ndarray:
        """int32 [rows] supervised tokens: the stored column, or counted from the masks (which reads them all).

        Raises ValueError for a mask value other than 0 and 1.
        """
        if any(place < 0 for place in self.counts):
            return self.count_masks()
        out = np.empty(self.rows, np.int32)
        for batch, first, rows in self.batches():
            out[first : first + rows] = np.frombuffer(self.memory, np.int32, rows, 4 * self.counts[batch])
        return out

    def count_masks(self) -> np.ndarray:
        """int32 [rows] supervised tokens, counted from the masks. Raises ValueError for a mask value other than 0 and 1."""
        out = np.empty(self.rows, np.int32)
        for batch, first, rows in self.batches():
            for start, offsets, values in self.mask.pieces(batch, rows):
                if values.size and (values.min() < 0 or values.max() > 1):
                    at = int(np.flatnonzero((values < 0) | (values > 1))[0])
                    row = first + start + int(np.searchsorted(offsets, at, side="right")) - 1
                    raise ValueError(f"{self.path}: row {row} has the loss_mask value {values[at]}; a mask is 0 and 1")
                out[first + start : first + start + len(offsets) - 1] = row_sums(offsets, values)
        return out

    def id_range(self) -> tuple[int, int]:
        """(smallest, largest) token id of the file; reads all of it. (0, 0) where there is none."""
        low, high = 0, 0
        for batch, _, rows in self.batches():
            for _, _, values in self.ids.pieces(batch, rows):
                if values.size:
                    low, high = min(low, int(values.min())), max(high, int(values.max()))
        return low, high

    def row_with_id(self, token: int) -> int:
        """The first row that holds a token id."""
        return next(row for row in range(self.rows) if (self.row(row)[0] == token).any())

    def prefetch(self, index: int) -> None:
        """Tells the kernel that a row is read soon."""
        batch = bisect_right(self.firsts, index) - 1
        for lists in (self.ids, self.mask):
            start, stop = lists.span(batch, index - self.firsts[batch])
            self.will_need(start, stop)

    def will_need(self, start: int, stop: int) -> None:
        """Tells the kernel that these bytes are read soon, as one piece: the mapping is set for random rows, without readahead."""
        page = start - start % mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_WILLNEED, page, max(1, stop - page))


def row_sums(offsets: np.ndarray, values: np.ndarray) -> np.ndarray:
    """int32 [rows] sums of values[offsets[i]:offsets[i+1]]; `offsets` starts at 0 and ends at len(values)."""
    rows = np.flatnonzero(np.diff(offsets))  # reduceat takes an empty span for one of length 1
    sums = np.zeros(len(offsets) - 1, np.int32)
    if rows.size:
        sums[rows] = np.add.reduceat(values, offsets[rows], dtype=np.int32)
    return sums


def count_rows(count: int) -> str:
    """`1 row`, `2 rows`."""
    return f"{count} row" + ("s" if count != 1 else "")


# ---- mapping ---------------------------------------------------------------------------------------------------------


def map_file(path: Path) -> mmap.mmap:
    """A file, mapped for reading. Raises ValueError where it is empty."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if os.fstat(handle).st_size == 0:
            raise ValueError(f"{path}: empty file, no Arrow data")
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)


def lists_of(memory: mmap.mmap, offsets: type[np.signedinteger[Any]], values: Any, *, bits: bool = False) -> Lists:
    """A list column without record batches yet."""
    words = _whole(memory, offsets)
    return Lists(offsets=words, offset_at=words.data, values=_whole(memory, values), bits=bits)


def _whole(memory: mmap.mmap, kind: Any) -> np.ndarray:
    return np.frombuffer(memory, kind, len(memory) // np.dtype(kind).itemsize)


def map_written(path: Path, rows: int, places: BatchPlaces) -> MappedShard:
    """A file that `shards.write_shards` made, by what its manifest says of it. Raises ValueError where that lies outside the file."""
    memory = map_file(path)
    last_bytes = (4 * places.id_offsets, 4 * places.ids, 4 * places.mask_offsets, places.mask, 4 * places.supervised)
    if max(last_bytes) + 4 * rows > len(memory) or min(places) < 0:
        raise ValueError(f"shard {path}: {len(memory)} bytes are not what its manifest says; prepare the data anew")
    memory.madvise(mmap.MADV_RANDOM)  # rows are read in shuffled order: plain readahead reads far more than is used
    words, octets = _whole(memory, np.int32), _whole(memory, np.int8)
    ids, mask = (Lists(offsets=words, offset_at=words.data, values=values, bits=False) for values in (words, octets))
    shard = MappedShard(path, memory, ids, mask)
    shard.add(rows, places)
    return shard
