"""The queue pipeline with small fakes: order, credit, endings of the data, and what may and may not wait for what."""

import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from tests.training.bench import LIMITS, Bench, FakeTrainer, largest_gap, planned, read, tap

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
