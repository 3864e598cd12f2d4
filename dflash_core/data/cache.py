"""A bounded directory of fetched shards, shared by every run and process of a machine.

    CACHE/<sha256>.arrow     named by content, so nothing can be stale; fetched as <sha256>.partial and renamed

Whoever fetches or maps a file holds a lock on it that ends with the process. So a killed fetch leaves no half file under a name that
is read, two processes fetch a file once, and eviction, least recently used first, never takes a file that is mapped.
"""

import errno
import fcntl
import hashlib
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from dflash_core.files import lock, sync
from dflash_core.records import ShardFile

LOG = logging.getLogger(__name__)
PIECE = 8 * 2**20  # bytes asked for at once
ATTEMPTS = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 10.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ShardCache:
    """A directory of fetched shards, at most `limit` bytes."""

    directory: Path
    limit: int
    evict: bool  # False: an error instead, when room is needed

    def fetch(self, shard: ShardFile, read: Callable[[int, int], bytes], place: str) -> IO[bytes]:
        """The shard's file, open and with a shared lock that keeps it here until it is closed.

        `read(start, stop)` gives bytes of the original. Raises ValueError where they are not the manifest's.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        final = self.directory / f"{shard.sha256}.arrow"
        while True:
            if held := _lock(final, fcntl.LOCK_SH):
                os.utime(final)
                return held
            beside = final.with_suffix(".partial")
            beside.touch()
            with _locked(beside) as file:  # another process may be fetching: then wait for it
                if file is not None and not final.exists():
                    self._fill(file, shard, read, f"{place}/{shard.name}")
                    os.rename(beside, final)
                    sync(self.directory)

    def _fill(self, file: IO[bytes], shard: ShardFile, read: Callable[[int, int], bytes], what: str) -> None:
        """Writes the shard into an open, locked file of the cache, which is removed where that fails."""
        with ExitStack() as undo:
            undo.callback(os.unlink, file.name)
            file.truncate(0)  # what a killed fetch left
            self._make_room(file, shard, what)
            if pour(file, shard.bytes, read, what) != shard.sha256:
                raise ValueError(f"shard {what}: its sha256 is not the manifest's; push the shards again")
            undo.pop_all()

    def _make_room(self, file: IO[bytes], shard: ShardFile, what: str) -> None:
        """Takes the shard's bytes of the disk, so that a full one is known at once; evicts for it, one process at a time."""
        lock_file = self.directory / ".lock"
        lock_file.touch()
        with _locked(lock_file):
            used = self._clean()
            for entry in sorted(self.directory.glob("*.arrow"), key=lambda path: path.stat().st_mtime_ns):
                if used + shard.bytes <= self.limit or not self.evict:
                    break
                used -= _evict(entry)
            if used + shard.bytes > self.limit:
                why = "is in use" if self.evict else "is taken and pipeline.cache_evict is false"
                raise ValueError(
                    f"{what}: {shard.bytes} bytes do not fit, {used} of the {self.limit} bytes of {self.directory} {why}; "
                    "raise pipeline.cache_bytes"
                )
            try:
                os.posix_fallocate(file.fileno(), 0, shard.bytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                free = os.statvfs(self.directory)
                raise ValueError(
                    f"{what}: {shard.bytes} bytes do not fit on the disk of {self.directory}, which has "
                    f"{free.f_bavail * free.f_frsize} left; free some or choose another places.cache"
                ) from error

    def _clean(self) -> int:
        """Bytes in the cache, after what killed fetches left is gone."""
        for beside in self.directory.glob("*.partial"):
            _evict(beside)
        return sum(_size(path) for path in self.directory.iterdir())


def _size(path: Path) -> int:
    """Bytes of a file, 0 where it is gone: fetches of other processes end at any time."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def pour(file: IO[bytes], size: int, read: Callable[[int, int], bytes], what: str) -> str:
    """`size` bytes through `read(start, stop)` into an open file, a piece at a time, and onto the disk; returns their sha256, in hex."""
    digest = hashlib.sha256()
    for start in range(0, size, PIECE):
        piece = patiently(partial(_whole, read, start, min(start + PIECE, size)), what)
        digest.update(piece)
        file.write(piece)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def _whole(read: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
    piece = read(start, stop)
    if len(piece) != stop - start:
        raise OSError(f"{len(piece)} bytes came, {stop - start} were asked for")
    return piece


def _evict(path: Path) -> int:
    """Removes a file that nobody holds; returns its bytes, 0 where it is held."""
    file = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if file is None:
        return 0
    with file:
        size = os.fstat(file.fileno()).st_size
        os.unlink(path)
    return size


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes] | None]:
    """A file, open for writing and locked for this thread alone; None where it was renamed or removed while waiting."""
    file = _lock(path, fcntl.LOCK_EX)
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _lock(path: Path, how: int) -> IO[bytes] | None:
    """The file, open and locked; None where it is not there, held by others, or was renamed or removed meanwhile."""
    try:
        file = open(path, "rb" if how == fcntl.LOCK_SH else "r+b")  # noqa: SIM115  (open is what the caller gets)
    except FileNotFoundError:
        return None
    try:
        lock(file, how)
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


def patiently(work: Callable[[], T], what: str) -> T:
    """`work()`, tried again with growing pauses after network trouble; at most ATTEMPTS times, so it ends within a minute or so.

    Raises what the last try raised. What is not there, or not allowed, is not tried again.
    """
    import aiohttp
    import botocore.exceptions

    boto = botocore.exceptions
    trouble = (OSError, aiohttp.ClientError, boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError)
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except (FileNotFoundError, PermissionError):
            raise
        except trouble as error:
            if attempt == ATTEMPTS - 1:
                raise
            wait = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S) * random.uniform(0.5, 1.5)
            LOG.warning("%s: %s; try %d of %d in %.1f s", what, error or type(error).__name__, attempt + 2, ATTEMPTS, wait)
            time.sleep(wait)
    raise AssertionError("unreachable")
