"""The data that the benchmarks read: the same rows as shards and as flat files, made once and kept in a directory.

many   902,087 rows of some 32 tokens    opening, planning and memory depend on the number of rows
long   100,000 rows of some 400 tokens   what a micro-batch costs
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from dflash_core.data import shards
from dflash_core.data.shards import ROWS, write_shards
from dflash_core.files import file_sha256

SHARDS = 16


def row_lengths(rows: int, *, median: int, longest: int) -> np.ndarray:
    """Long-tailed lengths [rows] int32, as conversations have."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(median), 0.5, rows))
    return np.clip(drawn, 4, longest).astype(np.int32)


def make_store(root: Path, *, rows: int, median: int, longest: int) -> Path:
    """`root/shards` for `load_from_disk` and our reader, `root/ids.bin`, `mask.bin` and `offsets.npy` for numpy."""
    lengths = row_lengths(rows, median=median, longest=longest)
    made_of = file_sha256(Path(shards.__file__)) + str((rows, median, longest))  # another writer makes other files
    if (root / "made_of").is_file() and (root / "made_of").read_text() == made_of:
        return root
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    rng = np.random.default_rng(1)

    def made() -> Iterator[pa.RecordBatch]:
        with open(root / "ids.bin", "wb") as ids_file, open(root / "mask.bin", "wb") as mask_file:
            for part in np.array_split(lengths, -(-rows // 1024)):
                ends = np.cumsum(part, dtype=np.int32)
                ids = rng.integers(0, 150_000, ends[-1], dtype=np.int32)
                first = np.repeat(ends - rng.integers(2, part + 1), part)  # the answer comes last
                mask = (np.arange(ends[-1]) >= first).astype(np.int8)
                ids_file.write(ids.tobytes())
                mask_file.write(mask.tobytes())
                offsets = pa.array(np.concatenate([[0], ends]).astype(np.int32))
                lists = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (ids, mask)]
                yield pa.RecordBatch.from_arrays(lists, schema=ROWS)

    tokens = -(-int(lengths.sum()) // SHARDS)
    write_shards(root / "shards", made(), shard_tokens=tokens, fingerprint="0" * 64, ingredients={}, ledger={})
    np.save(root / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    (root / "made_of").write_text(made_of)
    return root


def save_as_users_do(store: Path) -> None:
    """`store/saved`: the same rows as `datasets` itself writes them, a thousand a record batch."""
    import datasets

    if not (store / "saved" / "state.json").is_file():
        datasets.load_from_disk(str(store / "shards")).save_to_disk(str(store / "saved"), num_shards=SHARDS)


def evict(directory: Path) -> None:
    """Drops a directory's files from the page cache."""
    for path in directory.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, resident now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status names no RssAnon; these figures need Linux")
