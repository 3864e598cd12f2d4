"""The evaluations stage with small fakes: what is measured, when, by which thread, and what it may not hold up."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import anyio
import pytest

from dflash_core.records import Batch, TappedBatch, TrainState
from dflash_core.training.pipeline import run_pipeline
from tests.training.bench import LIMITS, Bench, Broken, FakeTrainer, largest_gap, planned, read, tap

EVERY_5 = replace(LIMITS, evaluate_every=5, evaluate_s=30.0)
Wanted = Callable[[], bool]


class FakeEvaluation:
    """Takes `seconds`, in small steps between which it asks whether it is wanted, as decoding does between blocks."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.began: list[int] = []
        self.ended: list[int] = []
        self.threads: set[str] = set()
        self.running = threading.Event()

    def __call__(self, state: TrainState, wanted: Wanted) -> bool:
        assert state.moments == {}
        self.began.append(state.step)
        self.threads.add(threading.current_thread().name)
        self.running.set()
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            if not wanted():
                return False
            time.sleep(0.005)
        self.ended.append(state.step)
        return True


def late(step: int) -> Callable[[], TrainState]:
    return lambda: TrainState(step=step, position=step, weights={}, moments={})


def test_evaluations_fall_on_their_steps_and_are_checkpoints_too() -> None:
    evaluation = FakeEvaluation()
    bench = Bench(planned(None), FakeTrainer(steps=20, seconds=0.01), evaluate=evaluation)
    outcome = bench.run(replace(EVERY_5, checkpoint_every=8))
    assert evaluation.ended == [5, 10, 15, 20]  # the last step, too
    assert [state.step for state in bench.saved] == [5, 8, 10, 15, 16, 20]
    assert (outcome.evaluations, outcome.evaluations_left_out, outcome.evaluations_given_up) == (4, 0, 0)
    assert outcome.evaluating == -1
    assert evaluation.threads == {"tap-0"}


def test_a_last_shorter_window_is_evaluated_where_it_is_due() -> None:
    evaluation = FakeEvaluation()
    Bench(planned(13), FakeTrainer(accumulate=3, seconds=0.01), evaluate=evaluation).run(replace(EVERY_5, evaluate_every=5))
    assert evaluation.ended == [5]  # 4 whole steps and a fifth of one micro-batch


def test_without_evaluations_there_is_no_stage_at_work() -> None:
    bench = Bench(planned(None), FakeTrainer(steps=20))
    outcome = bench.run()
    assert (outcome.evaluations, outcome.evaluation_s) == (0, 0.0)
    assert bench.clocks["evaluations"].items == 0


def test_one_that_is_due_while_another_is_in_work_is_left_out_and_counted() -> None:
    evaluation, trainer = FakeEvaluation(0.3), FakeTrainer(steps=60, seconds=0.01)
    outcome = Bench(planned(None), trainer, evaluate=evaluation).run(replace(EVERY_5, evaluate_every=2))
    assert outcome.evaluations_left_out > 5
    assert outcome.evaluations + outcome.evaluations_left_out == 30  # every due one
    assert evaluation.ended == evaluation.began
    assert len(evaluation.ended) == outcome.evaluations
    assert outcome.evaluation_s == pytest.approx(0.3 * outcome.evaluations, rel=0.2)


def test_what_cannot_be_saved_is_not_measured_either_but_the_last_is() -> None:
    """A snapshot whose checkpoint is left out could not stay as the best one."""
    evaluation = FakeEvaluation()
    bench = Bench(planned(None), FakeTrainer(steps=20, seconds=0.01), evaluate=evaluation)

    def slow_save(state: TrainState) -> None:
        time.sleep(0.12 if state.step < 20 else 0.0)
        bench.saved.append(state)

    bench.work = replace(bench.work, save=slow_save)
    outcome = bench.run(replace(EVERY_5, checkpoint_every=1))
    assert set(evaluation.ended) <= {state.step for state in bench.saved}
    assert evaluation.ended[-1] == 20
    assert outcome.evaluations + outcome.evaluations_left_out == 4
    assert outcome.evaluations_left_out > 0


@pytest.mark.parametrize("saves", [True, False])
def test_ranks_take_every_snapshot_that_is_due_whatever_becomes_of_it(saves: bool) -> None:
    """Or the others, whose saves are as slow as theirs, would wait for them for ever."""
    seconds = 0.12 if saves else 0.0  # rank 0 leaves saves out, others have nothing to save and nothing to evaluate
    evaluation, trainer = FakeEvaluation(0.12), FakeTrainer(steps=20, seconds=0.01)
    work = {"evaluate": evaluation} if saves else {}
    bench = Bench(planned(None), trainer, save=lambda state: time.sleep(seconds), **work)
    outcome = bench.run(replace(EVERY_5, checkpoint_every=2, together=True))
    assert trainer.snapshots == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20, 20]  # the last is evaluated, and saved
    assert (outcome.saves_left_out > 0) is saves
    assert outcome.evaluations_given_up == 0


def test_a_rank_takes_the_last_snapshot_although_its_save_would_be_too_slow() -> None:
    trainer = FakeTrainer(seconds=0.005)
    bench = Bench(planned(None), trainer, save=lambda state: time.sleep(0.4))
    limits = replace(LIMITS, checkpoint_every=5, stop_deadline_s=0.3, together=True)
    outcome = bench.run(limits, stop_after=0.6, within=5.0)
    assert (outcome.stopped, outcome.saved) == (True, False)
    assert trainer.snapshots[-1] == trainer.step


def test_the_event_loop_never_waits_for_a_stage() -> None:
    """Or heartbeats would stop beside a long step, and a healthy run would be taken for dead."""
    seconds, ticks = 0.3, list[float]()

    def slow(result: Any) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            time.sleep(seconds)
            return result(*arguments)

        return work

    bench = Bench(
        planned(6),
        FakeTrainer(seconds=seconds),
        read=slow(read),
        taps=(slow(tap),) * 2,
        log=slow(lambda metrics: None),
        save=slow(lambda state: None),
        evaluate=slow(lambda state, wanted: True),
    )

    async def tick() -> None:
        while True:
            ticks.append(time.perf_counter())
            await anyio.sleep(0.01)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            limits = replace(EVERY_5, checkpoint_every=2, evaluate_every=4)
            await run_pipeline(bench.work, limits, bench.observation, anyio.Event(), bench.outcome)
            group.cancel_scope.cancel()

    anyio.run(main)
    assert (bench.outcome.consumed, bench.outcome.evaluations) == (6, 1)
    assert ticks[-1] - ticks[0] > 6 * seconds
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert median(gaps) < seconds / 5
    assert sum(gap >= seconds for gap in gaps) < 3, "a stage that blocked it would do so with each of six micro-batches"


def test_other_replicas_feed_the_trainer_meanwhile() -> None:
    """No micro-batch waits at the door of the lent replica while another one works."""
    evaluation, trainer = FakeEvaluation(1.0), FakeTrainer(steps=60, seconds=0.01)
    Bench(planned(None), trainer, evaluate=evaluation).run(replace(EVERY_5, evaluate_every=20))
    assert evaluation.began == [20]
    assert largest_gap(trainer.times) < 0.5


def test_nothing_else_uses_the_lent_replica() -> None:
    at_work = threading.Lock()

    def alone(batch: Batch) -> TappedBatch:
        assert at_work.acquire(blocking=False)
        time.sleep(0.002)
        at_work.release()
        return tap(batch)

    def evaluate(state: TrainState, wanted: Wanted) -> bool:
        assert at_work.acquire(blocking=False)
        time.sleep(0.05)
        at_work.release()
        return True

    trainer = FakeTrainer(steps=40)
    outcome = Bench(planned(None), trainer, taps=(alone,), evaluate=evaluate).run(EVERY_5)
    assert outcome.evaluations >= 2
    assert trainer.numbers == list(range(40))


def test_an_evaluation_longer_than_the_stall_limit_does_not_trip_the_watchdog() -> None:
    evaluation = FakeEvaluation(0.8)
    bench = Bench(planned(12), FakeTrainer(), taps=(tap,), evaluate=evaluation)
    outcome = bench.run(replace(EVERY_5, evaluate_every=10, stall_s=0.3, first_batch_s=0.3, evaluate_s=5.0))
    assert evaluation.ended == [10]
    assert outcome.consumed == 12


def test_a_stall_in_a_run_with_evaluations_is_found_after_both_limits() -> None:
    def stuck(batch: Batch) -> TappedBatch:
        time.sleep(1.2 if batch.plan.number == 2 else 0.0)
        return tap(batch)

    bench = Bench(planned(5), FakeTrainer(), taps=(stuck,))
    with pytest.raises(TimeoutError, match=r"0\.5 s \(pipeline\.stall_s \+ during_training\.limit_s\)"):
        bench.run(replace(EVERY_5, stall_s=0.2, evaluate_s=0.3), within=5.0)


def test_one_over_its_limit_is_given_up_with_a_warning_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    evaluation, trainer = FakeEvaluation(60.0), FakeTrainer(steps=12, seconds=0.002)
    outcome = Bench(planned(None), trainer, taps=(tap,), evaluate=evaluation).run(
        replace(EVERY_5, evaluate_every=10, evaluate_s=0.2), within=5.0
    )
    assert (evaluation.began, evaluation.ended) == ([10], [])
    assert (outcome.evaluations, outcome.evaluations_given_up, outcome.saved) == (0, 1, True)
    assert 0.2 <= outcome.evaluation_s < 0.5
    assert trainer.numbers == list(range(12))
    assert "evaluation of step 10 was given up after 0.2 s (during_training.limit_s 0.2)" in caplog.text


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stop_request_ends_an_evaluation_in_work(replicas: int) -> None:
    evaluation = FakeEvaluation(60.0)
    bench = Bench(planned(None), FakeTrainer(seconds=0.005), taps=(tap,) * replicas, evaluate=evaluation)
    began = time.perf_counter()
    outcome = bench.run(EVERY_5, stop_when=evaluation.running, within=5.0)
    assert time.perf_counter() - began < 2.0
    assert (outcome.stopped, outcome.saved, outcome.evaluations, outcome.evaluations_given_up) == (True, True, 0, 0)


def test_its_error_ends_the_run_as_it_was_raised() -> None:
    error = Broken("evaluation")

    def evaluate(state: TrainState, wanted: Wanted) -> bool:
        raise error

    bench = Bench(planned(None), FakeTrainer(seconds=0.002), evaluate=evaluate)
    with pytest.raises(Broken) as caught:
        bench.run(EVERY_5, within=5.0)
    assert caught.value is error
    assert [state.step for state in bench.saved] in ([], [5])


def test_an_error_elsewhere_ends_an_evaluation_in_work() -> None:
    evaluation = FakeEvaluation(60.0)
    trainer = FakeTrainer(seconds=0.005)
    bench = Bench(planned(None), trainer, evaluate=evaluation)

    def log(metrics: object) -> None:
        if evaluation.running.is_set():
            raise Broken("log")

    bench.work = replace(bench.work, log=log)
    with pytest.raises(Broken, match="log"):
        bench.run(EVERY_5, within=5.0)
    assert evaluation.ended == []


def test_a_resumed_run_repeats_none_and_begins_with_the_one_that_was_cut_off() -> None:
    evaluation = FakeEvaluation()
    trainer = FakeTrainer(steps=20, seconds=0.01, first=8)
    trainer.step = 8
    bench = Bench(planned(None, first=8), trainer, first=8, evaluate=evaluation, evaluated={10, 15}, late=late(5))
    outcome = bench.run(EVERY_5)
    assert evaluation.ended == [5, 20]
    assert outcome.evaluations_left_out == 0


def test_the_checkpoint_of_a_snapshot_in_work_is_named_until_it_is_measured() -> None:
    seen: list[tuple[int, int]] = []
    evaluation = FakeEvaluation(0.3)
    bench = Bench(planned(None), FakeTrainer(steps=30, seconds=0.02), evaluate=evaluation)
    bench.work = replace(bench.work, save=lambda state: seen.append((state.step, bench.outcome.evaluating)))
    bench.run(replace(EVERY_5, evaluate_every=10, checkpoint_every=3))
    assert dict(seen)[9] == -1
    assert dict(seen)[10] == dict(seen)[12] == 10


def test_a_failed_full_replica_is_loaded_anew_before_it_is_lent() -> None:
    working = [True, True]
    tripped = threading.Event()

    def first(batch: Batch) -> TappedBatch:
        assert working[0]
        if batch.plan.number >= 4 and not tripped.is_set():
            tripped.set()
            working[0] = False
            raise Broken("replica 0")
        time.sleep(0.01)
        return tap(batch)

    def rebuild(replica: int) -> None:
        time.sleep(0.05)
        working[replica] = True

    def evaluate(state: TrainState, wanted: Wanted) -> bool:
        return working[0]

    trainer = FakeTrainer(steps=30, seconds=0.01)
    bench = Bench(planned(None), trainer, taps=(first, tap), rebuild=rebuild, evaluate=evaluate)
    outcome = bench.run(replace(EVERY_5, evaluate_every=5, rebuilds=2))
    assert tripped.is_set()
    assert (outcome.failures, outcome.rebuilds, outcome.evaluations_given_up) == (1, 1, 0)
    assert outcome.evaluations >= 4
