"""Evaluations during training in MLflow: at the step of their snapshot, once, and never lost."""

import math
from pathlib import Path

import pytest

from dflash_core.config import Config
from dflash_core.records import Evaluation
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.training.evaluations import EvaluationsFile
from flows.metric_names import EVALUATION, evaluation_points
from flows.mlflow_evaluations import EvaluationLines
from flows.mlflow_tracker import BEHIND, MlflowTracker
from tests import fakes
from tests.flows.test_tracking import client, history, run_id, write_steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests here."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def config(request: pytest.FixtureRequest, runs: Path, tmp_path: Path, target_dir: Path) -> Config:
    return fakes.make_config(tmp_path, target_dir, name=request.node.name, places={"runs": str(runs)})


@pytest.fixture
def run(config: Config) -> RunDirectory:
    return open_run(config)


def evaluated(run: RunDirectory, *steps: int) -> None:
    """Evaluations as a training writes them."""
    file = EvaluationsFile(run.evaluations)
    for step in steps:
        file.add(
            Evaluation(
                step=step, prompts=2, rounds=9, acceptance_length=2.0 + step, simulated_acceptance_length=3.0 + 2 * step,
                simulated_on="validation", blocks=9, seconds=0.5,
            )
        )  # fmt: skip


def test_evaluations_arrive_at_their_own_step_and_only_once(config: Config, run: RunDirectory) -> None:
    """The one of step 2 is known when training is at step 6; a resumed run makes up for step 4 after that of step 6."""
    tracker = MlflowTracker(config, run)
    write_steps(run, 1, 6)
    evaluated(run, 2, 6)
    tracker.close("KILLED")
    tracker = MlflowTracker(config, run)
    write_steps(run, 7, 8)
    evaluated(run, 4)
    tracker.close("FINISHED")
    assert sorted(history(config, run, "evaluation/acceptance_length")) == [(2, 4.0), (4, 6.0), (6, 8.0)]
    assert sorted(history(config, run, "evaluation/gap")) == [(2, 0.75), (4, 11 / 6 - 1), (6, 0.875)]
    assert len(history(config, run, "train/loss")) == 8
    assert {name for name in client(config).get_run(run_id(run)).data.metrics if name.startswith("evaluation/")} == {
        f"evaluation/{name}" for name in EVALUATION
    }
    assert not (run.root / BEHIND).exists()


def test_evaluations_that_mlflow_did_not_take_are_said_and_sent_at_the_next_start(
    config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MlflowTracker(config, run)
    monkeypatch.setattr(EvaluationLines, "send", lambda *_: None)
    evaluated(run, 2, 4)
    tracker.close("FINISHED")
    assert "did not take 2 evaluations" in caplog.text
    assert (run.root / BEHIND).read_text().startswith("0 steps, 0 points, 2 evaluations")
    monkeypatch.undo()
    MlflowTracker(config, run).close("FINISHED")
    assert history(config, run, "evaluation/rounds") == [(2, 9.0), (4, 9.0)]
    assert not (run.root / BEHIND).exists()


def test_an_evaluation_without_a_round_has_no_gap() -> None:
    row = {"acceptance_length": 0.0, "simulated_acceptance_length": 2.0, "rounds": 0, "seconds": 1.0}
    assert math.isnan(dict(evaluation_points(row))["evaluation/gap"])
