"""How a training went: what the pipeline, the trainer and the run's files counted, as the one TrainResult of training.json.

Outcome, Trainer, Observation, MetricsFile --make_result--> TrainResult        `Lap` times the start, `ledger` closes the books
"""

import json
import time
from typing import Any

from dflash_core.records import TrainResult
from dflash_core.rundir import RunDirectory
from dflash_core.training.checkpoint import latest
from dflash_core.training.metrics import MetricsFile
from dflash_core.training.observation import Observation, bottleneck
from dflash_core.training.trainer import Trainer
from dflash_core.training.work import Outcome


class Lap:
    """Seconds between calls, by name."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 3)
        self._last = now


def ledger(trainer: Trainer, outcome: Outcome) -> dict[str, Any]:
    """Micro-batches of this process, counted by the pipeline on one side and by the trainer on the other, which must agree."""
    applied = trainer.ledger["applied"]
    skipped = {name.removeprefix("skipped: "): count for name, count in trainer.ledger.items() if name.startswith("skipped: ")}
    returned = outcome.issued - outcome.consumed + trainer.open_micro_batches
    assert outcome.issued == applied + sum(skipped.values()) + returned, (outcome, applied, skipped, returned)
    return {"issued": outcome.issued, "applied": applied, "skipped": skipped, "returned": returned}


def make_result(
    run: RunDirectory,
    trainer: Trainer,
    outcome: Outcome,
    observation: Observation,
    metrics: MetricsFile,
    *,
    anchors_per_row: int,
    startup_s: dict[str, float],
    departures: tuple[str, ...],
    evaluation: dict[str, Any] | None,
) -> TrainResult:
    """The result of this process; tokens and their rate are those of all processes of the run, from its metrics file.

    `departures`: those that resuming found, beside the trainer's own. `evaluation`: the summary of those during training.
    """
    stages = {name: clock.as_dict() for name, clock in observation.clocks.items()}
    rows = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
    each = observation.sums["tokens"] / max(1, observation.clocks["train"].items)
    lost = {"steps": metrics.lost_steps, "tokens": metrics.lost_tokens}
    return TrainResult(
        stopped=outcome.stopped,
        saved=outcome.saved,
        step=trainer.step,
        total_steps=trainer.total_steps,
        checkpoint=str(latest(run.checkpoints) or ""),
        tokens=tokens,
        tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
        startup_s={**startup_s, "first_batch": round(outcome.first_batch_s, 3)},
        stages=stages,
        bottleneck=bottleneck(stages, tokens=each, anchors=anchors_per_row),
        pipeline={**observation.summary(), "lost_at_restart": lost, **_saves_and_failures(outcome)},
        ledger=ledger(trainer, outcome),
        departures=departures + trainer.departures,
        evaluation=evaluation,
    )


def _saves_and_failures(outcome: Outcome) -> dict[str, Any]:
    seconds = {"clone_s": round(outcome.clone_s, 3), "longest_save_s": round(outcome.save_s, 3)}
    counts = {"saves": outcome.saves, "saves_left_out": outcome.saves_left_out}
    return {**counts, **seconds, "replica_failures": outcome.failures, "replica_rebuilds": outcome.rebuilds}
