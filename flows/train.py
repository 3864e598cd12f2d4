"""From conversations to a measured, exported drafter: `python -m flows.train --config FILE`.

    prepare -> train -> export -> evaluate -> report

Finished before: prints the report. Stopped or killed: goes on where it was. A stop request (SIGTERM, Ctrl-C) ends the work
in flight, saves, and nothing after it runs.
"""

import json
from typing import Any

from flows.command import read_command_line, run_flow

COMMAND = read_command_line("train", "Trains, exports and measures a drafter.", fresh=True) if __name__ == "__main__" else None

import anyio
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.ranks import train_in_ranks
from dflash_core.rundir import RunDirectory
from flows import artifacts, console
from flows.copies import working_in
from flows.evaluate import evaluate_export, report
from flows.mlflow_run import tracking_uri
from flows.parameters import UNCHANGED, Overrides, given
from flows.prepare import prepare_shards
from flows.progress import Progress
from flows.running import RETRIES, Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config
from flows.tracking import Tracker, open_store, send_rest, tracking


@task(cache_policy=NO_CACHE)
async def train_drafter(config: Config, run: RunDirectory, stop: anyio.Event) -> dict[str, Any]:
    """The queue pipeline, from the newest checkpoint to the last step or a stop request."""
    core, imports_s = load_core()
    if (checkpoint := core.latest(run.checkpoints)) is not None:
        console.say(f"going on from {checkpoint.name}")
    with Progress() as progress:
        async with artifacts.following(lambda: progress.percent, "training"):
            if config.pipeline.ranks > 1:
                result = await train_in_ranks(config, run, stop, progress)
            else:
                result = await core.train(config, run, stop, progress, imports_s=imports_s)
    if result.stopped:
        kept = "" if result.saved else ", its state was not saved in time"
        raise Stopped(
            f"stopped at step {result.step} of {result.total_steps}{kept}, resumable from {result.checkpoint or 'the start'}"
        )
    return {"step": result.step, "checkpoint": result.checkpoint}


@task(cache_policy=NO_CACHE, **RETRIES)
async def export_drafter(config: Config, run: RunDirectory, stop: anyio.Event) -> str:
    """The newest checkpoint as a directory that serving engines load."""
    core, _ = load_core()
    return str(await in_thread(stop, core.export, config, run))


async def train_and_measure(
    config: Config, run: RunDirectory, tracker: Tracker, stop: anyio.Event, *, trained: bool, measure: bool
) -> dict[str, Any] | None:
    """Every step after the preparation, in order; returns the report, None where nothing is to be measured."""
    if trained:
        console.say(f"training skipped: done before, {run.training}")
    else:
        await train_drafter(config, run, stop)
    await export_drafter(config, run, stop)
    if not measure:
        return None
    acceptance = await evaluate_export(config, run, stop)
    return await report(config, run, acceptance, tracker, stop)


def _is_trained(run: RunDirectory) -> bool:
    if not run.training.is_file():
        return False
    result = json.loads(run.training.read_text(encoding="utf-8"))
    return result["saved"] and not result["stopped"]


@flow(name="train")
async def train(
    config: str = QUICKSTART, overrides: Overrides = UNCHANGED, fresh: bool = False, measure: bool = True
) -> dict[str, Any]:
    """Trains a drafter from conversations, exports it and measures its acceptance.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, in their sections or by dotted key.
        fresh: Set an older run of this name aside and start anew.
        measure: Measure the drafter; false leaves that to the evaluation which the event of its export starts.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            await in_thread(stop, load_core)
            uri = tracking_uri(settings)
            async with working_in(settings, stop, fresh=fresh) as run:
                if run.state == "finished":
                    console.say(f"finished before: {run.root}; --fresh starts anew")
                    value = json.loads(run.report.read_text(encoding="utf-8"))
                    await send_rest(settings, run, value)
                else:
                    trained = await prepare_shards(settings, run, stop) and _is_trained(run)
                    async with tracking(settings, run) as tracker:
                        value = await train_and_measure(settings, run, tracker, stop, trained=trained, measure=measure)
        except Stopped as reason:
            return stopped_state(reason)
    if run.state != "finished":  # the run is free again, for whoever acts on this
        artifacts.announce(artifacts.EXPORTED, settings, run, path=config, overrides=given(overrides), measured=measure)
    if value is None:
        console.say(f"drafter for serving  {run.export}, not measured")
        return {"export": str(run.export)}
    console.show_report(value, run, uri)
    return {"report": str(run.report), "export": str(run.export), "acceptance_length": value["acceptance_length"]}


if __name__ == "__main__":
    run_flow(train, COMMAND, beside=open_store, fresh=COMMAND.fresh)
