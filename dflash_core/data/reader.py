"""Rows of any number of shard directories, ready at once: views into mapped files.

    DIR, DIR ... --find_shards--> ShardSet ... --TokenDataset--> lengths, supervised [rows]; row i -> (input_ids, loss_mask)

Directories written by `shards.write_shards`, and any that `datasets.save_to_disk` left with two list columns of integers, whatever
their layout. Opening maps the files and reads Arrow's messages; nothing of the rows is read before it is asked for.
"""

import hashlib
import json
import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np

from dflash_core.config import fingerprint
from dflash_core.data.arrow import COLUMNS, Columns, map_shard
from dflash_core.data.mapped import BatchPlaces, MappedShard, map_written
from dflash_core.data.shards import MANIFEST, check_shards, read_manifest
from dflash_core.records import Manifest, ShardFile

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """The Arrow files of one directory or URI, on this machine."""

    name: str  # as errors and fingerprints name it
    files: tuple[Path, ...]
    manifest: Manifest | None  # None: saved by others; its shards are checked by their content
    held: tuple[IO[bytes], ...] = ()  # locks that keep cached files from being evicted, for as long as this lives


def find_shards(directory: Path) -> ShardSet:
    """The files of a directory that `datasets.load_from_disk` opens; sizes are checked where it has a manifest.

    Raises ValueError where it is none, or not as its manifest says.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory.absolute()}: no such directory (a place without a scheme is local; S3 is s3://bucket/key)")
    if (directory / "dataset_dict.json").is_file():
        splits = json.loads((directory / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise ValueError(f"{directory} holds the splits {', '.join(splits)}; name one of them, as {directory / splits[0]}")
    manifest = read_manifest(directory)
    if manifest is not None:
        check_shards(directory, manifest)
        names = [shard.name for shard in manifest.shards]
    else:
        names = data_files(directory)
        LOG.info("%s has no %s: its shards are checked by their content", directory, MANIFEST)
    return ShardSet(name=str(directory), files=tuple(directory / name for name in names), manifest=manifest)


def data_files(directory: Path) -> list[str]:
    """Names of the Arrow files of a directory of `datasets.save_to_disk`. Raises ValueError where it is none."""
    state_file = directory / "state.json"
    if not state_file.is_file():
        raise ValueError(f"{directory}: not a complete shard set: state.json missing")
    state = json.loads(state_file.read_text(encoding="utf-8"))
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(f"{directory}: its rows are chosen by an index file; save it again after Dataset.flatten_indices()")
    return [entry["filename"] for entry in state["_data_files"]]


class TokenDataset:
    """Rows of shard sets, numbered through. Views are read-only: the memory is the mapped files.

    `before_use(shard)` is called once before the first row of a shard is handed out, in the thread that asks; it may raise.
    Counted tokens of files without a manifest are kept under `index`, where it is given.
    """

    def __init__(
        self,
        source: Path | Sequence[ShardSet],
        *,
        columns: Columns = COLUMNS,
        index: Path | None = None,
        before_use: Callable[[int], None] | None = None,
    ) -> None:
        self.sets = (find_shards(source),) if isinstance(source, Path) else tuple(source)
        self._columns, self._index = columns, index
        self._before_use = before_use
        self._shards: list[MappedShard] = []
        self._written: list[ShardFile | None] = []
        self._firsts = array("q", [0])
        for one in self.sets:
            written: Sequence[ShardFile | None] = one.manifest.shards if one.manifest else [None] * len(one.files)
            for path, shard in zip(one.files, written, strict=True):
                mapped = map_written(path, shard.rows, BatchPlaces(*shard.places)) if shard else map_shard(path, columns=columns)
                self._add(mapped, shard)
        self._unused = set(range(len(self._shards))) if before_use else set()

    def _add(self, mapped: MappedShard, written: ShardFile | None) -> None:
        self._shards.append(mapped)
        self._written.append(written)
        self._firsts.append(self._firsts[-1] + mapped.rows)

    def __len__(self) -> int:
        return self._firsts[-1]

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of one row: (input_ids [T], loss_mask [T]), in the types of the file; masks of bits are unpacked to uint8."""
        if not 0 <= index < self._firsts[-1]:
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect_right(self._firsts, index) - 1
        if number in self._unused:
            self._use(number)
        return self._shards[number].row(index - self._firsts[number])

    def heads(self, rows: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The first `sizes[i]` tokens, never more than it has, of each row `rows[i]`, as `row` gives them.

        All in one function: through `row` it takes twice the time, as much as copying the tokens does.
        """
        firsts, shards, unused = self._firsts, self._shards, self._unused
        for index, size in zip(rows, sizes, strict=True):
            number = bisect_right(firsts, index) - 1
            if number in unused:
                self._use(number)
            shard, place = shards[number], index - firsts[number]
            batch = bisect_right(shard.firsts, place) - 1
            place -= shard.firsts[batch]
            ids, mask = shard.ids, shard.mask
            start = ids.first_value[batch] + ids.offset_at[ids.first_offset[batch] + place]
            first = mask.first_value[batch] + mask.offset_at[mask.first_offset[batch] + place]
            marks = mask.cut(first, first + size) if mask.bits else mask.values[first : first + size]
            yield ids.values[start : start + size], marks

    def _use(self, number: int) -> None:
        assert self._before_use is not None
        self._before_use(number)
        self._unused.discard(number)

    def prefetch(self, rows: Sequence[int]) -> None:
        """Tells the kernel that these rows are read soon: on a cold disk their pages then come together, not one by one."""
        for index in rows:
            number = bisect_right(self._firsts, index) - 1
            self._shards[number].prefetch(index - self._firsts[number])

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [rows] tokens. Raises ValueError for an empty row or one whose mask has another length."""
        return _joined([shard.lengths() for shard in self._shards])

    @cached_property
    def supervised(self) -> np.ndarray:
        """int32 [rows] supervised tokens: stored in our shards, counted from the masks of others. Raises ValueError for a bad mask."""
        return _joined([self._supervised(*pair) for pair in zip(self._shards, self._written, strict=True)])

    def _supervised(self, shard: MappedShard, written: ShardFile | None) -> np.ndarray:
        if written is None:
            return self._counted(shard)
        counts = shard.supervised()
        if (total := int(counts.sum(dtype=np.int64))) != written.supervised:
            raise ValueError(f"shard {shard.path}: {total} supervised tokens, the manifest says {written.supervised}")
        return counts

    def _counted(self, shard: MappedShard) -> np.ndarray:
        if self._index is None:
            return shard.count_masks()
        key = fingerprint([str(shard.path.absolute()), self._columns.loss_mask, *identity(shard.path)])
        kept = self._index / f"{key[:32]}.supervised.npy"
        if kept.is_file():
            return np.load(kept)
        counts = shard.count_masks()
        self._index.mkdir(parents=True, exist_ok=True)
        beside = kept.with_name(f"{kept.name}.{os.getpid()}.partial")
        with open(beside, "wb") as file:
            np.save(file, counts)
        os.replace(beside, kept)
        return counts

    def manifest(self) -> Manifest:
        """What all sets together hold: the manifest itself where there is one set that has it.

        The fingerprint of a set without a manifest is over its files' sizes, row lengths and supervised tokens.
        """
        if len(self.sets) == 1 and self.sets[0].manifest is not None:
            return self.sets[0].manifest
        shards, number = [], 0
        facts: list[object] = []
        for one in self.sets:
            count = len(one.files)
            found = [self._shard_file(i) for i in range(number, number + count)]
            facts.append(one.manifest.fingerprint if one.manifest else [(f.bytes, f.rows, f.sha256) for f in found])
            shards += found
            number += count
        ledgers = {one.name: one.manifest.ledger for one in self.sets if one.manifest}
        return Manifest(
            shards=tuple(shards),
            rows=len(self),
            tokens=sum(shard.tokens for shard in shards),
            supervised=sum(shard.supervised for shard in shards),
            fingerprint=fingerprint(facts),
            ingredients={"directories": [one.name for one in self.sets]},
            ledger={"rows_in": len(self), "kept": len(self), "cut": 0, "dropped": {}, "sources": ledgers},
        )

    def _shard_file(self, number: int) -> ShardFile:
        mapped, written = self._shards[number], self._written[number]
        if written is not None:
            return written
        span = slice(self._firsts[number], self._firsts[number + 1])
        lengths, supervised = self.lengths[span], self.supervised[span]
        return ShardFile(
            name=str(mapped.path),
            rows=mapped.rows,
            tokens=int(lengths.sum(dtype=np.int64)),
            supervised=int(supervised.sum(dtype=np.int64)),
            max_id=-1,  # not read yet
            places=(),
            bytes=mapped.path.stat().st_size,
            sha256=hashlib.sha256(lengths.tobytes() + supervised.tobytes()).hexdigest(),
        )


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.zeros(0, np.int32)


def identity(path: Path) -> list[int]:
    """Numbers that change when a file is written: size, mtime, ctime, inode."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
