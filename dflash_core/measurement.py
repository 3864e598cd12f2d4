"""Evaluation and promotion: the measuring half of the composition root.

    evaluate          export, decoded in fresh processes                -> AcceptanceReport
    write_report      training, data and acceptance                     -> report.json, report.md, pictures
    measure_endpoint  a running server, by its own counters             -> served.json, served.md
    judge             export, verified and decoded beside the champion  -> Judgement
    lineage           where a judged drafter comes from                 -> text by name

Prompts are decoded in processes of their own, which load the exported files as a server would.
"""

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from dflash_core import opening, preparation
from dflash_core.config import Config, PipelineConfig
from dflash_core.decoding.card import card, write_card
from dflash_core.decoding.evaluate import EvaluationJob, read_measured
from dflash_core.decoding.export import read_shape
from dflash_core.decoding.fit import export_fault
from dflash_core.decoding.plots import draw_report
from dflash_core.decoding.promotion import compare, decide
from dflash_core.decoding.report import report_markdown, served_markdown, shown
from dflash_core.decoding.served import measure_served
from dflash_core.decoding.summary import correlation, report_on
from dflash_core.devices import parts
from dflash_core.errors import cancel_when, unwrapped
from dflash_core.files import write_json
from dflash_core.modeling.target import read_facts
from dflash_core.records import AcceptanceReport, Comparison, Decision, Measurements, ServedReport
from dflash_core.rundir import RunDirectory, config_fingerprint


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A decision and what it was made of."""

    decision: Decision
    report: AcceptanceReport | None  # None: the export could not be measured
    comparison: Comparison | None  # None: there was no champion, or nothing to compare with it


async def evaluate(config: Config, run: RunDirectory, stop: anyio.Event) -> AcceptanceReport | None:
    """Acceptance of the exported drafter, measured by fresh processes; None when a stop request came first."""
    measured = await measure_export(config, run, stop)
    return None if measured is None else _summary(config, measured)


def _summary(config: Config, measured: Measurements) -> AcceptanceReport:
    block_size = config.evaluation.block_size or config.drafter.block_size
    committed = block_size + config.drafter.sample_from_anchor
    return report_on(measured, block_size=committed, dtype=config.evaluation.dtype)


async def measure_endpoint(config: Config, run: RunDirectory, url: str, stop: anyio.Event) -> list[dict[str, Any]] | None:
    """Acceptance and latency of a running server on the same prompts; writes served.json and served.md. Raises ValueError.

    None when a stop request came first.
    """
    measured: list[ServedReport] | None = None
    with unwrapped():
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_when, stop, group.cancel_scope)
            measured = await measure_served(url, config)
            group.cancel_scope.cancel()
    if measured is None:
        return None
    reports = [dataclasses.asdict(report) for report in measured]
    (run.root / "served.md").write_text(served_markdown(url, reports), encoding="utf-8")
    write_json(run.root / "served.json", {"endpoint": url, "sets": reports})
    return reports


async def judge(config: Config, run: RunDirectory, stop: anyio.Event, *, champion: Path | None) -> Judgement | None:
    """Whether the run's export may replace the drafter exported in `champion`; None when a stop request came first."""
    facts = read_facts(config.target.path)
    if champion is not None and (fault := export_fault(champion, facts)):
        raise ValueError(f"the champion cannot be compared with: {fault}; promotion.model may name another registered model")
    fault = export_fault(run.export, facts)
    report = comparison = None
    if fault is None:
        measured = await measure_export(config, run, stop, champion=champion)
        if measured is None:
            return None
        report = _summary(config, measured)
        comparison = None if champion is None else compare(measured.results)
    decision = decide(export_fault=fault, report=report, comparison=comparison, settings=config.promotion)
    return Judgement(decision=decision, report=report, comparison=comparison)


def lineage(config: Config, run: RunDirectory, judgement: Judgement) -> dict[str, str]:
    """Where a judged drafter comes from and what it was measured at, as text."""
    training = json.loads(run.training.read_text(encoding="utf-8"))
    found = {
        "name": config.name,
        "target": config.target.path,
        "config_fingerprint": config_fingerprint(config),
        "data_fingerprint": opening.data_manifest(config, run).fingerprint,
        "checkpoint": training["checkpoint"],
        "step": str(training["step"]),
        **({"warm_start": config.training.warm_start} if config.training.warm_start else {}),
    }
    if judgement.report is not None:
        found["acceptance_length"] = shown(judgement.report.acceptance_interval)
        found["speedup"] = shown(judgement.report.speedup_interval)
    if judgement.comparison is not None:
        found["acceptance_length_minus_champion"] = shown(judgement.comparison.difference, sign="+")
    return found


def _device(pipeline: PipelineConfig) -> str:
    """The drafter's device, or those of a target that does not fit on one."""
    first = pipeline.targets[0]
    return first if len(parts(first)) > 1 else pipeline.drafter


async def measure_export(
    config: Config, run: RunDirectory, stop: anyio.Event, *, champion: Path | None = None
) -> Measurements | None:
    """Every request of the evaluation, decoded by `evaluation.processes` fresh processes; None when a stop request came first.

    Raises RuntimeError where a process fails, TimeoutError after `pipeline.evaluation_s`.
    """
    commands = []
    for part in range(config.evaluation.processes):
        job = EvaluationJob(
            export=str(run.export),
            shards=opening.shard_places(config, run),
            target=config.target.path,
            attention=config.target.attention,
            device=_device(config.pipeline),
            evaluation=config.evaluation,
            date=preparation.frozen_date(config, run),
            thinking=config.data.thinking,
            champion=None if champion is None else str(champion),
            part=part,
        )
        job_file = run.root / f"evaluation-job-{part}.json"
        write_json(job_file, job.as_dict())
        commands.append([sys.executable, "-m", "dflash_core.decoding.evaluate", str(job_file)])
    printed = await run_side_by_side(commands, stop, seconds=config.pipeline.evaluation_s)
    return None if printed is None else read_measured(printed)


async def run_side_by_side(commands: list[list[str]], stop: anyio.Event, *, seconds: float) -> list[str] | None:
    """Standard output of each process, None (and all killed) when `stop` is set.

    Raises RuntimeError with the last of its errors where one fails, TimeoutError after `seconds`; all others are killed first.
    """
    done: dict[int, subprocess.CompletedProcess[bytes]] = {}
    with anyio.move_on_after(seconds) as limit:
        async with anyio.create_task_group() as group:

            async def run_one(number: int) -> None:
                done[number] = await anyio.run_process(commands[number], check=False)
                if len(done) == len(commands) or done[number].returncode != 0:
                    group.cancel_scope.cancel()

            group.start_soon(cancel_when, stop, group.cancel_scope)
            for number in range(len(commands)):
                group.start_soon(run_one, number)
    if limit.cancelled_caught and len(done) < len(commands):
        raise TimeoutError(
            f"the evaluation took more than {seconds:g} s (pipeline.evaluation_s) and was ended; the export is there: raise the limit, "
            "or ask less (evaluation.num_prompts, max_new_tokens) or more side by side (evaluation.processes, batch_size)"
        )
    for number, result in done.items():
        if result.returncode != 0:
            command, reason = " ".join(commands[number]), result.stderr.decode()[-4000:]
            raise RuntimeError(f"{command} failed with exit code {result.returncode}:\n{reason}")
    if len(done) < len(commands):
        return None
    return [done[number].stdout.decode() for number in range(len(commands))]


def _while_training(training: dict[str, Any]) -> dict[str, Any] | None:
    """What training.json says about evaluations, and how the simulated and the real values of one run go together."""
    own = training.get("evaluation")  # not there in runs of earlier versions
    return {**own, "correlation": correlation(own["evaluations"])} if own else None


def _how_decoded(config: Config) -> str:
    """The settings that acceptance and speed-up depend on, in words."""
    own = config.evaluation
    sampling = (
        "greedy" if own.temperature == 0 else f"temperature {own.temperature:g}, top_p {own.top_p:g}, top_k {own.top_k or 'off'}"
    )
    size = own.block_size or config.drafter.block_size
    return f"{sampling}, {own.dtype}, at most {own.max_new_tokens} new tokens, {own.batch_size} together, block size {size}"


def write_report(config: Config, run: RunDirectory, acceptance: AcceptanceReport) -> dict[str, Any]:
    """report.json, report.md, its pictures and the export's card; returns what report.json holds."""
    training = json.loads(run.training.read_text(encoding="utf-8"))
    manifest = opening.data_manifest(config, run)
    report = {
        "name": config.name,
        "config_fingerprint": config_fingerprint(config),
        "data_fingerprint": manifest.fingerprint,
        **dataclasses.asdict(acceptance),
        "lossless": f"{acceptance.lossless_exact} / {acceptance.lossless_checked}",
        "data": {
            "rows": manifest.rows,
            "tokens": manifest.tokens,
            "supervised": manifest.supervised,
            "shards": len(manifest.shards),
        },
        "training": {key: training[key] for key in ("step", "total_steps", "tokens", "checkpoint", "departures")},
        "tokens_per_second": training["tokens_per_second"],
        "startup_s": training["startup_s"],
        "stages": training["stages"],
        "bottleneck": training["bottleneck"],
        "pipeline": training["pipeline"],
        "evaluation": _while_training(training),
        "ledger": {"conversations": manifest.ledger, "micro_batches": training["ledger"]},
        "export": str(run.export),
    }
    run.report_text.write_text(report_markdown(report), encoding="utf-8")
    draw_report(report, run.metrics, acceptance=run.acceptance_picture, training=run.training_picture)
    write_card(run.export, card(*read_shape(run.export), report=report, how=_how_decoded(config)))
    write_json(run.report, report)
    return report
