"""One fault in one stage of the pipeline: `strike("tap", "middle", "exception")` says how the run ended and how long that took.

An exception is raised by the stage's own work; a SIGTERM is sent to this process while that work is going on.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import anyio

from dflash_core.records import PlannedBatch
from dflash_core.training.pipeline import run_pipeline
from tests.training.bench import LIMITS, Bench, Broken, FakeTrainer, planned, read, tap

STAGES = ("plan", "read", "tap", "train", "log", "save")
PLACES = {"first": 0, "middle": 7, "last": 15}
COUNT = 16
SAVES = {"first": 0, "middle": 1, "last": 3}  # after steps 4, 8, 12 and 16


@dataclass
class Struck:
    """How a run ended after its fault."""

    bench: Bench
    error: BaseException | None
    raised: BaseException  # by the stage, where an exception was asked for
    seconds: float  # from the fault to the end
    threads: int  # that are left


def strike(stage: str, place: str, what: str, *, error: BaseException | None = None) -> Struck:
    """Runs 16 micro-batches through two replicas with a fault in one call of `stage`."""
    raised = error or Broken(f"{stage} {place}")
    struck: list[float] = []

    def fault() -> None:
        struck.append(time.perf_counter())
        if what == "exception":
            raise raised
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.02)  # the call goes on while the signal arrives

    bench = _bench(stage, (SAVES if stage == "save" else PLACES)[place], fault)
    limits = replace(LIMITS, checkpoint_every=4) if stage == "save" else LIMITS
    before, ended = threading.active_count(), None
    try:
        anyio.run(_with_signals, bench, limits)
    except BaseException as found:
        ended = found
    seconds = time.perf_counter() - struck[0]
    deadline = time.perf_counter() + 2
    while threading.active_count() > before and time.perf_counter() < deadline:
        time.sleep(0.01)  # idle threads of the loop are told to go when it ends
    return Struck(bench, ended, raised, seconds, threading.active_count() - before)


async def _with_signals(bench: Bench, limits: Any) -> None:
    stop = anyio.Event()

    async def listen(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                stop.set()

    found = None
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            await group.start(listen)
            try:
                await run_pipeline(bench.work, limits, bench.observation, stop, bench.outcome)
            except Exception as error:
                found = error
            group.cancel_scope.cancel()
    if found is not None:
        raise found


def _bench(stage: str, place: int, fault: Callable[[], None]) -> Bench:
    calls, lock = itertools.count(), threading.Lock()

    def struck(function: Callable[..., Any]) -> Callable[..., Any]:
        def work(*arguments: Any) -> Any:
            with lock:
                call = next(calls)
            if call == place:
                fault()
            return function(*arguments)

        return work

    def struck_plan() -> Iterator[PlannedBatch]:
        for item in planned(COUNT):
            if item.number == place:
                fault()
            yield item

    trainer = FakeTrainer(seconds=0.002)
    bench = Bench(planned(COUNT), trainer)
    if stage == "plan":
        bench.work = replace(bench.work, plan=struck_plan())
    elif stage == "train":
        trainer.train = struck(trainer.train)  # type: ignore[method-assign]
    elif stage == "tap":
        shared = struck(tap)
        bench.work = replace(bench.work, taps=(shared, shared))
    else:
        function = {"read": read, "log": bench.logged.append, "save": bench.saved.append}[stage]
        bench.work = replace(bench.work, **{stage: struck(function)})
    return bench
