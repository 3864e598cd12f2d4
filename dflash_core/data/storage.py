"""Shard directories on S3: pushed whole, and read through the local cache.

    DIR --push_shards--> s3://bucket/key     the manifest goes last: without it there is no shard set
    s3://bucket/key --fetch_shards--> CACHE/<sha256>.arrow ... --> ShardSet        checked against the manifest, then mapped

All shards of a set are fetched when it is opened: the plan needs every row's length, and a shuffled epoch touches nearly every
shard in its first micro-batches.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from dflash_core.data.arrow import COLUMNS, Columns
from dflash_core.data.cache import ShardCache, patiently
from dflash_core.data.reader import ShardSet, find_shards
from dflash_core.data.shards import MANIFEST, check_shards, parse_manifest, read_manifest
from dflash_core.records import Manifest, ShardFile

PARALLEL = 4  # files fetched side by side
REQUEST_ATTEMPTS = 4  # of one request, within one try of `patiently`


@dataclass(frozen=True, kw_only=True)
class ShardPlaces:
    """Where rows lie and how to get at them: everything another process needs to open the same ones."""

    places: tuple[str, ...]  # directories, or s3:// places
    columns: Columns = COLUMNS
    cache: str = ""  # directory for what comes from S3
    cache_bytes: int = 0
    cache_evict: bool = True


def find_sets(where: ShardPlaces) -> list[ShardSet]:
    """The shard sets of all places, those on S3 fetched into the cache. Raises ValueError for one that is not complete."""
    cache = ShardCache(directory=Path(where.cache), limit=where.cache_bytes, evict=where.cache_evict)
    return [fetch_shards(place, cache) if is_remote(place) else find_shards(local_path(place)) for place in where.places]


def check_places(places: Iterable[str]) -> None:
    """Raises ValueError for a place that can be seen to be wrong without a network."""
    for place in places:
        if not is_remote(place):
            find_shards(local_path(place))


def is_remote(place: str) -> bool:
    """True for s3:// in any case, False for a path or file://. Raises ValueError for another scheme."""
    scheme, separator, _ = place.partition("://")
    if not separator or scheme.lower() == "file":
        return False
    if scheme.lower() != "s3":
        raise ValueError(f"{place}: the scheme {scheme}:// is not supported; use s3:// or a local path")
    return True


def local_path(place: str) -> Path:
    """The path of a place that is not remote."""
    return Path(place[len("file://") :] if place.lower().startswith("file://") else place)


def open_remote(place: str) -> tuple[Any, str]:
    """(filesystem, bucket/key) of an s3:// place. Address and credentials are those of the environment (AWS_...).

    Listings are not kept, since other processes write while this one runs.
    """
    import s3fs  # takes a second, which a run without S3 need not wait for

    path = place.partition("://")[2].strip("/")
    if "/" not in path:
        raise ValueError(f"{place}: no key after the bucket; write s3://bucket/directory")
    retries = {"mode": "standard", "max_attempts": REQUEST_ATTEMPTS}
    client = s3fs.S3FileSystem(use_listings_cache=False, config_kwargs={"retries": retries})
    client.retries = 1  # requests are tried again by botocore below it and `patiently` above; three layers would take minutes
    return client, path


def forget_clients() -> None:
    """The next `open_remote` makes a client anew, which reads credentials that were changed since, as in ~/.aws/credentials."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


# ---- push ------------------------------------------------------------------------------------------------------------


def push_shards(directory: Path, place: str) -> Manifest:
    """A shard directory to s3://bucket/key, replacing what is there; the same keys however often. Returns its manifest.

    The old manifest goes first and the new one comes last, so whoever reads meanwhile finds no shard set, never a mixed one.
    Raises ValueError where `directory` has no manifest or is not as it says.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise ValueError(f"{directory}: not a complete shard set: {MANIFEST} missing")
    check_shards(directory, manifest)
    client, path = open_remote(place)
    old = set(patiently(partial(client.find, path), place))
    if f"{path}/{MANIFEST}" in old:
        patiently(partial(client.rm_file, f"{path}/{MANIFEST}"), place)
    names = [*(shard.name for shard in manifest.shards), "dataset_info.json", "state.json", MANIFEST]
    for name in names:
        patiently(partial(client.put_file, str(directory / name), f"{path}/{name}"), f"{place}/{name}")
    for stale in old - {f"{path}/{name}" for name in names}:
        patiently(partial(client.rm_file, stale), place)
    return manifest


# ---- fetch -----------------------------------------------------------------------------------------------------------


def fetch_shards(place: str, cache: ShardCache) -> ShardSet:
    """The shards of an s3:// directory as local files, which stay in the cache for as long as the result lives.

    Raises ValueError where the manifest is missing, the cache is too small, or a shard is not as the manifest says.
    """
    client, path = open_remote(place)
    try:
        text = patiently(partial(client.cat_file, f"{path}/{MANIFEST}"), place)
    except FileNotFoundError as error:
        raise ValueError(f"{place}: not a complete shard set: manifest missing") from error
    manifest = parse_manifest(text, f"{place}/{MANIFEST}")
    total = sum(shard.bytes for shard in manifest.shards)
    if total > cache.limit:
        raise ValueError(f"{place} weighs {total} bytes, pipeline.cache_bytes is {cache.limit}; raise it")
    sizes = {key: info["size"] for key, info in patiently(partial(client.find, path, detail=True), place).items()}
    for shard in manifest.shards:
        if (size := sizes.get(f"{path}/{shard.name}")) != shard.bytes:
            found = "missing" if size is None else f"{size} bytes, the manifest says {shard.bytes}"
            raise ValueError(f"shard {place}/{shard.name}: {found}; push the shards again")

    def fetch(shard: ShardFile) -> IO[bytes]:
        return cache.fetch(shard, lambda start, stop: client.cat_file(f"{path}/{shard.name}", start=start, end=stop), place)

    contexts = [copy_context() for _ in manifest.shards]  # so that warnings reach the flow run's log
    with ThreadPoolExecutor(PARALLEL) as pool:
        held = tuple(pool.map(lambda context, shard: context.run(fetch, shard), contexts, manifest.shards))
    return ShardSet(name=place, files=tuple(Path(file.name) for file in held), manifest=manifest, held=held)
