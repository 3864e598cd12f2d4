"""The queue pipeline with small fakes: order, credit, the four endings, and what may and may not wait for what."""

import itertools
import math
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anyio
import pytest
import torch

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from dflash_core.training import endings
from dflash_core.training.observation import observe
from dflash_core.training.pipeline import run_pipeline
from dflash_core.training.work import STAGES, Limits, Outcome, Work

LIMITS = Limits(
    readers=2, ahead_bytes=8, checkpoint_every=1000, stop_deadline_s=5.0, stall_s=30.0, first_batch_s=30.0, rebuilds=0
)
NOTHING = torch.zeros(0)


def planned(count: int | None, *, first: int = 0, credit: Callable[[int], int] = lambda number: 1) -> Iterator[PlannedBatch]:
    """Micro-batches `first`.. up to `count`, endless for None."""
    numbers = itertools.count(first) if count is None else range(first, count)
    return (PlannedBatch(number=number, epoch=0, rows=(number,), credit=credit(number)) for number in numbers)


def read(plan: PlannedBatch) -> Batch:
    return Batch(plan=plan, input_ids=NOTHING, loss_mask=NOTHING, lengths=NOTHING)


def tap(batch: Batch) -> TappedBatch:
    return TappedBatch(batch=batch, target_hidden=NOTHING)


def step_metrics(step: int, position: int) -> StepMetrics:
    zeros = dict.fromkeys(("epoch", "rows", "tokens", "computed_tokens", "blocks", "accepted_sum"), 0)
    floats = dict.fromkeys(("loss_sum", "weight_sum", "learning_rate", "gradient_norm", "seconds"), 0.0)
    return StepMetrics(
        step=step, position=position, micro_batches=1, skipped={}, correct=(), counted=(), applied=True, **zeros, **floats
    )


class FakeTrainer:
    """Remembers what it was given and when; a step is `accumulate` micro-batches."""

    def __init__(self, *, steps: int = 10**9, accumulate: int = 1, seconds: float = 0.0, first: int = 0) -> None:
        self.steps, self.accumulate, self.seconds = steps, accumulate, seconds
        self.numbers: list[int] = []
        self.times: list[float] = []
        self.threads: set[int] = set()
        self.snapshots: list[int] = []  # their steps
        self.step, self.position, self.open = 0, first, 0

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    def train(self, tapped: TappedBatch) -> StepMetrics | None:
        time.sleep(self.seconds)
        self.threads.add(threading.get_ident())
        self.numbers.append(tapped.batch.plan.number)
        self.times.append(time.perf_counter())
        self.open += 1
        return self._apply() if self.open == self.accumulate else None

    def finish(self) -> StepMetrics | None:
        return self._apply() if self.open and not self.done else None

    def _apply(self) -> StepMetrics:
        self.step += 1
        self.position += self.open
        self.open = 0
        return step_metrics(self.step, self.position)

    def snapshot(self) -> TrainState:
        self.snapshots.append(self.step)
        return TrainState(step=self.step, position=self.position, weights={}, moments={})


class Bench:
    """One run of the pipeline: its parts, what was logged and what was saved."""

    def __init__(self, plan: Iterator[PlannedBatch], trainer: FakeTrainer, *, first: int = 0, **work: Any) -> None:
        self.trainer = trainer
        self.logged: list[StepMetrics] = []
        self.saved: list[TrainState] = []
        self.observation, self.outcome = observe(STAGES), Outcome()
        self.clocks = self.observation.clocks
        self.work = Work(
            **{
                "plan": plan,
                "first": first,
                "read": read,
                "taps": (tap, tap),
                "rebuild": lambda replica: None,
                "trainer": trainer,
                "log": self.logged.append,
                "save": self.saved.append,
                **work,
            }
        )

    def run(
        self,
        limits: Limits = LIMITS,
        *,
        stop_after: float = math.inf,
        stop_when: threading.Event | None = None,
        within: float = 20.0,
    ) -> Outcome:
        """Runs to the end, with a stop request after so many seconds or at an event; fails after `within` seconds."""

        async def main() -> Outcome:
            stop = anyio.Event()

            async def stop_later() -> None:
                if stop_when is None:
                    await anyio.sleep(stop_after)
                else:
                    await anyio.to_thread.run_sync(stop_when.wait)
                stop.set()

            with anyio.fail_after(within):
                async with anyio.create_task_group() as group:
                    if stop_after == 0:
                        stop.set()
                    elif stop_after < math.inf or stop_when:
                        group.start_soon(stop_later)
                    await run_pipeline(self.work, limits, self.observation, stop, self.outcome)
                    group.cancel_scope.cancel()
                return self.outcome

        async def plain() -> Outcome:
            with anyio.fail_after(within):
                await run_pipeline(self.work, limits, self.observation, anyio.Event(), self.outcome)
                return self.outcome

        return anyio.run(plain if stop_after == math.inf and not stop_when else main)


def largest_gap(times: list[float]) -> float:
    return max(b - a for a, b in itertools.pairwise(times))


# ---- order, credit, waiting ------------------------------------------------------------------------------------------


def test_training_follows_the_numbers_whatever_replica_is_faster() -> None:
    used: list[tuple[int, int]] = []

    def replica(index: int, seconds: float) -> Callable[[Batch], TappedBatch]:
        def work(batch: Batch) -> TappedBatch:
            time.sleep(seconds)
            used.append((index, batch.plan.number))
            return tap(batch)

        return work

    trainer = FakeTrainer()
    bench = Bench(planned(60), trainer, taps=(replica(0, 0.02), replica(1, 0.001), replica(2, 0.005)))
    outcome = bench.run(replace(LIMITS, readers=3))
    assert trainer.numbers == list(range(60))
    assert [number for _, number in used] != sorted(number for _, number in used)
    assert {index for index, _ in used} == {0, 1, 2}
    assert (outcome.issued, outcome.consumed, outcome.stopped, outcome.saved) == (60, 60, False, True)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_micro_batches_come_to_a_replica_in_the_order_in_which_they_were_read(replicas: int) -> None:
    rng = random.Random(replicas)
    naps = [rng.choice([0.0, 0.0, 0.0005, 0.002]) for _ in range(400)]
    seen: list[list[int]] = [[] for _ in range(replicas)]

    def replica(index: int) -> Callable[[Batch], TappedBatch]:
        def work(batch: Batch) -> TappedBatch:
            seen[index].append(batch.plan.number)
            time.sleep(naps[batch.plan.number])
            return tap(batch)

        return work

    Bench(planned(400), FakeTrainer(), taps=tuple(map(replica, range(replicas)))).run(replace(LIMITS, readers=1))
    assert sorted(itertools.chain(*seen)) == list(range(400))
    for numbers in seen:
        assert numbers == sorted(numbers)


def test_a_resumed_plan_starts_in_the_middle() -> None:
    trainer = FakeTrainer(first=17)
    Bench(planned(30, first=17), trainer, first=17).run()
    assert trainer.numbers == list(range(17, 30))


@pytest.mark.parametrize("seed", range(24))
def test_credit_is_never_exceeded_and_the_smallest_budget_never_deadlocks(seed: int) -> None:
    """Random sizes and durations under a budget of exactly (replicas + 2) largest micro-batches; bytes alive are counted."""
    rng = random.Random(seed)
    replicas, readers, largest = rng.randint(1, 4), rng.randint(1, 4), 100
    budget = (replicas + 2) * largest
    credits = [rng.choice([1, 10, largest, rng.randint(1, largest)]) for _ in range(50)]
    alive: dict[int, int] = {}
    worst = [0]
    lock = threading.Lock()

    def nap(most: float) -> None:
        time.sleep(rng.random() * most)

    def slow_read(plan: PlannedBatch) -> Batch:
        nap(0.002)
        return read(plan)

    def slow_tap(batch: Batch) -> TappedBatch:
        nap(0.004)
        tapped = tap(batch)
        with lock:
            alive[batch.plan.number] = batch.plan.credit
            worst[0] = max(worst[0], sum(alive.values()))
        weakref.finalize(tapped, alive.pop, batch.plan.number)
        return tapped

    stale: list[int] = []

    def older(number: int) -> list[int]:
        with lock:  # the one before may still be on its way out of its thread
            return [held for held in alive if held < number - 1]

    class Watching(FakeTrainer):
        def train(self, tapped: TappedBatch) -> StepMetrics | None:
            end = time.perf_counter() + 3  # for a thread that had no turn since; one that waits would hold it for ever
            while (old := older(tapped.batch.plan.number)) and time.perf_counter() < end:
                time.sleep(0.001)
            stale.extend(old)
            return super().train(tapped)

    trainer = Watching(seconds=0.001)
    bench = Bench(planned(50, credit=credits.__getitem__), trainer, read=slow_read, taps=(slow_tap,) * replicas)
    bench.run(replace(LIMITS, readers=readers, ahead_bytes=budget))
    assert trainer.numbers == list(range(50))
    assert worst[0] <= budget
    assert stale == []
    assert not alive


def test_the_gate_keeps_the_plan_from_running_ahead() -> None:
    issued: list[int] = []

    def counted() -> Iterator[PlannedBatch]:
        for plan in planned(None):
            issued.append(plan.number)
            yield plan

    ahead: list[int] = []

    class Watching(FakeTrainer):
        def train(self, tapped: TappedBatch) -> StepMetrics | None:
            ahead.append(len(issued) - len(self.numbers))
            return super().train(tapped)

    outcome = Bench(counted(), Watching(steps=50, seconds=0.001)).run(replace(LIMITS, ahead_bytes=5))
    assert max(ahead) <= 6  # five inside, one waiting at the gate
    assert outcome.consumed == 50


def test_a_micro_batch_above_the_budget_is_refused_with_both_numbers() -> None:
    bench = Bench(planned(5, credit=lambda number: 9 if number == 3 else 1), FakeTrainer())
    with pytest.raises(ValueError, match=r"9 bytes is above pipeline.ahead_bytes 8"):
        bench.run()


def test_nothing_runs_on_the_event_loop() -> None:
    threads: set[int] = set()

    def mark(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def marked(item: Any) -> Any:
            threads.add(threading.get_ident())
            return function(item)

        return marked

    trainer = FakeTrainer()
    nothing = mark(lambda item: None)
    Bench(planned(8), trainer, read=mark(read), taps=(mark(tap),), log=nothing, save=nothing).run()
    assert threading.get_ident() not in threads | trainer.threads


def test_stages_work_at_the_same_time_and_say_where_they_waited() -> None:
    def slow_tap(batch: Batch) -> TappedBatch:
        time.sleep(0.04)
        return tap(batch)

    bench = Bench(planned(20), FakeTrainer(seconds=0.005), taps=(slow_tap, slow_tap))
    start = time.perf_counter()
    bench.run()
    seconds = time.perf_counter() - start
    taps = sorted((interval.start, interval.end, interval.worker) for interval in bench.clocks["tap"].intervals)
    assert any(a[1] > b[0] and a[2] != b[2] for a, b in itertools.pairwise(taps))
    trained = bench.clocks["train"].intervals
    assert any(start < step.end and step.start < end for start, end, _ in taps for step in trained)
    tap_clock, train_clock = bench.clocks["tap"].as_dict(), bench.clocks["train"].as_dict()
    assert tap_clock["items"] == train_clock["items"] == 20
    assert 0.8 <= tap_clock["busy"] <= 2 * seconds
    assert train_clock["starved"] > 0.5 * seconds - 0.1
    assert tap_clock["busy_share"] > train_clock["busy_share"]


def test_a_slow_log_does_not_stop_the_step() -> None:
    trainer = FakeTrainer(seconds=0.002)
    bench = Bench(planned(5), trainer)

    def slow_log(metrics: StepMetrics) -> None:
        time.sleep(0.3)
        bench.logged.append(metrics)

    bench.work = replace(bench.work, log=slow_log)
    bench.run()
    assert largest_gap(trainer.times) < 0.25
    assert [metrics.step for metrics in bench.logged] == list(range(1, 6))


def test_a_slow_save_does_not_stop_the_step_and_missed_ones_are_counted() -> None:
    trainer = FakeTrainer(steps=40, seconds=0.005)
    bench = Bench(planned(None), trainer)

    def slow_save(state: TrainState) -> None:
        time.sleep(0.4)
        bench.saved.append(state)

    bench.work = replace(bench.work, save=slow_save)
    outcome = bench.run(replace(LIMITS, checkpoint_every=1))
    assert largest_gap(trainer.times) < 0.3
    assert outcome.saves_left_out > 10
    assert outcome.saves + outcome.saves_left_out == 40  # one due a step, the last of them after the end
    assert len(bench.saved) == outcome.saves
    assert bench.saved[-1].step == 40


# ---- endings (1) and (2) ---------------------------------------------------------------------------------------------


def test_data_ends_with_a_shorter_window() -> None:
    trainer = FakeTrainer(accumulate=3)
    bench = Bench(planned(10), trainer)
    outcome = bench.run()
    assert [(metrics.step, metrics.position) for metrics in bench.logged] == [(1, 3), (2, 6), (3, 9), (4, 10)]
    assert [(state.step, state.position) for state in bench.saved] == [(4, 10)]
    assert (outcome.issued, outcome.consumed, outcome.saved) == (10, 10, True)


def test_nothing_to_do() -> None:
    bench = Bench(planned(0), FakeTrainer())
    outcome = bench.run()
    assert (outcome.issued, outcome.consumed, outcome.stopped) == (0, 0, False)


def test_last_step_ends_an_endless_plan() -> None:
    trainer = FakeTrainer(steps=4, accumulate=3)
    bench = Bench(planned(None), trainer)
    outcome = bench.run()
    assert trainer.numbers == list(range(12))
    assert [(state.step, state.position) for state in bench.saved] == [(4, 12)]
    assert (outcome.stopped, outcome.saved, outcome.consumed) == (False, True, 12)
    assert 12 <= outcome.issued <= 12 + LIMITS.ahead_bytes


def test_checkpoints_fall_on_their_steps() -> None:
    bench = Bench(planned(None), FakeTrainer(steps=10, seconds=0.01))
    outcome = bench.run(replace(LIMITS, checkpoint_every=5))
    assert [state.step for state in bench.saved] == [5, 10]
    assert outcome.saves_left_out == 0


def test_a_run_that_is_done_already_trains_nothing() -> None:
    trainer = FakeTrainer(steps=0)
    outcome = Bench(planned(None), trainer).run()
    assert trainer.numbers == []
    assert (outcome.stopped, outcome.consumed) == (False, 0)


# ---- ending (3): errors ----------------------------------------------------------------------------------------------


class Broken(Exception):
    """An error of no type that anything here could know."""


def breaking(error: BaseException, place: int, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
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
    trainer.finish = breaking(error, 0, "train", trainer.finish)  # type: ignore[method-assign]
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
    shared = breaking(Broken("early"), 3, "tap", tap)
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
from tests.training.test_pipeline import LIMITS, Bench, FakeTrainer, planned

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
