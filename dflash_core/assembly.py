"""The composition root: every part is built from Config here and fitted to the others. Read this first.

    check    config against the target, before anything heavy           -> DrafterShape
    tokenize, shard   conversations -> token rows -> shards/             -> Manifest
    train    shards -> pipeline -> checkpoints/, metrics.jsonl           -> TrainResult
    export   newest checkpoint -> export/                                -> path
    evaluate export, decoded in a fresh process                          -> AcceptanceReport
    report   everything above -> report.json, report.md

All of it is plain Python without Prefect or MLflow; `flows` calls these functions in this order.
"""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from dflash_core.config import Config, batch_bytes, fingerprint, resolve, total_steps
from dflash_core.data import tokenization
from dflash_core.data.batches import assemble, count_batches, plan
from dflash_core.data.shards import (
    TokenDataset,
    check_shards,
    file_sha256,
    read_manifest,
    read_stream,
    write_shards,
    write_stream,
)
from dflash_core.decoding.evaluate import EvaluationJob, read_measured, read_prompts, summarise
from dflash_core.decoding.export import write_export
from dflash_core.decoding.report import report_markdown
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, choose_attention, load_ends, read_facts
from dflash_core.records import AcceptanceReport, DrafterShape, Manifest, StepMetrics, TargetFacts, TrainResult, TrainState
from dflash_core.rundir import RunDirectory, config_fingerprint
from dflash_core.training.checkpoint import clean, environment, latest, load_checkpoint, save_checkpoint
from dflash_core.training.metrics import MetricsFile, StageClock, bottleneck, write_json, write_timeline
from dflash_core.training.pipeline import STAGES, Limits, Outcome, Work, run_pipeline
from dflash_core.training.trainer import Trainer

LOG = logging.getLogger(__name__)


def check(config: Config) -> tuple[TargetFacts, DrafterShape]:
    """Everything that can be wrong and can be seen without weights. Raises ValueError."""
    if not Path(config.data.conversations).is_file():
        raise ValueError(f"data.conversations {config.data.conversations!r}: no such file")
    read_prompts(config.evaluation.prompts)
    for device in (*config.pipeline.targets, config.pipeline.drafter):
        choose_attention(config.target.attention, device)
    facts = read_facts(config.target.path)
    return facts, resolve(config, facts)


# ---- data ------------------------------------------------------------------------------------------------------------


def data_ingredients(config: Config) -> dict[str, Any]:
    """Everything that decides the rows of the shards; the fingerprint is its hash."""
    from importlib.metadata import version

    code = sorted((Path(__file__).parent / "data").glob("*.py"))
    facts = read_facts(config.target.path)
    return {
        "conversations": file_sha256(Path(config.data.conversations)),
        "tokenizer": {file.name: file_sha256(file) for file in tokenization.tokenizer_files(config.target.path)},
        "target": {"path": config.target.path, "stop_ids": list(facts.eos_ids), "vocab_size": facts.vocab_size},
        "data": config.data.model_dump(mode="json", exclude={"conversations"}),
        "code": fingerprint([file_sha256(file) for file in code]),
        "versions": {name: version(name) for name in ("tokenizers", "transformers", "jinja2")},
    }


def prepared(config: Config, run: RunDirectory) -> Manifest | None:
    """The manifest of the run's shards if they are complete and made from exactly these inputs."""
    manifest = read_manifest(run.shards)
    if manifest is None or manifest.fingerprint != fingerprint(data_ingredients(config)):
        return None
    check_shards(run.shards, manifest)
    return manifest


def tokenize(config: Config, run: RunDirectory) -> dict[str, Any]:
    """Conversations into one Arrow file of token rows beside the shards: {"rows": path, "ledger": {}, "ingredients": {}}."""
    ingredients = data_ingredients(config)  # before anything is read: a file changed meanwhile must not pass for read
    facts = read_facts(config.target.path)
    tokenizer = tokenization.load_tokenizer(config.target.path)
    ledger = tokenization.Ledger()
    rows = tokenization.tokenize(config.data, tokenizer, frozenset(facts.eos_ids), facts.vocab_size, ledger)
    path = run.root / "rows.arrow"
    try:
        write_stream(path, rows)
        tokenization.check_kept(ledger, config.data.min_kept)
    except ValueError:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".partial").unlink(missing_ok=True)
        raise
    return {"rows": str(path), "ledger": ledger.as_dict(), "ingredients": ingredients}


def shard(config: Config, run: RunDirectory, tokenized: dict[str, Any]) -> Manifest:
    """The token rows as a shard directory; an older one, made from other inputs, is replaced."""
    old = run.root / "shards.old"
    shutil.rmtree(old, ignore_errors=True)
    if run.shards.exists():
        os.rename(run.shards, old)
    manifest = write_shards(
        run.shards,
        read_stream(Path(tokenized["rows"])),
        shard_tokens=config.data.shard_tokens,
        fingerprint=fingerprint(tokenized["ingredients"]),
        ingredients=tokenized["ingredients"],
        ledger=tokenized["ledger"],
    )
    shutil.rmtree(old, ignore_errors=True)
    Path(tokenized["rows"]).unlink()
    return manifest


# ---- training --------------------------------------------------------------------------------------------------------


async def train(
    config: Config, run: RunDirectory, stop: anyio.Event, on_step: Callable[[StepMetrics, int], None], *, imports_s: float = 0.0
) -> TrainResult:
    """Trains to the end or to a stop request, resuming from the newest checkpoint. `on_step(metrics, total_steps)` after each step."""
    lap = _Lap({"imports": round(imports_s, 3)})
    clean(run.checkpoints)
    manifest = read_manifest(run.shards)
    if manifest is None:
        raise ValueError(f"{run.shards}: no complete shards; run preparation first")
    check_shards(run.shards, manifest)
    dataset = TokenDataset(run.shards)
    lap("open")
    facts = read_facts(config.target.path)
    shape = resolve(config, facts)
    steps = _total_steps(config, dataset)
    lap("plan")
    trainer = _trainer(config, shape, steps)
    depends_on = {"config_fingerprint": config_fingerprint(config), "data_fingerprint": manifest.fingerprint}
    departures = _resume(trainer, run, depends_on)
    first = trainer.position
    replicas = [_replica(config, shape, device) for device in config.pipeline.targets]
    lap("model")

    metrics_file = MetricsFile(run.metrics, trainer.step)

    def log(metrics: StepMetrics) -> None:
        metrics_file.write(metrics)
        on_step(metrics, steps)

    def save(state: TrainState) -> None:
        save_checkpoint(run.checkpoints, state, depends_on=depends_on)

    work = Work(
        plan=plan(
            dataset.lengths,
            dataset.supervised,
            seed=config.seed,
            training=config.training,
            bytes_per_token=batch_bytes(shape, 1, config.target.dtype),
            position=first,
        ),
        first=first,
        read=lambda planned: assemble(planned, dataset),
        taps=tuple(replica.tap for replica in replicas),
        trainer=trainer,
        log=log,
        save=save,
    )
    limits = Limits(
        readers=config.pipeline.readers,
        ahead_bytes=config.pipeline.ahead_bytes,
        checkpoint_every=config.training.checkpoint_every,
        stop_deadline_s=config.pipeline.stop_deadline_s,
        stall_s=config.pipeline.stall_s,
    )
    started = time.perf_counter()
    clocks = {name: StageClock(name, started) for name in STAGES}
    before = dict(trainer.counters)
    try:
        outcome = await run_pipeline(work, limits, clocks, stop)
    finally:
        metrics_file.close()
        write_timeline(run.timeline, list(clocks.values()))
    lap.seconds["first_batch"] = round(outcome.first_batch_s, 3)
    result = _result(config, run, trainer, outcome, clocks, lap.seconds, before, departures)
    write_json(run.training, dataclasses.asdict(result))
    return result


def _total_steps(config: Config, dataset: TokenDataset) -> int:
    training = config.training
    enough = training.max_steps * training.accumulate if training.max_steps else None
    count = count_batches(dataset.lengths, dataset.supervised, seed=config.seed, training=training, enough=enough)
    return total_steps(training, count)


class _Lap:
    """Seconds between calls, by name."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def _trainer(config: Config, shape: DrafterShape, steps: int) -> Trainer:
    device = config.pipeline.drafter
    ends = load_ends(config.target.path, dtype="float32", device=device, attention=config.target.attention)
    return Trainer(new_drafter(shape, config.seed), ends, config, total_steps=steps, device=device)


def _replica(config: Config, shape: DrafterShape, device: str) -> TapReplica:
    return TapReplica(
        config.target.path,
        layer_ids=shape.target_layer_ids,
        dtype=config.target.dtype,
        device=device,
        attention=config.target.attention,
    )


def _resume(trainer: Trainer, run: RunDirectory, depends_on: dict[str, Any]) -> tuple[str, ...]:
    """Puts the trainer where the newest checkpoint stands; returns what keeps the rest from being bit-identical."""
    path = latest(run.checkpoints)
    if path is None:
        return ()
    state, stored = load_checkpoint(path)
    if stored["depends_on"] != depends_on:
        raise ValueError(f"{path} was made with {stored['depends_on']}, this run has {depends_on}; --fresh starts anew")
    trainer.restore(state)
    now = environment()
    changed = tuple(
        f"{key}: {stored['environment'].get(key)} -> {now[key]}" for key in now if stored["environment"].get(key) != now[key]
    )
    for change in changed:
        LOG.warning("resumed with another %s: the rest is not bit-identical to an uninterrupted run", change)
    return changed


def _result(
    config: Config,
    run: RunDirectory,
    trainer: Trainer,
    outcome: Outcome,
    clocks: dict[str, StageClock],
    startup_s: dict[str, float],
    before: dict[str, int],
    departures: tuple[str, ...],
) -> TrainResult:
    stages = {name: clock.as_dict() for name, clock in clocks.items()}
    rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
    checkpoint = latest(run.checkpoints)
    return TrainResult(
        stopped=outcome.stopped,
        saved=outcome.saved,
        step=trainer.step,
        total_steps=trainer.total_steps,
        checkpoint=str(checkpoint or ""),
        tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
        startup_s=startup_s,
        stages=stages,
        bottleneck=bottleneck(stages),
        ledger=_ledger(trainer, outcome, before),
        departures=departures,
    )


def _ledger(trainer: Trainer, outcome: Outcome, before: dict[str, int]) -> dict[str, Any]:
    """Micro-batches of this process, counted by the pipeline on one side and by the trainer on the other."""
    applied = trainer.counters["applied"] - before.get("applied", 0)
    skipped = {
        name.removeprefix("skipped: "): count - before.get(name, 0)
        for name, count in trainer.counters.items()
        if name.startswith("skipped: ")
    }
    returned = outcome.issued - outcome.consumed + trainer.open_micro_batches
    assert outcome.issued == applied + sum(skipped.values()) + returned, (outcome, applied, skipped, returned)
    return {"issued": outcome.issued, "applied": applied, "skipped": skipped, "returned": returned}


# ---- export, evaluation, report --------------------------------------------------------------------------------------


def export(config: Config, run: RunDirectory) -> Path:
    """The newest checkpoint's weights as a drafter that serving engines load."""
    path = latest(run.checkpoints)
    if path is None:
        raise ValueError(f"{run.checkpoints}: no checkpoint to export; train first")
    state, _ = load_checkpoint(path)
    shape = resolve(config, read_facts(config.target.path))
    return write_export(run.export, state.weights, shape, target=config.target.path)


async def evaluate(config: Config, run: RunDirectory, stop: anyio.Event) -> AcceptanceReport | None:
    """Acceptance of the exported drafter, measured by fresh processes; None when a stop request came first."""
    commands = []
    for part in range(config.evaluation.processes):
        job = EvaluationJob(
            export=str(run.export),
            shards=str(run.shards),
            target=config.target.path,
            attention=config.target.attention,
            device=config.pipeline.drafter,
            evaluation=config.evaluation,
            part=part,
        )
        job_file = run.root / f"evaluation-job-{part}.json"
        write_json(job_file, {**vars(job), "evaluation": config.evaluation.model_dump(mode="json")})
        commands.append([sys.executable, "-m", "dflash_core.decoding.evaluate", str(job_file)])
    printed = await _run_children(commands, stop)
    if printed is None:
        return None
    results = [result for text in printed for result in read_measured(text)]
    return summarise(results, draft_tokens=config.drafter.block_size - 1)


async def _run_children(commands: list[list[str]], stop: anyio.Event) -> list[str] | None:
    """Standard output of each process, run side by side; None (and all killed) when `stop` is set. Raises RuntimeError on failure."""
    done: dict[int, subprocess.CompletedProcess[bytes]] = {}
    async with anyio.create_task_group() as group:

        async def cancel_on_stop() -> None:
            await stop.wait()
            group.cancel_scope.cancel()

        async def run_one(number: int) -> None:
            done[number] = await anyio.run_process(commands[number], check=False)
            if len(done) == len(commands) or done[number].returncode != 0:
                group.cancel_scope.cancel()

        group.start_soon(cancel_on_stop)
        for number in range(len(commands)):
            group.start_soon(run_one, number)
    for number, result in done.items():
        if result.returncode != 0:
            command, reason = " ".join(commands[number]), result.stderr.decode()[-4000:]
            raise RuntimeError(f"{command} failed with exit code {result.returncode}:\n{reason}")
    if len(done) < len(commands):
        return None
    return [done[number].stdout.decode() for number in range(len(commands))]


def write_report(config: Config, run: RunDirectory, acceptance: AcceptanceReport) -> dict[str, Any]:
    """report.json and report.md; returns what report.json holds."""
    training = json.loads(run.training.read_text(encoding="utf-8"))
    manifest = read_manifest(run.shards)
    assert manifest is not None
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
        "ledger": {"conversations": manifest.ledger, "micro_batches": training["ledger"]},
        "export": str(run.export),
    }
    run.report_text.write_text(report_markdown(report), encoding="utf-8")
    write_json(run.report, report)
    return report
