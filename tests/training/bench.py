"""One run of the queue pipeline over small fakes, for tests and benchmarks."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import torch

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
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


class Broken(Exception):
    """An error of no type that anything here could know."""
