"""The cache of fetched shards: bounded, shared, and never with half a file under a name that is read."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_core.data import cache as cache_module
from dflash_core.data.cache import ShardCache, patiently
from dflash_core.records import ShardFile

SIZE = 1000


@pytest.fixture(autouse=True)
def small_pieces_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "PIECE", 300)
    monkeypatch.setattr(cache_module, "FIRST_WAIT_S", 0.001)


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def shard_file(number: int, **changes: object) -> ShardFile:
    values = {"name": f"s{number}", "rows": 1, "tokens": 1, "supervised": 1, "max_id": 1, "places": (), "bytes": SIZE}
    return ShardFile(**{**values, "sha256": hashlib.sha256(content(number)).hexdigest(), **changes})  # type: ignore[arg-type]


def reader(number: int) -> Callable[[int, int], bytes]:
    return lambda start, stop: content(number)[start:stop]


def fetch(cache: ShardCache, number: int) -> bytes:
    """Fetches, reads and lets go."""
    with cache.fetch(shard_file(number), reader(number), "s3://b/k") as file:
        return file.read()


def kept(cache: ShardCache) -> set[int]:
    names = {hashlib.sha256(content(number)).hexdigest(): number for number in range(10)}
    return {names[path.stem] for path in cache.directory.glob("*.arrow")}


def make(tmp_path: Path, files: int, *, evict: bool = True) -> ShardCache:
    return ShardCache(directory=tmp_path / "cache", limit=files * SIZE, evict=evict)


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    cache = make(tmp_path, 3)
    assert fetch(cache, 1) == content(1)

    def never(start: int, stop: int) -> bytes:
        raise AssertionError("fetched again")

    with cache.fetch(shard_file(1), never, "s3://b/k") as file:
        assert file.read() == content(1)


def test_the_least_recently_used_file_makes_room(tmp_path: Path) -> None:
    cache = make(tmp_path, 3)
    for number in (1, 2, 3, 1, 4):
        assert fetch(cache, number) == content(number)
        time.sleep(0.02)
    assert kept(cache) == {1, 3, 4}
    assert fetch(cache, 2) == content(2)
    assert kept(cache) == {1, 2, 4}
    assert sum(path.stat().st_size for path in cache.directory.iterdir()) == 3 * SIZE


def test_a_file_that_is_held_is_never_evicted(tmp_path: Path) -> None:
    cache = make(tmp_path, 2)
    with cache.fetch(shard_file(1), reader(1), "s3://b/k"):
        fetch(cache, 2)
        fetch(cache, 3)
        assert kept(cache) == {1, 3}
        with (
            cache.fetch(shard_file(3), reader(3), "s3://b/k"),
            pytest.raises(
                ValueError,
                match=r"s3://b/k/s4: 1000 bytes do not fit, 2000 of the 2000 bytes .* is in use; raise pipeline\.cache",
            ),
        ):
            fetch(cache, 4)
        assert kept(cache) == {1, 3}
    assert fetch(cache, 4) == content(4)


def test_a_mapping_holds_its_file(tmp_path: Path) -> None:
    """The lock lives as long as the mapping, although the file object is gone."""
    import mmap

    cache = make(tmp_path, 1)
    with cache.fetch(shard_file(1), reader(1), "s3://b/k") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with pytest.raises(ValueError, match="is in use"):
        fetch(cache, 2)
    memory.close()
    assert fetch(cache, 2) == content(2)


def test_without_eviction_a_full_cache_is_an_error(tmp_path: Path) -> None:
    cache = make(tmp_path, 2, evict=False)
    fetch(cache, 1)
    fetch(cache, 2)
    with pytest.raises(ValueError, match=r"is taken and pipeline\.cache_evict is false"):
        fetch(cache, 3)
    assert kept(cache) == {1, 2}


@pytest.mark.parametrize("fault", ["other bytes", "short for ever", "error"])
def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path, fault: str) -> None:
    cache = make(tmp_path, 3)
    tries: list[int] = []

    def read(start: int, stop: int) -> bytes:
        tries.append(start)
        if start >= 600 and fault == "short for ever":
            return b""
        if start >= 600 and fault == "error":
            raise ConnectionResetError("reset")
        return bytes(stop - start)

    words = {"other bytes": "s3://b/k/s1: its sha256 is not", "short for ever": "0 bytes came, 300 were", "error": "reset"}
    with pytest.raises((ValueError, OSError), match=words[fault]):
        cache.fetch(shard_file(1), read, "s3://b/k")
    assert tries.count(600) == (1 if fault == "other bytes" else cache_module.ATTEMPTS)
    assert [path.name for path in cache.directory.iterdir() if path.name != ".lock"] == []
    assert fetch(cache, 1) == content(1)


def test_readers_of_one_shard_fetch_it_once(tmp_path: Path) -> None:
    cache = make(tmp_path, 3)
    reads: list[int] = []
    both = threading.Barrier(8)

    def read(start: int, stop: int) -> bytes:
        reads.append(start)
        time.sleep(0.01)
        return content(1)[start:stop]

    def one(_: int) -> bytes:
        both.wait(10)
        with cache.fetch(shard_file(1), read, "s3://b/k") as file:
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == [content(1)] * 8
    assert reads == [0, 300, 600, 900]


KILLED = """
import sys, time
from pathlib import Path
from dflash_core.data import cache
from tests.data.test_cache import shard_file
cache.PIECE = 300
def read(start, stop):
    if start:
        print("half", flush=True)
        time.sleep(60)
    return bytes([1]) * (stop - start)
cache.ShardCache(directory=Path(sys.argv[1]), limit=2000, evict=True).fetch(shard_file(1), read, "s3://b/k")
"""


def test_a_killed_fetch_leaves_no_half_file(tmp_path: Path) -> None:
    cache = make(tmp_path, 2)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(cache.directory)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"half\n"
    assert kept(cache) == set()
    assert [path.suffix for path in cache.directory.iterdir() if path.name != ".lock"] == [".partial"]
    with pytest.raises(ValueError, match="1000 of the 1000"):  # a living fetch keeps its room
        fetch(ShardCache(directory=cache.directory, limit=SIZE, evict=True), 2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert fetch(cache, 2) == content(2)
    assert [path.suffix for path in cache.directory.iterdir() if path.name != ".lock"] == [".arrow"], (
        "another's leftover is removed"
    )
    assert fetch(cache, 1) == content(1)
    assert kept(cache) == {1, 2}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_known_before_anything_is_fetched(tiny_disk: Path) -> None:
    cache = ShardCache(directory=tiny_disk / "cache", limit=2**30, evict=True)
    fetch(cache, 1)

    def never(start: int, stop: int) -> bytes:
        raise AssertionError("nothing is to be fetched")

    with pytest.raises(
        ValueError, match=r"s3://b/k/s2: 100000 bytes do not fit on the disk of .*, which has \d+ left; .*places\.cache"
    ):
        cache.fetch(shard_file(2, bytes=100_000), never, "s3://b/k")
    assert kept(cache) == {1}
    assert fetch(cache, 3) == content(3)


# ---- trying again ----------------------------------------------------------------------------------------------------


def test_trouble_is_tried_again_and_absence_is_not() -> None:
    tries: list[int] = []

    def work(*faults: Exception) -> int:
        tries.append(1)
        if len(tries) <= len(faults):
            raise faults[len(tries) - 1]
        return len(tries)

    assert patiently(lambda: work(ConnectionResetError(), TimeoutError(), OSError("SlowDown")), "x") == 4
    tries.clear()
    with pytest.raises(FileNotFoundError):
        patiently(lambda: work(FileNotFoundError("no such key")), "x")
    assert len(tries) == 1
