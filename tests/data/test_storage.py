"""Shard directories on a real S3 server."""

import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data import cache as cache_module
from dflash_core.data.cache import ShardCache
from dflash_core.data.reader import TokenDataset
from dflash_core.data.shards import batches_of, read_manifest, write_shards
from dflash_core.data.storage import check_places, fetch_shards, is_remote, local_path, open_remote, push_shards
from dflash_core.records import TokenRow
from tests.data.faulty_proxy import faulty_proxy
from tests.data.test_reader import Row, assert_reads, make_rows

ROOT = Path(__file__).parents[2]


def make_shards(directory: Path, rows: list[Row], shard_tokens: int = 300) -> Path:
    batches = batches_of([TokenRow(id="", input_ids=ids, loss_mask=mask) for ids, mask in rows])
    write_shards(directory, batches, shard_tokens=shard_tokens, fingerprint="f", ingredients={}, ledger={})
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(directory=tmp_path / "cache", limit=2**24, evict=True)


def keys(place: str) -> set[str]:
    client, path = open_remote(place)
    return {key.removeprefix(path + "/") for key in client.find(path)}


def test_pushed_fetched_and_read(tmp_path: Path, s3: str, cache: ShardCache) -> None:
    rows = make_rows(60)
    manifest = push_shards(make_shards(tmp_path / "shards", rows), s3)
    found = fetch_shards(s3, cache)
    assert (found.name, found.manifest) == (s3, manifest)
    assert len(found.files) > 3
    dataset = TokenDataset([found])
    assert_reads(dataset, rows)
    assert dataset.manifest() == manifest
    assert_reads(TokenDataset([fetch_shards(s3.replace("s3://", "S3://") + "/", cache)]), rows)


def test_pushing_again_gives_the_same_keys_and_removes_older_ones(tmp_path: Path, s3: str, cache: ShardCache) -> None:
    rows = make_rows(60)
    many = make_shards(tmp_path / "many", rows, 100)
    push_shards(many, s3)
    first = keys(s3)
    assert first == {path.name for path in many.iterdir()}
    push_shards(many, s3 + "/")
    assert keys(s3) == first
    push_shards(make_shards(tmp_path / "few", rows[:9], 10**6), s3)
    assert keys(s3) == {"data-00000-of-00001.arrow", "dataset_info.json", "state.json", "manifest.json"}
    assert_reads(TokenDataset([fetch_shards(s3, cache)]), rows[:9])


def test_a_set_without_its_manifest_is_not_complete(tmp_path: Path, s3: str, cache: ShardCache) -> None:
    push_shards(make_shards(tmp_path / "shards", make_rows(9)), s3)
    client, path = open_remote(s3)
    client.rm_file(f"{path}/manifest.json")
    with pytest.raises(ValueError, match=rf"{s3}: not a complete shard set: manifest missing"):
        fetch_shards(s3, cache)
    (tmp_path / "shards" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"not a complete shard set: manifest\.json missing"):
        push_shards(tmp_path / "shards", s3)


def test_what_another_process_wrote_or_removed_is_seen_at_once(tmp_path: Path, s3: str, cache: ShardCache) -> None:
    rows = make_rows(20)
    make_shards(tmp_path / "shards", rows)
    with pytest.raises(ValueError, match="manifest missing"):
        fetch_shards(s3, cache)
    push = f"from pathlib import Path; from dflash_core.data.storage import push_shards; push_shards(Path({str(tmp_path / 'shards')!r}), {s3!r})"
    subprocess.run([sys.executable, "-c", push], check=True, cwd=ROOT)
    assert_reads(TokenDataset([fetch_shards(s3, cache)]), rows)
    remove = f"from dflash_core.data.storage import open_remote; c, p = open_remote({s3!r}); c.rm(p, recursive=True)"
    subprocess.run([sys.executable, "-c", remove], check=True, cwd=ROOT)
    with pytest.raises(ValueError, match="manifest missing"):
        fetch_shards(s3, cache)


@pytest.mark.parametrize("fault", ["missing", "cut", "rewritten"])
def test_a_damaged_object_is_named(tmp_path: Path, s3: str, cache: ShardCache, fault: str) -> None:
    directory = make_shards(tmp_path / "shards", make_rows(60))
    push_shards(directory, s3)
    name = read_manifest(directory).shards[1].name
    content = (directory / name).read_bytes()
    client, path = open_remote(s3)
    if fault == "missing":
        client.rm_file(f"{path}/{name}")
    else:
        client.pipe_file(f"{path}/{name}", content[:-1] if fault == "cut" else content[:-9] + bytes(9))
    words = {
        "missing": "missing",
        "cut": rf"{len(content) - 1} bytes, the manifest says {len(content)}",
        "rewritten": "its sha256",
    }
    with pytest.raises(ValueError, match=rf"{s3}/{name}: {words[fault]}"):
        fetch_shards(s3, cache)
    assert not list(cache.directory.glob("*.partial"))


def test_a_cache_that_is_too_small_is_known_at_once(tmp_path: Path, s3: str) -> None:
    push_shards(make_shards(tmp_path / "shards", make_rows(60)), s3)
    small = ShardCache(directory=tmp_path / "cache", limit=1000, evict=True)
    with pytest.raises(ValueError, match=r"weighs \d+ bytes, pipeline\.cache_bytes is 1000; raise it"):
        fetch_shards(s3, small)
    assert not small.directory.exists()


@pytest.mark.parametrize("place", ["gs://b/k", "http://x/y"])
def test_other_schemes_are_refused(place: str) -> None:
    with pytest.raises(ValueError, match=r"is not supported; use s3://"):
        is_remote(place)


def test_places() -> None:
    assert [is_remote(place) for place in ("s3://b/k", "S3://b/k", "b/k", "/b/k", "file:///b/k")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert local_path("file:///b/k") == local_path("/b/k") == Path("/b/k")
    with pytest.raises(ValueError, match="bucket/data"):
        check_places(["bucket/data"])
    with pytest.raises(ValueError, match="no key after the bucket"):
        open_remote("s3://bucket")


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_resets_cut_answers_and_slow_downs_cost_time_only(
    tmp_path: Path, s3: str, s3_server: dict[str, str], cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    monkeypatch.setattr(cache_module, "PIECE", 1000)
    monkeypatch.setattr(cache_module, "FIRST_WAIT_S", 0.02)
    directory = make_shards(tmp_path / "shards", make_rows(400), 2000)
    started = time.monotonic()
    with faulty_proxy(s3_server["AWS_ENDPOINT_URL"], share=0.07) as (address, counts):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        s3fs.S3FileSystem.clear_instance_cache()
        push_shards(directory, s3)
        found = fetch_shards(s3, cache)
    s3fs.S3FileSystem.clear_instance_cache()
    assert min(counts["cut"], counts["half"], counts["503"]) > 0
    assert counts["ok"] > 30
    assert time.monotonic() - started < 60
    for shard, path in zip(found.manifest.shards, found.files, strict=True):
        assert path.read_bytes() == (directory / shard.name).read_bytes()


def _rows_and_sum(place: str, directory: Path) -> tuple[int, int]:
    dataset = TokenDataset([fetch_shards(place, ShardCache(directory=directory, limit=2**24, evict=True))])
    return len(dataset), int(dataset.supervised.sum())


def test_processes_that_are_spawned_read_after_their_parent_did(tmp_path: Path, s3: str, cache: ShardCache) -> None:
    rows = make_rows(60)
    push_shards(make_shards(tmp_path / "shards", rows), s3)
    fetch_shards(s3, cache)
    spawn: Any = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        results = [pool.submit(_rows_and_sum, s3, tmp_path / name) for name in ("a", "a", "b")]
        expected = (60, sum(sum(mask) for _, mask in rows))
        assert [result.result(timeout=60) for result in results] == [expected] * 3
