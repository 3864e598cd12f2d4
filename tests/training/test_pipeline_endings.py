"""How the queue pipeline ends when something goes wrong or a stop is asked for: errors, stop requests, saves in flight, stalls."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from dflash_core.records import Batch, TappedBatch, TrainState
from dflash_core.training import endings
from dflash_core.training.pipeline import run_pipeline
from tests.training.bench import LIMITS, Bench, Broken, FakeTrainer, planned, tap

# ---- ending (3): errors ----------------------------------------------------------------------------------------------


def breaking(error: BaseException, place: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, except that call number `place` raises."""
    calls = itertools.count()
    lock = threading.Lock()

    def work(*args: Any) -> Any:
        with lock:
            call = next(calls)
        if call == place:
            raise error
        return function(*args)

    return work


def test_an_error_while_the_last_window_is_applied() -> None:
    error = Broken("finish")
    trainer = FakeTrainer(accumulate=4)
    trainer.finish = breaking(error, 0, trainer.finish)  # type: ignore[method-assign]
    bench = Bench(planned(6), trainer)
    with pytest.raises(Broken) as caught:
        bench.run()
    assert caught.value is error
    assert bench.saved == []


def test_an_error_keeps_its_cause_and_its_context() -> None:
    def tap_that_fails(batch: Batch) -> TappedBatch:
        try:
            raise KeyError("inner")
        except KeyError:
            raise Broken("outer")  # noqa: B904

    with pytest.raises(Broken) as caught:
        Bench(planned(4), FakeTrainer(), taps=(tap_that_fails,)).run()
    assert isinstance(caught.value.__context__, KeyError)
    assert not caught.value.__suppress_context__


def test_two_errors_at_once_are_both_told() -> None:
    barrier = threading.Barrier(2, timeout=5)

    def tap_that_fails(batch: Batch) -> TappedBatch:
        barrier.wait()
        raise Broken(f"number {batch.plan.number}")

    with pytest.raises(Broken) as caught:
        Bench(planned(2), FakeTrainer(), taps=(tap_that_fails, tap_that_fails)).run()
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any("number 0" in text for text in told)
    assert any("number 1" in text for text in told)


def test_an_error_does_not_wait_for_the_rest_of_the_data() -> None:
    trainer = FakeTrainer(seconds=0.02)
    shared = breaking(Broken("early"), 3, tap)
    with pytest.raises(Broken):
        Bench(planned(None), trainer, taps=(shared, shared)).run(within=5.0)
    assert len(trainer.numbers) <= 4


def test_a_cancelled_run_saves_nothing() -> None:
    trainer = FakeTrainer(seconds=0.005)
    bench = Bench(planned(None), trainer)

    async def main() -> bool:
        with anyio.move_on_after(0.2) as scope:
            await run_pipeline(bench.work, LIMITS, bench.observation, anyio.Event(), bench.outcome)
        return scope.cancelled_caught

    assert anyio.run(main)
    assert trainer.numbers
    assert bench.saved == []


# ---- ending (4): stop requests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_request_saves_the_last_applied_step(seed: int) -> None:
    trainer = FakeTrainer(accumulate=4, seconds=0.003)
    bench = Bench(planned(None), trainer)
    outcome = bench.run(stop_after=0.1 + 0.007 * seed, within=5.0)
    assert (outcome.stopped, outcome.saved) == (True, True)
    assert outcome.consumed == len(trainer.numbers)
    assert trainer.step == outcome.consumed // 4 > 0
    assert [(state.step, state.position) for state in bench.saved] == [(trainer.step, 4 * trainer.step)]
    assert [metrics.step for metrics in bench.logged] == list(range(1, trainer.step + 1))


def test_a_stop_request_before_the_start() -> None:
    trainer = FakeTrainer()
    outcome = Bench(planned(None), trainer).run(stop_after=0, within=5.0)
    assert trainer.numbers == []
    assert (outcome.stopped, outcome.consumed) == (True, 0)


def test_a_stop_request_reaches_a_trainer_that_waits_for_a_slow_target() -> None:
    entered = threading.Event()

    def slow_tap(batch: Batch) -> TappedBatch:
        if batch.plan.number >= 4:
            entered.set()
            time.sleep(0.8)
        return tap(batch)

    trainer = FakeTrainer()
    bench = Bench(planned(None), trainer, taps=(slow_tap,))
    start = time.perf_counter()
    outcome = bench.run(replace(LIMITS, readers=1), stop_after=0.3, within=5.0)  # two could bring 4 before 3
    assert entered.is_set()
    assert time.perf_counter() - start < 1.4  # the call in flight ends, no further one begins
    assert trainer.numbers == [0, 1, 2, 3]
    assert (outcome.stopped, outcome.saved) == (True, True)
    assert bench.saved[-1].step == 4


def test_a_save_that_was_measured_too_slow_is_left_out() -> None:
    trainer = FakeTrainer(seconds=0.02)
    bench = Bench(planned(None), trainer)

    def slow_save(state: TrainState) -> None:
        bench.saved.append(state)
        time.sleep(0.4)

    bench.work = replace(bench.work, save=slow_save)
    outcome = bench.run(replace(LIMITS, checkpoint_every=5, stop_deadline_s=0.3), stop_after=0.3, within=5.0)
    assert (outcome.stopped, outcome.saved) == (True, False)
    assert [state.step for state in bench.saved] == [5]


def test_a_save_that_turns_out_too_slow_is_abandoned_at_the_deadline() -> None:
    bench = Bench(planned(None), FakeTrainer(seconds=0.005), save=lambda state: time.sleep(1.5))
    start = time.perf_counter()
    outcome = bench.run(replace(LIMITS, stop_deadline_s=0.3), stop_after=0.2, within=5.0)
    assert time.perf_counter() - start < 1.2
    assert (outcome.stopped, outcome.saved) == (True, False)


def test_a_save_in_flight_does_not_hold_a_stop_beyond_the_deadline() -> None:
    bench = Bench(planned(None), FakeTrainer(seconds=0.005), save=lambda state: time.sleep(1.5))
    start = time.perf_counter()
    outcome = bench.run(replace(LIMITS, checkpoint_every=1, stop_deadline_s=0.3), stop_after=0.2, within=5.0)
    assert time.perf_counter() - start < 1.2
    assert (outcome.stopped, outcome.saved) == (True, False)


def test_a_save_in_flight_ends_first_when_it_fits_the_deadline() -> None:
    trainer = FakeTrainer(seconds=0.005)
    bench = Bench(planned(None), trainer)

    def slow_save(state: TrainState) -> None:
        time.sleep(0.15)
        bench.saved.append(state)

    bench.work = replace(bench.work, save=slow_save)
    outcome = bench.run(replace(LIMITS, checkpoint_every=1), stop_after=0.2, within=5.0)
    assert (outcome.stopped, outcome.saved) == (True, True)
    assert bench.saved[-1].step == trainer.step


def test_a_state_that_is_on_disk_already_is_not_saved_twice() -> None:
    saved, reached = threading.Event(), threading.Event()

    def slow_tap(batch: Batch) -> TappedBatch:
        if batch.plan.number == 2:
            assert saved.wait(5), "micro-batch 1 waits behind this one"
            reached.set()
            time.sleep(0.3)
        return tap(batch)

    bench = Bench(planned(None), FakeTrainer(), taps=(slow_tap,))

    def save(state: TrainState) -> None:
        bench.saved.append(state)
        saved.set()

    bench.work = replace(bench.work, save=save)
    limits = replace(LIMITS, checkpoint_every=2, readers=1)  # two could bring 2 before 1
    outcome = bench.run(limits, stop_when=reached, within=10.0)
    assert (outcome.stopped, outcome.saved) == (True, True)
    assert [state.step for state in bench.saved] == [2]


# ---- the watchdog ----------------------------------------------------------------------------------------------------


def test_a_stall_fails_the_run_and_spares_a_process_that_could_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "LEAVE_HARD_S", 0.8)
    left: list[int] = []
    monkeypatch.setattr(endings.os, "_exit", left.append)

    def stuck(batch: Batch) -> TappedBatch:
        if batch.plan.number:
            time.sleep(0.6)
        return tap(batch)

    bench = Bench(planned(None), FakeTrainer(), taps=(stuck,))
    with pytest.raises(TimeoutError, match=r"no micro-batch was trained for 0.2 s \(pipeline.stall_s\)"):
        bench.run(replace(LIMITS, stall_s=0.2), within=5.0)
    time.sleep(1.2)
    assert left == []
    assert bench.saved == []


def test_the_first_micro_batch_has_a_limit_of_its_own() -> None:
    def slow_at_first(batch: Batch) -> TappedBatch:
        if batch.plan.number == 0:
            time.sleep(0.6)
        return tap(batch)

    trainer = FakeTrainer()
    Bench(planned(3), trainer, taps=(slow_at_first,)).run(replace(LIMITS, stall_s=0.2))
    assert trainer.numbers == [0, 1, 2]
    with pytest.raises(TimeoutError, match=r"for 0.3 s \(pipeline.first_batch_s\)"):
        Bench(planned(3), FakeTrainer(), taps=(slow_at_first,)).run(replace(LIMITS, stall_s=0.2, first_batch_s=0.3))


def test_a_slow_but_living_run_is_no_stall() -> None:
    trainer = FakeTrainer(seconds=0.1)
    Bench(planned(6), trainer).run(replace(LIMITS, stall_s=0.35))
    assert len(trainer.numbers) == 6


STUCK = """
import time
from dflash_core.training import endings
from dataclasses import replace
from tests.training.bench import LIMITS, Bench, FakeTrainer, planned

endings.LEAVE_HARD_S = 0.5

def stuck_in_the_target(batch):
    time.sleep(60)

Bench(planned(None), FakeTrainer(), taps=(stuck_in_the_target,)).run(replace(LIMITS, stall_s=0.3, first_batch_s=0.3), within=50.0)
"""


def test_a_thread_that_never_returns_is_left_hard_with_all_stacks_printed() -> None:
    start = time.perf_counter()
    child = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 70
    assert "stuck_in_the_target" in child.stderr
    assert time.perf_counter() - start < 30
