"""Replicas that fail: the micro-batch keeps its place and its credit, whatever happens to its target."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_core.records import Batch, TappedBatch
from tests.fakes import make_batch
from tests.training.bench import LIMITS, Bench, Broken, FakeTrainer, planned, tap

Tap = Callable[[Batch], TappedBatch]


class Farm:
    """Replicas of which some calls fail: `fails(replica, number, attempt)`; loading one anew takes its time."""

    def __init__(
        self, replicas: int, fails: Callable[[int, int, int], bool], *, error: Callable[[str], Exception] = Broken
    ) -> None:
        self.calls: list[tuple[int, int]] = []
        self.rebuilt: list[int] = []
        self.working = [True] * replicas
        self._attempts: Counter[int] = Counter()
        self._fails, self._error, self._lock = fails, error, threading.Lock()
        self.taps = tuple(self._replica(i) for i in range(replicas))

    def _replica(self, index: int) -> Tap:
        def work(batch: Batch) -> TappedBatch:
            number = batch.plan.number
            with self._lock:
                assert self.working[index], "a failed replica was called before it was loaded anew"
                self.calls.append((index, number))
                attempt = self._attempts[number]
                self._attempts[number] += 1
            if self._fails(index, number, attempt):
                self.working[index] = False
                raise self._error(f"replica {index}, number {number}")
            return tap(batch)

        return work

    def rebuild(self, index: int) -> None:
        assert not self.working[index]
        time.sleep(0.003)
        self.rebuilt.append(index)
        self.working[index] = True

    def bench(self, count: int, trainer: FakeTrainer, **work: Any) -> Bench:
        return Bench(planned(count), trainer, **{"taps": self.taps, "rebuild": self.rebuild, **work})


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("number", [0, 7, 15])
def test_another_replica_gets_the_micro_batch_and_the_failed_one_is_loaded_anew(replicas: int, number: int) -> None:
    farm, trainer = Farm(replicas, lambda replica, n, attempt: n == number and attempt == 0), FakeTrainer()
    bench = farm.bench(16, trainer)
    outcome = bench.run(replace(LIMITS, rebuilds=3))
    assert trainer.numbers == list(range(16))
    assert (outcome.issued, outcome.consumed, outcome.failures) == (16, 16, 1)
    (failed, _), (rescuer, _) = [call for call in farm.calls if call[1] == number]
    assert farm.rebuilt in ([failed], [])  # at the end there may be nothing left to load it for
    assert outcome.rebuilds == len(farm.rebuilt)
    assert (rescuer == failed) == (replicas == 1)
    assert len(farm.calls) == 17


def test_the_error_of_a_micro_batch_that_fails_everywhere_comes_out_as_it_was_raised() -> None:
    farm = Farm(3, lambda replica, number, attempt: number == 5)
    with pytest.raises(Broken, match="number 5") as caught:
        farm.bench(16, FakeTrainer()).run(replace(LIMITS, rebuilds=9), within=5.0)
    assert len([call for call in farm.calls if call[1] == 5]) == 2
    assert any("failed with the same micro-batch" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_the_budget_is_kept(budget: int) -> None:
    farm, trainer = Farm(2, lambda replica, number, attempt: number % 3 == 0 and attempt == 0), FakeTrainer()
    bench = farm.bench(99, trainer)
    with pytest.raises(Broken):
        bench.run(replace(LIMITS, rebuilds=budget), within=5.0)
    assert bench.outcome.failures <= budget
    assert len(farm.rebuilt) <= budget
    assert bench.saved == []
    assert trainer.numbers == list(range(len(trainer.numbers)))


def test_an_error_while_loading_comes_out() -> None:
    def rebuild(replica: int) -> None:
        raise OSError("the weights are gone")

    farm = Farm(1, lambda replica, number, attempt: number == 2)
    with pytest.raises(OSError, match="the weights are gone"):
        farm.bench(9, FakeTrainer(), rebuild=rebuild).run(replace(LIMITS, rebuilds=3), within=5.0)


def test_loading_anew_may_take_longer_than_a_stall() -> None:
    farm, trainer = Farm(1, lambda replica, number, attempt: number == 2 and attempt == 0), FakeTrainer()

    def slow_rebuild(replica: int) -> None:
        time.sleep(0.7)
        farm.rebuild(replica)

    farm.bench(9, trainer, rebuild=slow_rebuild).run(replace(LIMITS, rebuilds=1, stall_s=0.3, first_batch_s=5.0), within=8.0)
    assert trainer.numbers == list(range(9))


def test_the_others_go_on_while_one_is_loaded_anew() -> None:
    farm, trainer = Farm(2, lambda replica, n, attempt: n == 2 and attempt == 0), FakeTrainer()
    went_on = threading.Event()

    def patient_rebuild(replica: int) -> None:
        assert went_on.wait(5), "nothing was trained while a replica was loaded anew"
        farm.rebuild(replica)

    def log(metrics: Any) -> None:
        if metrics.step == 30:
            went_on.set()

    farm.bench(40, trainer, rebuild=patient_rebuild, log=log).run(replace(LIMITS, rebuilds=1), within=8.0)
    assert trainer.numbers == list(range(40))


def test_the_old_model_is_free_before_the_new_one_is_loaded() -> None:
    """The kept error must not hold it: one device has no room for two."""
    import weakref

    class Model:
        pass

    models = {0: Model()}
    old, alive = weakref.ref(models[0]), []

    def failing(batch: Batch) -> TappedBatch:
        model = models[0]
        if batch.plan.number == 1 and model is old():
            raise Broken
        del model
        return tap(batch)

    def rebuild(replica: int) -> None:
        models.pop(0)
        alive.append(old() is not None)
        models[0] = Model()

    Bench(planned(3), FakeTrainer(), taps=(failing,), rebuild=rebuild).run(replace(LIMITS, rebuilds=1))
    assert alive == [False]


# ---- memory ----------------------------------------------------------------------------------------------------------


class Card:
    """A target whose memory holds so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows, self.seen = rows, []

    def tap(self, batch: Batch) -> TappedBatch:
        self.seen.append(len(batch.plan.rows))
        if len(batch.plan.rows) > self.rows:
            raise torch.OutOfMemoryError(f"no room for {len(batch.plan.rows)} rows")
        return TappedBatch(batch=batch, target_hidden=batch.input_ids.float().unsqueeze(-1))


def four_rows(plan: Any) -> Batch:
    batch = make_batch([([plan.number + i, i], [1, 1]) for i in range(4)], first_row=4 * plan.number)
    return replace(batch, plan=replace(batch.plan, number=plan.number))


def test_a_micro_batch_too_large_for_a_target_is_tapped_in_halves() -> None:
    card, trained = Card(2), []

    class Keeping(FakeTrainer):
        def train(self, tapped: TappedBatch) -> Any:
            trained.append(tapped)
            return super().train(tapped)

    outcome = Bench(planned(3), Keeping(), read=four_rows, taps=(card.tap,)).run()
    assert card.seen == [4, 2, 2] * 3
    assert all(tapped.split for tapped in trained)
    assert [tapped.target_hidden[:, 0, 0].tolist() for tapped in trained] == [[n, n + 1, n + 2, n + 3] for n in range(3)]
    assert (outcome.failures, outcome.consumed) == (0, 3)


@pytest.mark.parametrize("room", [0, 1])
def test_a_micro_batch_too_large_in_halves_too_fails_with_its_name(room: int) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Bench(planned(3), FakeTrainer(), read=four_rows, taps=(Card(room).tap,)).run(replace(LIMITS, rebuilds=5), within=5.0)
    assert any("of 4 rows x 2 tokens: out of memory in the target" in note for note in caught.value.__notes__)


# ---- no deadlock -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_random_failures_never_deadlock(seed: int) -> None:
    storm(seed)


def storm(seed: int) -> None:
    """1 to 4 replicas under the smallest budget, micro-batch 0 ten times slower, replicas failing at random."""
    rng = random.Random(seed)
    replicas, share = rng.randint(1, 4), rng.choice([0.0, 0.05, 0.3, 1.0])
    failing = {number for number in range(40) if rng.random() < share}
    naps = {number: rng.random() * 0.002 for number in range(40)}
    farm, trainer = Farm(replicas, lambda replica, number, attempt: number in failing and attempt == 0), FakeTrainer()

    def napping(work: Tap) -> Tap:
        def slow(batch: Batch) -> TappedBatch:
            number = batch.plan.number
            time.sleep(0.01 if number == 0 else naps[number])
            return work(batch)

        return slow

    bench = farm.bench(40, trainer, taps=tuple(map(napping, farm.taps)))
    limits = replace(LIMITS, readers=rng.randint(1, 3), ahead_bytes=replicas + 2, rebuilds=rng.choice([3, 40]))
    try:
        outcome = bench.run(limits, within=15.0)
    except Broken:
        assert len(failing) > limits.rebuilds
        assert bench.saved == []
    else:
        assert trainer.numbers == list(range(40))
        assert outcome.failures == len(failing)
    assert trainer.numbers == list(range(len(trainer.numbers)))
