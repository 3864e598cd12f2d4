"""Evaluations during a whole training: they change no weight, none is repeated or lost, and the best checkpoint stays."""

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from dflash_core import assembly, preparation
from dflash_core.config import Config
from dflash_core.decoding.snapshots import SnapshotBench
from dflash_core.files import file_sha256
from dflash_core.records import Evaluation, TrainResult, TrainState
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.training.checkpoint import latest, stored
from dflash_core.training.evaluations import read_evaluations
from tests.fakes import make_config

STEPS = 12
measure = SnapshotBench.measure


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Any:
    """`bench(name, eval_every=4, keep=3, ...)`: a config of 12 steps with a checkpoint every 3, and its run with shards in it."""
    root = tmp_path_factory.mktemp("watching")
    training = {"epochs": 40, "max_steps": STEPS, "accumulate": 2, "checkpoint_every": 3, "tokens_per_batch": 256}

    def make(name: str, *, keep: int = 3, targets: int = 1, **during: Any) -> tuple[Config, RunDirectory]:
        config = make_config(
            root, target_dir, name=name, seed=11, training=training, data={"validation": 0.3},
            pipeline={"keep_checkpoints": keep, "targets": ["cpu"] * targets},
            during_training={"num_prompts": 2, "max_new_tokens": 12, "num_rows": 3, **during},
        )  # fmt: skip
        run = open_run(config)
        if name == "shards":
            preparation.prepare(config, run)
        else:
            for part in ("shards", "validation"):
                shutil.copytree(root / "runs" / "shards" / part, run.root / part)
        return config, run

    make("shards")
    return make


def train(config: Config, run: RunDirectory, *, stop: threading.Event | None = None) -> TrainResult:
    """Trains; requests a stop when `stop` is set."""

    async def main() -> TrainResult:
        asked = anyio.Event()
        if stop is None:
            return await assembly.train(config, run, asked, lambda metrics, total: None)

        async def pass_on() -> None:
            await anyio.to_thread.run_sync(stop.wait, abandon_on_cancel=True)
            asked.set()

        async with anyio.create_task_group() as group:
            group.start_soon(pass_on)
            result = await assembly.train(config, run, asked, lambda metrics, total: None)
            group.cancel_scope.cancel()
        return result

    return anyio.run(main)


def sums(run: RunDirectory) -> dict[str, str]:
    path = latest(run.checkpoints)
    assert path is not None
    return {name: file_sha256(path / name) for name in ("weights.safetensors", "moments.safetensors")}


def checkpoints(run: RunDirectory) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))


class Measuring:
    """Stands between pipeline and measuring: `began` and `ended` are steps, `real` are the values found, in place of measured ones.

    Training waits for saves, and where it is not told otherwise for evaluations, before the next step, so that none is left out.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, config: Config, run: RunDirectory, *, real: dict[int, float] | None = None,
        waits: bool = True,
    ) -> None:  # fmt: skip
        self.began: list[int] = []
        self.ended: list[int] = []
        self.recorded: set[int] = set()
        self.real, self.instead = real, dict[int, Any]()
        every, train_one = config.during_training.eval_every or 0, assembly.Trainer.train

        def ready(step: int) -> bool:
            judged, saved = step % every == 0, step % 3 == 0 or step % every == 0
            measured = not waits or not judged or step in self.recorded or step in self.ended
            return measured and (not saved or stored(run.checkpoints, step) is not None)

        def in_turn(trainer: Any, tapped: Any) -> Any:
            until = time.perf_counter() + 30
            while trainer.step and not ready(trainer.step) and time.perf_counter() < until:
                time.sleep(0.005)
            return train_one(trainer, tapped)

        def measured(bench: SnapshotBench, replica: Any, state: TrainState, wanted: Any) -> Evaluation | None:
            self.began.append(state.step)
            try:
                return self._found(bench, replica, state, wanted)
            finally:
                self.ended.append(state.step)

        monkeypatch.setattr(assembly.Trainer, "train", in_turn)
        monkeypatch.setattr(SnapshotBench, "measure", measured)

    def _found(self, bench: SnapshotBench, replica: Any, state: TrainState, wanted: Any) -> Evaluation | None:
        if state.step in self.instead:
            return self.instead[state.step](wanted)
        if self.real is None:
            return measure(bench, replica, state, wanted)
        return Evaluation(
            step=state.step, prompts=2, rounds=9, acceptance_length=self.real[state.step], simulated_acceptance_length=2.0,
            simulated_on="validation", blocks=9, seconds=0.1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def plain(bench: Any) -> RunDirectory:
    """The same training without evaluations."""
    config, run = bench("plain", eval_every=None)
    result = train(config, run)
    assert (result.step, result.evaluation) == (STEPS, None)
    assert not run.evaluations.exists()
    return run


@pytest.mark.parametrize("targets", [1, 2])
def test_the_weights_are_the_same_bits_with_and_without_evaluations(bench: Any, plain: RunDirectory, targets: int) -> None:
    config, run = bench(f"watched{targets}", eval_every=2, targets=targets)
    result = train(config, run)
    assert sums(run) == sums(plain)
    assert result.evaluation is not None
    found = list(read_evaluations(run.evaluations).values())
    assert len(found) >= 1
    assert all(one.step % 2 == 0 and one.prompts == 2 and one.rounds > 0 for one in found)
    assert all(1.0 <= one.acceptance_length <= 4.0 for one in found)
    assert len(found) + result.evaluation["left_out"] == STEPS // 2
    losses = [[json.loads(line)["loss_sum"] for line in each.metrics.read_text().splitlines()] for each in (run, plain)]
    assert losses[0] == losses[1]


def test_what_it_cost_adds_up(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = bench("cost", eval_every=4)
    measuring = Measuring(monkeypatch, config, run)
    result = train(config, run)
    assert measuring.began == [4, 8, 12]
    own = json.loads(run.training.read_text())["evaluation"]
    assert own == result.evaluation
    assert [one["step"] for one in own["evaluations"]] == [4, 8, 12]
    assert (own["left_out"], own["given_up"]) == (0, 0)
    assert own["seconds"] == pytest.approx(sum(one["seconds"] for one in own["evaluations"]), rel=0.2)
    assert own["seconds"] == pytest.approx(result.stages["evaluations"]["busy"], abs=0.002)
    assert 0 < own["share"] < 1
    assert {one["simulated_on"] for one in own["evaluations"]} == {"validation"}


def test_the_best_by_real_acceptance_is_never_deleted(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = bench("best", eval_every=2, keep=1)
    Measuring(monkeypatch, config, run, real={2: 1.1, 4: 3.0, 6: 1.2, 8: 1.3, 10: 1.4, 12: 1.5})
    result = train(config, run)
    assert result.evaluation is not None
    assert result.evaluation["best_step"] == 4
    assert checkpoints(run) == [4, 12]


def test_a_checkpoint_stays_while_its_snapshot_is_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one kept checkpoint, later saves come and go during the evaluation of step 4, which turns out to be the best."""
    config, run = bench("slow", eval_every=4, keep=1, targets=2)
    measuring = Measuring(monkeypatch, config, run, real={4: 3.0, 8: 1.0, 12: 1.0}, waits=False)

    def until_others_were_saved(wanted: Any) -> Evaluation | None:
        until = time.perf_counter() + 30
        while not {8, 9} & set(checkpoints(run)) and time.perf_counter() < until:
            time.sleep(0.005)
        assert 4 in checkpoints(run)
        del measuring.instead[4]
        return measuring._found(None, None, TrainState(step=4, position=8, weights={}, moments={}), wanted)  # type: ignore[arg-type]

    measuring.instead[4] = until_others_were_saved
    train(config, run)
    assert checkpoints(run) == [4, 12]


def test_a_stop_during_an_evaluation_ends_soon_and_the_next_run_makes_up_for_it(
    bench: Any, plain: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:

    config, run = bench("stopped", eval_every=4)
    measuring, running = Measuring(monkeypatch, config, run), threading.Event()

    def endless(wanted: Any) -> None:
        running.set()
        while wanted():
            time.sleep(0.01)

    measuring.instead[8] = endless
    first = train(config, run, stop=running)
    assert (first.stopped, first.saved) == (True, True)
    assert 8 <= first.step < STEPS
    assert first.evaluation is not None
    assert ([one["step"] for one in first.evaluation["evaluations"]], first.evaluation["given_up"]) == ([4], 0)
    measuring.instead.clear()
    measuring.began.clear()
    measuring.ended.clear()
    last = train(config, run)
    assert (last.stopped, last.step) == (False, STEPS)
    assert measuring.began == [8, 12]  # not 4 again
    assert list(read_evaluations(run.evaluations)) == [4, 8, 12]
    assert sums(run) == sums(plain)


def test_steps_made_again_after_a_kill_are_not_measured_again(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = bench("killed", eval_every=4, keep=9)
    measuring = Measuring(monkeypatch, config, run)
    train(config, run)
    for step in (8, 9, 12):  # as if it had been killed after the evaluation of step 8 was written, with step 6 saved
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    lines = run.evaluations.read_text().splitlines()
    run.evaluations.write_text("".join(line + "\n" for line in lines[:2]))
    measuring.began.clear()
    measuring.recorded = {4, 8}
    result = train(config, run)
    assert (result.step, result.ledger["applied"]) == (STEPS, 2 * 6)
    assert measuring.began == [12]
    assert list(read_evaluations(run.evaluations)) == [4, 8, 12]
    assert checkpoints(run) == [3, 4, 6, 8, 9, 12]


def test_one_over_its_limit_is_counted_and_the_run_ends_well(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def endless(wanted: Any) -> None:
        while wanted():
            time.sleep(0.01)

    config, run = bench("limit", eval_every=6, limit_s=0.2)
    Measuring(monkeypatch, config, run).instead = {6: endless, 12: endless}
    result = train(config, run)
    assert (result.step, result.saved) == (STEPS, True)
    assert result.evaluation is not None
    assert (result.evaluation["given_up"], result.evaluation["evaluations"]) == (2, [])
    assert 0.4 <= result.evaluation["seconds"] < 5


def test_an_error_in_an_evaluation_ends_the_run(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(wanted: Any) -> None:
        raise ArithmeticError("from the evaluation")

    config, run = bench("broken", eval_every=4)
    Measuring(monkeypatch, config, run).instead = {4: broken}
    with pytest.raises(ArithmeticError, match="from the evaluation"):
        train(config, run)
