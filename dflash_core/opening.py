"""The rows that a run trains on: the shards it made, or directories that were there before (data.shards).

    shard_places -> find_sets (S3 through the cache) -> tokenizer checked -> verified TokenDataset

Directories that were there before are read only; what is worked out about them is kept in the run's `index`.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_core.config import Config
from dflash_core.data.arrow import COLUMNS, Columns
from dflash_core.data.reader import ShardSet, TokenDataset
from dflash_core.data.shards import parse_manifest, read_manifest
from dflash_core.data.storage import ShardPlaces, find_sets
from dflash_core.data.tokenization import tokenizer_files
from dflash_core.data.verification import check_tokenizer, verified_dataset
from dflash_core.files import file_sha256, write_json
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory


def shard_places(config: Config, run: RunDirectory) -> ShardPlaces:
    """Where the run's rows lie, and how to get at them."""
    given = config.data.shards
    return ShardPlaces(
        places=given or (str(run.shards),),
        columns=Columns(config.data.ids_column, config.data.mask_column) if given else COLUMNS,
        cache=config.places.cache or str(Path(config.places.runs).absolute() / ".cache"),
        cache_bytes=config.pipeline.cache_bytes,
        cache_evict=config.pipeline.cache_evict,
    )


def find_data(config: Config, run: RunDirectory) -> list[ShardSet]:
    """The run's shard sets, those on S3 fetched. Raises ValueError where one is missing, or not complete."""
    if not config.data.shards and read_manifest(run.shards) is None:
        raise ValueError(f"{run.shards}: no complete shards; run preparation first")
    return find_sets(shard_places(config, run))


@contextmanager
def open_data(config: Config, run: RunDirectory, *, vocab_size: int) -> Iterator[TokenDataset]:
    """The run's rows; the bytes of a shard are checked before its first row is handed out. Raises ValueError."""
    sets = find_data(config, run)
    tokenizer = {file.name: file_sha256(file) for file in tokenizer_files(config.target.path)}
    check_tokenizer(sets, target=config.target.path, tokenizer=tokenizer, vocab_size=vocab_size)
    columns = shard_places(config, run).columns
    with verified_dataset(sets, index=run.index, vocab_size=vocab_size, columns=columns) as dataset:
        if not len(dataset):
            raise ValueError(f"{', '.join(one.name for one in sets)}: no rows to train on")
        if config.data.shards:
            run.index.mkdir(exist_ok=True)
            write_json(run.index / "manifest.json", dataclasses.asdict(dataset.manifest()), durable=True)
        yield dataset


def data_manifest(config: Config, run: RunDirectory) -> Manifest:
    """What the run was trained on, for its report."""
    if config.data.shards:
        file = run.index / "manifest.json"
        return parse_manifest(file.read_bytes(), str(file))
    manifest = read_manifest(run.shards)
    assert manifest is not None
    return manifest
