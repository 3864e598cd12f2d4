"""Conversations to shards: `python -m flows.prepare --config FILE`.

check -> tokenize -> shard        skipped when the run's shards were made from exactly these inputs
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flows.command import read_command_line, run_flow

COMMAND = read_command_line("prepare", "Turns conversations into shards of token rows.") if __name__ == "__main__" else None

import anyio
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory, hold, open_run
from flows import console
from flows.running import Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config


@task(cache_policy=NO_CACHE)
async def tokenize(config: Config, run: RunDirectory, stop: anyio.Event) -> dict[str, Any]:
    """Conversations through the chat template into one file of token rows; returns its path and the ledger."""
    core, _ = load_core()
    return await in_thread(stop, core.tokenize, config, run)


@task(cache_policy=NO_CACHE)
async def shard(config: Config, run: RunDirectory, tokenized: dict[str, Any], stop: anyio.Event) -> Manifest:
    """Token rows into shards with a manifest."""
    core, _ = load_core()
    return await in_thread(stop, core.shard, config, run, tokenized)


async def prepare_shards(config: Config, run: RunDirectory, stop: anyio.Event) -> bool:
    """Makes the run's shards unless they are there already; returns whether they were."""
    core, _ = load_core()
    manifest = await in_thread(stop, core.prepared, config, run)
    skipped = manifest is not None
    if manifest is None:
        manifest = await shard(config, run, await tokenize(config, run, stop), stop)
    console.show_prepared(manifest, run, skipped=skipped)
    return skipped


@contextmanager
def undone_if_bad(run: RunDirectory) -> Iterator[None]:
    """Bad input leaves no trace of a run that it began: its name stays free for the corrected config."""
    try:
        yield
    except ValueError:
        if run.state == "new" and not run.shards.exists() and not run.checkpoints.exists():
            shutil.rmtree(run.root)
        raise


@flow(name="prepare")
async def prepare(config: str = QUICKSTART, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Turns conversations into shards of token rows; skips what is there already.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, by dotted key: {"data.max_length": 2048}.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            core, _ = await in_thread(stop, load_core)
            core.check(settings)
            run = open_run(settings)
            with hold(run), undone_if_bad(run):
                skipped = await prepare_shards(settings, run, stop)
        except Stopped as reason:
            return stopped_state(reason)
    return {"shards": str(run.shards), "skipped": skipped}


if __name__ == "__main__":
    run_flow(prepare, COMMAND)
