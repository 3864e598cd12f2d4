"""Acceptance of a run's exported drafter: `python -m flows.evaluate --config FILE`.

export/ --evaluate_export (a fresh process)--> AcceptanceReport --report--> report.json, report.md
--endpoint URL: a running server --evaluate_server (its own counters)--> served.json, served.md
--check-export DIR: what each serving engine would do with a drafter directory
"""

from functools import partial
from pathlib import Path
from typing import Any

from flows.command import read_command_line, run_flow, run_plain

PURPOSE = "Measures a run's exported drafter again, or a running server."
OPTIONS = {
    "endpoint": {"metavar": "URL", "help": "measure the vLLM or SGLang server at http://HOST:PORT/v1 by its own counters"},
    "check-export": {
        "metavar": "DIR",
        "help": "say what each serving engine would do with a drafter directory, and measure nothing; exit code 1: not all serve it",
    },
}
NOT_SERVED = 1  # exit code of --check-export
COMMAND = read_command_line("evaluate", PURPOSE, options=OPTIONS) if __name__ == "__main__" else None

import anyio
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.records import AcceptanceReport
from dflash_core.rundir import RunDirectory
from flows import artifacts, console
from flows.copies import working_in
from flows.parameters import UNCHANGED, Overrides
from flows.running import Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config
from flows.tracking import Tracker, tracking


@task(cache_policy=NO_CACHE)
async def evaluate_export(config: Config, run: RunDirectory, stop: anyio.Event) -> AcceptanceReport:
    """Decodes the prompts with and without the exported drafter, in a fresh process."""
    core, _ = load_core()
    console.say(f"decoding the evaluation prompts, fresh processes: {config.evaluation.processes}")
    acceptance = await core.evaluate(config, run, stop)
    if acceptance is None:
        raise Stopped("stopped while evaluating; the export is there")
    return acceptance


@task(cache_policy=NO_CACHE)
async def evaluate_server(config: Config, run: RunDirectory, endpoint: str, stop: anyio.Event) -> list[dict[str, Any]]:
    """Sends the prompts to a running server, which must have no other work, and reads its counters."""
    core, _ = load_core()
    served = await core.measure_endpoint(config, run, endpoint, stop)
    if served is None:
        raise Stopped("stopped while measuring a server")
    return served


@task(cache_policy=NO_CACHE)
async def report(
    config: Config, run: RunDirectory, acceptance: AcceptanceReport, tracker: Tracker, stop: anyio.Event
) -> dict[str, Any]:
    """Writes report.json and report.md, and shows them in MLflow and Prefect."""
    core, _ = load_core()
    value = core.write_report(config, run, acceptance)
    await in_thread(stop, tracker.publish, value)
    await artifacts.show_report(value, run, tracker.page)
    return value


@flow(name="evaluate")
async def evaluate(config: str = QUICKSTART, overrides: Overrides = UNCHANGED, endpoint: str = "") -> dict[str, Any]:
    """Measures the exported drafter of a run again and rewrites its report; or measures a running server.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, in their sections or by dotted key.
        endpoint: Address of a vLLM or SGLang server that has no other work, http://HOST:PORT/v1; empty: none.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            await in_thread(stop, load_core)
            async with working_in(settings, stop, begin=False) as run:
                if endpoint:
                    served = await evaluate_server(settings, run, endpoint, stop)
                    await artifacts.show_served(endpoint, served)
                    console.show_served(served, run)
                    return {"served": str(run.root / "served.json")}
                if not run.export.is_dir():
                    raise ValueError(f"{run.export}: no exported drafter; train first")
                core, _ = load_core()
                await in_thread(stop, core.export_formats, settings, run)
                async with tracking(settings, run) as tracker:
                    acceptance = await evaluate_export(settings, run, stop)
                    value = await report(settings, run, acceptance, tracker, stop)
        except Stopped as reason:
            return stopped_state(reason)
    console.show_report(value, run, tracker.uri)
    return {"report": str(run.report), "acceptance_length": value["acceptance_length"]}


def check(config: Config, *, directory: str) -> None:
    """Prints all findings about a drafter directory; exit code 1 where an engine would not serve what was trained."""
    from dflash_core.decoding.serving import check_export

    found = check_export(Path(directory))
    for finding in found:
        console.say(f"{finding.engine}: {'' if finding.level == 'note' else finding.level + ': '}{finding.text}")
    if wrong := sum(finding.level != "note" for finding in found):
        console.say(
            f"{directory}: {wrong} finding{'s' if wrong > 1 else ''} above; not every engine would serve what was trained"
        )
        raise SystemExit(NOT_SERVED)
    console.say(f"{directory}: every engine would serve what was trained")


if __name__ == "__main__":
    if COMMAND.options["check-export"] is not None:
        run_plain(partial(check, directory=COMMAND.options["check-export"]), COMMAND)
    run_flow(evaluate, COMMAND, endpoint=COMMAND.options["endpoint"] or "")
