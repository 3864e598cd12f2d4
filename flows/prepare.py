"""Conversations to shards: `python -m flows.prepare --config FILE`.

    check -> select -> tokenize, one task a part -> shard        skipped when the run's shards were made from these inputs

Parts are tokenized here by a pool of processes (data.processes), or by a Dask or Ray cluster (data.task_runner).
`--preview N` shows N conversations as they will be trained, and makes nothing; `--verify DIR` checks a shard directory.
"""

from functools import partial
from pathlib import Path
from typing import Any

from flows.command import read_command_line, run_flow, run_plain

OPTIONS = {
    "preview": {"type": int, "metavar": "N", "help": "show N conversations as they will be trained, and make nothing"},
    "verify": {"metavar": "DIR", "help": "check a shard directory's sizes, checksums and rows, and make nothing"},
}
PURPOSE = "Turns conversations into shards of token rows."
COMMAND = read_command_line("prepare", PURPOSE, options=OPTIONS) if __name__ == "__main__" else None

import anyio
from anyio import to_thread
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner
from prefect.utilities.annotations import unmapped

from dflash_core.config import Config
from dflash_core.data_config import DataConfig
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory
from flows import console
from flows.copies import working_in
from flows.parameters import UNCHANGED, Overrides
from flows.progress import RowProgress
from flows.running import RETRIES, Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config

SHOW_EVERY_S = 0.5


@task(cache_policy=NO_CACHE, **RETRIES)
async def select(config: Config, run: RunDirectory, work: Path, stop: anyio.Event) -> Any:
    """The sources into parts of a few thousand conversations each."""
    core, _ = load_core()
    return await in_thread(stop, core.preparation.select, config, run, work)


@task(cache_policy=NO_CACHE, task_run_name="tokenize-{part.stem}")
def tokenize(part: Path, tokenizer: Any) -> Any:
    """One part through the chat template into its file of token rows; returns its ledger."""
    from dflash_core.data.tokenization import Interrupted

    try:
        return tokenizer(part)
    except Interrupted:
        raise Stopped(f"stopped while tokenizing {part.stem}") from None


@task(cache_policy=NO_CACHE, **RETRIES)
async def shard(config: Config, run: RunDirectory, work: Path, selected: Any, ledgers: list[Any], stop: anyio.Event) -> Manifest:
    """All parts' token rows into shards with a manifest."""
    core, _ = load_core()
    return await in_thread(stop, core.preparation.shard, config, run, work, selected, ledgers)


# ---- the parts -------------------------------------------------------------------------------------------------------


def task_runner(data: DataConfig, *, workers: int) -> TaskRunner[Any]:
    """Where the tasks of the parts run. Raises ValueError where the package for a cluster is missing."""
    try:
        if data.task_runner == "dask":
            from prefect_dask import DaskTaskRunner

            local = {"n_workers": workers, "threads_per_worker": 1}
            return DaskTaskRunner(address=data.scheduler) if data.scheduler else DaskTaskRunner(cluster_kwargs=local)
        if data.task_runner == "ray":
            from prefect_ray import RayTaskRunner

            return RayTaskRunner(address=data.scheduler) if data.scheduler else RayTaskRunner(init_kwargs={"num_cpus": workers})
    except ImportError as error:
        raise ValueError(f"data.task_runner {data.task_runner}: {error}; pip install -e '.[distributed]'") from error
    return ThreadPoolTaskRunner(max_workers=workers)


async def tokenize_parts(config: Config, selected: Any, work: Path, stop: anyio.Event) -> list[Any]:
    """The ledgers of all parts, in order. Raises the first error of a part; a stop request ends every part at its next batch."""
    core, _ = load_core()
    preparation = core.preparation
    how = await in_thread(stop, preparation.tokenizing, config, selected.ingredients["date"])
    finished: list[Any] = []
    runner = task_runner(config.data, workers=preparation.processes(config, selected))
    with preparation.tokenizer(config, how, selected, work) as tokenizer, runner:
        futures = runner.map(tokenize, {"part": list(selected.parts), "tokenizer": unmapped(tokenizer)})
        async with anyio.create_task_group() as beside:
            beside.start_soon(_stop_parts, stop, tokenizer)
            beside.start_soon(_show_rows, selected.selection.rows, tokenizer, finished)
            await to_thread.run_sync(_collect, futures, tokenizer, finished)
            beside.cancel_scope.cancel()
        results = [future.result(raise_on_failure=False) for future in futures]
    errors = [result for result in results if isinstance(result, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):  # what stopped the others comes first
        raise error
    return results


def _collect(futures: list[PrefectFuture[Any]], tokenizer: Any, finished: list[Any]) -> None:
    """Waits for all parts; the first that fails ends the others."""
    for future in as_completed(futures):
        result = future.result(raise_on_failure=False)
        if isinstance(result, Exception):
            tokenizer.stop()
        else:
            finished.append(result)


async def _stop_parts(stop: anyio.Event, tokenizer: Any) -> None:
    await stop.wait()
    tokenizer.stop()


async def _show_rows(total: int, tokenizer: Any, finished: list[Any]) -> None:
    """The display's clock. Workers elsewhere count only whole parts."""
    with RowProgress(total) as progress:
        while True:
            progress(max(tokenizer.rows_done, sum(ledger.rows_in for ledger in finished)))
            await anyio.sleep(SHOW_EVERY_S)


# ---- the flow --------------------------------------------------------------------------------------------------------


async def prepare_shards(config: Config, run: RunDirectory, stop: anyio.Event) -> bool:
    """Makes the run's shards unless they are there already; returns whether they were."""
    core, _ = load_core()
    if config.data.shards:
        sets = await in_thread(
            stop, core.opening.find_data, config, run
        )  # those on S3 are fetched here, where a stop request is heard
        console.say(f"preparation skipped: the rows come from {', '.join(one.name for one in sets)}")
        return True
    manifest = await in_thread(stop, core.preparation.prepared, config, run)
    skipped = manifest is not None
    if manifest is None:
        with core.preparation.working(run) as work:
            selected = await select(config, run, work, stop)
            for line in core.preparation.selection.report_lines(config.data, selected.selection):
                console.say(line)
            ledgers = await tokenize_parts(config, selected, work, stop)
            manifest = await shard(config, run, work, selected, ledgers, stop)
    console.show_prepared(manifest, run, skipped=skipped)
    return skipped


@flow(name="prepare")
async def prepare(config: str = QUICKSTART, overrides: Overrides = UNCHANGED) -> dict[str, Any]:
    """Turns conversations into shards of token rows; skips what is there already.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, in their sections or by dotted key.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            await in_thread(stop, load_core)
            async with working_in(settings, stop) as run:
                skipped = await prepare_shards(settings, run, stop)
        except Stopped as reason:
            return stopped_state(reason)
    return {"shards": str(run.shards), "skipped": skipped}


def preview(config: Config, *, count: int) -> None:
    """Conversations of the run's data as they will be trained, in the terminal and as preview.html."""
    core, _ = load_core()
    core.check(config)
    console.show_preview(*core.preparation.preview(config, count=count))


def verify(config: Config, *, directory: str) -> None:
    """Everything about a shard directory that can be wrong, read whole. Raises ValueError naming the broken shard."""
    from dflash_core.data.shards import MANIFEST
    from dflash_core.data.verification import verify_shards

    manifest = verify_shards(Path(directory))
    checked = (
        "sizes, checksums and rows" if (Path(directory) / MANIFEST).is_file() else f"rows alone, no {MANIFEST} to compare with"
    )
    shards = f"{len(manifest.shards)} shard{'s' if len(manifest.shards) != 1 else ''}"
    console.say(f"verified {directory} ({checked}): {manifest.rows:,} rows, {manifest.tokens:,} tokens, {shards}")


if __name__ == "__main__":
    if COMMAND.options["preview"] is not None:
        run_plain(partial(preview, count=COMMAND.options["preview"]), COMMAND)
    if COMMAND.options["verify"] is not None:
        run_plain(partial(verify, directory=COMMAND.options["verify"]), COMMAND)
    run_flow(prepare, COMMAND)
