"""Whether a run's drafter replaces the one in use: `python -m flows.promote --config FILE [--dry-run]`.

registry --fetch_champion--> champion's files --judge_drafter (both decoded by the same fresh processes)--> gates
         <--register-- a version with lineage, and its reasons where it is refused; the alias moves if every gate holds
"""

import dataclasses
from functools import partial
from typing import Any

from flows.command import read_command_line, run_flow

PURPOSE = "Registers a run's drafter and puts it into use if it passes every gate."
OPTIONS = {"dry-run": {"action": "store_true", "help": "measure and decide, register nothing"}}
COMMAND = read_command_line("promote", PURPOSE, options=OPTIONS) if __name__ == "__main__" else None

import anyio
from anyio import to_thread
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.files import write_json
from dflash_core.rundir import RunDirectory
from flows import artifacts, console
from flows.copies import working_in
from flows.parameters import UNCHANGED, Overrides, given
from flows.registry import Champion, Registry, content_hash, open_registry
from flows.running import Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config

PROMOTION = "promotion.json"  # in the run directory: what its promotion decided


@task(cache_policy=NO_CACHE)
async def judge_drafter(config: Config, run: RunDirectory, champion: Champion | None, stop: anyio.Event) -> Any:
    """Verifies the export, and decodes the prompts with it and with the champion."""
    core, _ = load_core()
    against = f", also with version {champion.version}, the champion" if champion else ""
    console.say(f"decoding the evaluation prompts{against}; fresh processes: {config.evaluation.processes}")
    judgement = await core.judge(config, run, stop, champion=champion and champion.directory)
    if judgement is None:
        raise Stopped("stopped while measuring; nothing was registered")
    return judgement


@task(cache_policy=NO_CACHE)
async def register(config: Config, run: RunDirectory, judgement: Any, champion: Champion | None, registry: Registry) -> str:
    """The drafter as a version in MLflow's registry; the alias moves if it was promoted."""
    core, _ = load_core()
    work = partial(
        registry.register,
        config,
        run,
        judgement.decision,
        lineage=core.lineage(config, run, judgement),
        judged=dataclasses.asdict(judgement),
        champion=champion,
    )
    return await to_thread.run_sync(work)  # a stop request does not undo what is registered, so it is not looked at


@flow(name="promote")
async def promote(config: str = QUICKSTART, overrides: Overrides = UNCHANGED, dry_run: bool = False) -> dict[str, Any]:
    """Registers a run's drafter with its lineage; it becomes `champion` if it is verified, lossless, faster and better.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, in their sections or by dotted key.
        dry_run: Measure and decide, but register nothing.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            await in_thread(stop, load_core)
            async with working_in(settings, stop, begin=False) as run:
                if not run.export.is_dir() or not run.training.is_file():
                    raise ValueError(f"{run.export}: no exported drafter; train first")
                registry = await in_thread(stop, open_registry, settings)
                champion = await in_thread(stop, registry.fetch_champion, run.root / "champion")
                if champion is not None and champion.content == content_hash(run.export):
                    console.say(f"{run.export} is the champion already: version {champion.version} of {registry.name}")
                    result = {"promoted": False, "version": champion.version, "champion": champion.version, "reasons": {}}
                    if not dry_run and not (run.root / PROMOTION).is_file():  # else what made it the champion stands there
                        write_json(run.root / PROMOTION, result)
                    return result
                judgement = await judge_drafter(settings, run, champion, stop)
                version = None if dry_run else await register(settings, run, judgement, champion, registry)
                decision = judgement.decision
                result = {
                    "promoted": decision.promoted,
                    "version": version,
                    "champion": version if decision.promoted and version else champion and champion.version,
                    "reasons": {gate.name: gate.reason for gate in decision.gates if not gate.passed},
                }
                if version is not None:
                    write_json(run.root / PROMOTION, result)
        except Stopped as reason:
            return stopped_state(reason)
    markdown = console.show_promotion(decision, registry.name, version=version, champion=champion and champion.version)
    await artifacts.show_promotion(markdown)
    if decision.promoted and version:
        parts = {"path": config, "overrides": given(overrides), "model": registry.name, "version": version}
        artifacts.announce(artifacts.PROMOTED, settings, run, **parts)
    return result


if __name__ == "__main__":
    run_flow(promote, COMMAND, dry_run=COMMAND.options["dry-run"])
