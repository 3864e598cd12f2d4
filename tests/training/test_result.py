"""How a training went: two books that must agree, and rates over all processes of a run."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import load_ends
from dflash_core.records import StepMetrics, TappedBatch
from dflash_core.rundir import RunDirectory
from dflash_core.training.checkpoint import save_checkpoint
from dflash_core.training.metrics import MetricsFile
from dflash_core.training.observation import observe
from dflash_core.training.result import Lap, ledger, make_result
from dflash_core.training.trainer import Trainer
from dflash_core.training.work import STAGES, Outcome
from tests.fakes import make_batch, make_config, make_shape


@pytest.fixture
def trainer(target_dir: Path, tmp_path: Path) -> Trainer:
    """Two micro-batches a step, four steps."""
    config = make_config(tmp_path, target_dir, training={"accumulate": 2, "max_skipped": 1.0})
    ends = load_ends(str(target_dir), dtype="float32", device="cpu", attention="auto")
    return Trainer(new_drafter(make_shape(), 0), ends, config, total_steps=4, device="cpu")


def tapped(number: int, *, value: float = 0.5) -> TappedBatch:
    batch = make_batch([([5, 6, 7, 8, 9, 10], [0, 1, 1, 1, 1, 1])], number=number, first_row=number)
    return TappedBatch(batch=batch, target_hidden=torch.full((*batch.input_ids.shape, 3 * 32), value))


def train(trainer: Trainer, numbers: range, *, spoilt: int = -1) -> list[StepMetrics]:
    steps = (trainer.train(tapped(number, value=math.nan if number == spoilt else 0.5)) for number in numbers)
    return [metrics for metrics in steps if metrics is not None]


def test_every_micro_batch_is_applied_skipped_by_name_or_returned(trainer: Trainer) -> None:
    """Nine let in; seven reached the trainer: one was not finite, one waits for the rest of its step."""
    assert len(train(trainer, range(7), spoilt=2)) == 3
    books = ledger(trainer, Outcome(issued=9, consumed=7))
    assert list(books["skipped"].values()) == [1]
    assert books | {"skipped": {}} == {"issued": 9, "applied": 5, "skipped": {}, "returned": 3}


def test_books_that_disagree_end_the_run(trainer: Trainer) -> None:
    train(trainer, range(2))
    with pytest.raises(AssertionError, match="issued=5"):
        ledger(trainer, Outcome(issued=5, consumed=4))


def test_a_resumed_run_counts_the_tokens_of_all_its_processes(trainer: Trainer, tmp_path: Path) -> None:
    """Two steps of an earlier process are kept, its third is cut off as lost; this one trains one step."""
    run = RunDirectory(root=tmp_path / "run", state="resume")
    run.root.mkdir()
    earlier = [json.dumps({"step": step, "tokens": tokens, "seconds": 1.0}) for step, tokens in ((1, 100), (2, 200), (3, 400))]
    run.metrics.write_text("\n".join(earlier) + "\n")
    file = MetricsFile(run.metrics, resume_step=2)
    observation = observe(STAGES, total_steps=4)
    (metrics,) = train(trainer, range(2))
    metrics = dataclasses.replace(metrics, step=3, seconds=2.0, observed=observation.sample(metrics))
    file.write(metrics)
    file.close()
    checkpoint = save_checkpoint(run.checkpoints, trainer.snapshot(), depends_on={})
    result = make_result(
        run,
        trainer,
        Outcome(issued=2, consumed=2, saved=True, first_batch_s=0.12345, saves=1, save_s=0.5, failures=2, rebuilds=1),
        observation,
        file,
        anchors_per_row=4,
        startup_s={"imports": 1.5},
        departures=("torch: 1 -> 2",),
        evaluation=None,
    )
    assert result.tokens == 300 + metrics.tokens
    assert result.tokens_per_second == round(result.tokens / 4, 1)
    assert result.startup_s == {"imports": 1.5, "first_batch": 0.123}
    assert result.pipeline["lost_at_restart"] == {"steps": 1, "tokens": 400}
    assert [result.pipeline[name] for name in ("saves", "longest_save_s", "replica_failures", "replica_rebuilds")] == [
        1,
        0.5,
        2,
        1,
    ]
    assert (result.step, result.total_steps, result.checkpoint) == (1, 4, str(checkpoint))
    assert (result.saved, result.stopped) == (True, False)
    assert result.ledger == {"issued": 2, "applied": 2, "skipped": {}, "returned": 0}
    assert result.departures == ("torch: 1 -> 2",)
    assert set(result.stages) == set(STAGES)


def test_laps_are_the_seconds_since_the_one_before() -> None:
    lap = Lap({"imports": 3.0})
    lap("open")
    lap._last -= 2.0
    lap("plan")
    assert lap.seconds["imports"] == 3.0
    assert 0.0 <= lap.seconds["open"] < 1.0
    assert 2.0 <= lap.seconds["plan"] < 3.0
