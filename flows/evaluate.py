"""Acceptance of a run's exported drafter: `python -m flows.evaluate --config FILE`.

export/ --evaluate_export (a fresh process)--> AcceptanceReport --report--> report.json, report.md
"""

from pathlib import Path
from typing import Any

from flows.command import read_command_line, run_flow

COMMAND = read_command_line("evaluate", "Measures a run's exported drafter again.") if __name__ == "__main__" else None

import anyio
from prefect import flow, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext

from dflash_core.config import Config
from dflash_core.records import AcceptanceReport
from dflash_core.rundir import RunDirectory, hold, open_run
from flows import console
from flows.running import Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config
from flows.tracking import Tracker, tracking


@task(cache_policy=NO_CACHE)
async def evaluate_export(config: Config, run: RunDirectory, stop: anyio.Event) -> AcceptanceReport:
    """Decodes the prompts with and without the exported drafter, in a fresh process."""
    core, _ = load_core()
    acceptance = await core.evaluate(config, run, stop)
    if acceptance is None:
        raise Stopped("stopped while evaluating; the export is there")
    return acceptance


@task(cache_policy=NO_CACHE)
async def report(
    config: Config, run: RunDirectory, acceptance: AcceptanceReport, tracker: Tracker, stop: anyio.Event
) -> dict[str, Any]:
    """Writes report.json and report.md, and shows them in MLflow and Prefect."""
    core, _ = load_core()
    value = core.write_report(config, run, acceptance)
    if FlowRunContext.get() is not None:
        await acreate_markdown_artifact(key="report", markdown=run.report_text.read_text(encoding="utf-8"))
    await in_thread(stop, tracker.publish, value)
    return value


@flow(name="evaluate")
async def evaluate(config: str = QUICKSTART, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measures the exported drafter of a run again and rewrites its report.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, by dotted key: {"places.runs": "elsewhere"}.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            core, _ = await in_thread(stop, load_core)
            core.check(settings)
            export = Path(settings.places.runs).absolute() / settings.name / "export"
            if not export.is_dir():
                raise ValueError(f"{export}: no exported drafter; train first")
            run = open_run(settings)
            with hold(run):
                async with tracking(settings, run) as tracker:
                    acceptance = await evaluate_export(settings, run, stop)
                    value = await report(settings, run, acceptance, tracker, stop)
        except Stopped as reason:
            return stopped_state(reason)
    console.show_report(value, run, tracker.uri)
    return {"report": str(run.report), "acceptance_length": value["acceptance_length"]}


if __name__ == "__main__":
    run_flow(evaluate, COMMAND)
