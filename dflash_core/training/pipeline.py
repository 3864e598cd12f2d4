"""The training pipeline: stages joined by bounded channels under one credit gate, in one task group.

    plan -> gate -> read x R -> tap x N -> order -> train -> metrics
                                                         \\-> checkpoints

stage        waits for                                      woken by
plan, gate   credit for the next micro-batch, in order      train having consumed an earlier one
read         a planned micro-batch                          plan
tap          a read batch; one task a target replica        read
order        the next number, whatever replica was faster   tap
train        the next tapped batch                          order
metrics      a step                                         train
checkpoints  a snapshot; one save in flight                 train

Every channel behind the gate can hold the whole window that the gate lets in, so a slow early batch never waits for room
held by later ones.

Endings: (1) the plan ends: ends close downstream, each stage drains; the last, shorter window is applied. (2) all steps are
done: train leaves, ends close upstream, each stage stops at its next send; then a final save. (3) a stage raises: the group
cancels the rest and that error comes out unwrapped; nothing is saved. (4) a stop request: as (2), but the open window is
dropped, and the save must fit the deadline; else the last checkpoint stands.
"""

import faulthandler
import heapq
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import anyio
from anyio import BrokenResourceError, CancelScope, CapacityLimiter, Event, create_memory_object_stream, to_thread
from anyio.streams.memory import MemoryObjectReceiveStream as Receive
from anyio.streams.memory import MemoryObjectSendStream as Send

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState

T = TypeVar("T")
LOG = logging.getLogger(__name__)
STAGES = ("plan", "read", "tap", "order", "train", "metrics", "checkpoints")
MOST_AHEAD = 4096  # micro-batches behind the gate, whatever their bytes; also the room of every channel there
LEAVE_HARD_S = 10.0  # a stalled run that cannot end by itself is left after so long


class Trainer(Protocol):
    """The synchronous half."""

    @property
    def done(self) -> bool: ...
    @property
    def step(self) -> int: ...
    def train(self, tapped: TappedBatch, /) -> StepMetrics | None: ...
    def finish(self) -> StepMetrics | None: ...
    def snapshot(self) -> TrainState: ...


class Clock(Protocol):
    """Measures one stage: `with clock.doing("busy", worker=0, number=7): ...`."""

    workers: int

    def doing(self, what: Any, *, worker: int = 0, number: int = -1) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the stages call; each function runs in a thread of its stage."""

    plan: Iterator[PlannedBatch]
    first: int  # number of the plan's first micro-batch
    read: Callable[[PlannedBatch], Batch]
    taps: tuple[Callable[[Batch], TappedBatch], ...]  # one a replica
    trainer: Trainer
    log: Callable[[StepMetrics], None]
    save: Callable[[TrainState], None]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much, how far ahead, how long."""

    readers: int
    ahead_bytes: int
    checkpoint_every: int  # optimizer steps
    stop_deadline_s: float
    stall_s: float


@dataclass
class Outcome:
    """How the run ended; times in seconds."""

    stopped: bool = False  # by request, before the end
    saved: bool = False  # the state at the end is on disk
    issued: int = 0  # micro-batches let in by the gate
    consumed: int = 0  # ... that reached the trainer; the others are read again by the next run
    first_batch_s: float = math.nan
    clone_s: float = 0.0
    save_s: float = 0.0
    saves: int = 0
    saves_left_out: int = 0  # due while one was in flight


class CreditGate:
    """Bytes that micro-batches may hold between the gate and their step. Taken in plan order, by one task."""

    def __init__(self, budget: int) -> None:
        self.budget = self.free = budget
        self.closed = False
        self._inside = 0
        self._changed = Event()

    async def take(self, amount: int) -> bool:
        """Waits for `amount` bytes; False when the gate was closed. Raises ValueError for more than the whole budget."""
        if amount > self.budget:
            raise ValueError(f"a micro-batch of {amount} bytes is above pipeline.ahead_bytes {self.budget}; raise it")
        while not self.closed and (self.free < amount or self._inside >= MOST_AHEAD):
            self._changed = Event()
            await self._changed.wait()
        self.free -= amount
        self._inside += 1
        return not self.closed

    def give(self, amount: int) -> None:
        """Returns what a consumed micro-batch held."""
        self.free += amount
        self._inside -= 1
        self._changed.set()

    def close(self) -> None:
        """Nothing more is wanted."""
        self.closed = True
        self._changed.set()


@dataclass
class _Run:
    """What the stages of one run share."""

    work: Work
    limits: Limits
    clocks: dict[str, Any]
    stop: Event
    gate: CreditGate
    outcome: Outcome = field(default_factory=Outcome)
    receiving: CancelScope = field(default_factory=CancelScope)
    started: float = field(default_factory=time.perf_counter)
    progress: float = field(default_factory=time.perf_counter)
    stop_time: float = math.nan
    saving: CancelScope = field(default_factory=CancelScope)  # around the checkpoints stage
    saved_step: int = -1
    leave_hard: threading.Timer = field(default_factory=lambda: threading.Timer(LEAVE_HARD_S, os._exit, [70]))


async def run_pipeline(work: Work, limits: Limits, clocks: dict[str, Any], stop: Event) -> Outcome:
    """Runs every stage until an ending above; returns when the final state is on disk, or raises the stage's own error.

    `clocks` has one `Clock` for each of STAGES. `stop` may be set at any time, from the event loop's thread.
    """
    run = _Run(work, limits, clocks, stop, CreditGate(limits.ahead_bytes))
    clocks["read"].workers, clocks["tap"].workers = limits.readers, len(work.taps)
    try:
        with _unwrapped():
            async with anyio.create_task_group() as helpers:
                helpers.start_soon(_watchdog, run)
                helpers.start_soon(_stopper, run)
                await _run_stages(run)
                helpers.cancel_scope.cancel()
    finally:
        run.leave_hard.cancel()
    await _final_save(run)
    return run.outcome


async def _run_stages(run: _Run) -> None:
    send_planned, planned = create_memory_object_stream[PlannedBatch](MOST_AHEAD)
    send_read, read = create_memory_object_stream[Batch](MOST_AHEAD)
    send_tapped, tapped = create_memory_object_stream[TappedBatch](MOST_AHEAD)
    send_ordered, ordered = create_memory_object_stream[TappedBatch](MOST_AHEAD)
    send_metrics, metrics = create_memory_object_stream[StepMetrics](MOST_AHEAD)
    send_state, states = create_memory_object_stream[TrainState](0)
    work = run.work
    async with anyio.create_task_group() as stages:
        stages.start_soon(_plan, run, send_planned, name="plan")
        with planned, send_read:
            for i in range(run.limits.readers):
                start = partial(_worker, run, "read", i, work.read, lambda planned: planned.number)
                stages.start_soon(start, planned.clone(), send_read.clone(), name=f"read-{i}")
        with read, send_tapped:
            for i, tap in enumerate(work.taps):
                start = partial(_worker, run, "tap", i, tap, lambda batch: batch.plan.number)
                stages.start_soon(start, read.clone(), send_tapped.clone(), name=f"tap-{i}")
        stages.start_soon(_order, run, tapped, send_ordered, name="order")
        stages.start_soon(_train, run, ordered, send_metrics, send_state, name="train")
        stages.start_soon(_metrics, run, metrics, name="metrics")
        stages.start_soon(_checkpoints, run, states, name="checkpoints")


async def _plan(run: _Run, out: Send[PlannedBatch]) -> None:
    clock, limiter = run.clocks["plan"], CapacityLimiter(1)
    with out:
        while True:
            with clock.doing("busy"):
                planned = await to_thread.run_sync(next, run.work.plan, None, limiter=limiter)
            if planned is None:
                return
            with clock.doing("blocked"):
                if not await run.gate.take(planned.credit):
                    return
            run.outcome.issued += 1
            try:
                out.send_nowait(planned)
            except BrokenResourceError:  # downstream has all it wants
                return


async def _worker(
    run: _Run,
    stage: str,
    worker: int,
    function: Callable[[Any], Any],
    number: Callable[[Any], int],
    inp: Receive[Any],
    out: Send[Any],
) -> None:
    """One reader or one replica: receive, call `function` in its own thread, send."""
    clock, limiter = run.clocks[stage], CapacityLimiter(1)
    with inp, out:
        while (item := await _next(inp, clock)) is not None and not run.gate.closed:
            with clock.doing("busy", worker=worker, number=number(item)):
                result = await to_thread.run_sync(function, item, limiter=limiter)
            try:
                with clock.doing("blocked"):
                    await out.send(result)
            except BrokenResourceError:
                return
            del item, result  # a worker that waits must not hold memory whose credit was given back


async def _next(inp: Receive[T], clock: Clock) -> T | None:
    """The next item, None at the end of the stream; the wait counts as starved."""
    with clock.doing("starved"):
        try:
            return await inp.receive()
        except anyio.EndOfStream:
            return None


async def _order(run: _Run, inp: Receive[TappedBatch], out: Send[TappedBatch]) -> None:
    expected = run.work.first
    early: list[tuple[int, TappedBatch]] = []
    with inp, out:
        while (tapped := await _next(inp, run.clocks["order"])) is not None:
            heapq.heappush(early, (tapped.batch.plan.number, tapped))
            del tapped  # as in _worker
            while early and early[0][0] == expected:
                try:
                    await out.send(heapq.heappop(early)[1])
                except BrokenResourceError:
                    return
                expected += 1


async def _train(run: _Run, inp: Receive[TappedBatch], log: Send[StepMetrics], save: Send[TrainState]) -> None:
    """The step loop: one micro-batch, give its credit back, and when a step was applied, log and perhaps save."""
    clock, limiter, trainer = run.clocks["train"], CapacityLimiter(1), run.work.trainer
    with inp, log, save:
        try:
            while not trainer.done and not run.stop.is_set():
                tapped = None
                with CancelScope() as run.receiving:  # a stop request ends this wait, never a step
                    tapped = await _next(inp, clock)
                if run.stop.is_set():
                    break
                if tapped is None:
                    metrics = await to_thread.run_sync(trainer.finish, limiter=limiter)
                    if metrics is not None:
                        await log.send(metrics)
                    return
                if math.isnan(run.outcome.first_batch_s):
                    run.outcome.first_batch_s = time.perf_counter() - run.started
                plan = tapped.batch.plan
                with clock.doing("busy", number=plan.number):
                    metrics = await to_thread.run_sync(trainer.train, tapped, limiter=limiter)
                del tapped
                run.gate.give(plan.credit)
                run.outcome.consumed += 1
                run.progress = time.perf_counter()
                if metrics is not None:
                    with clock.doing("blocked"):
                        await log.send(metrics)
                        await _offer_state(run, metrics.step, limiter, save)
            run.outcome.stopped = not trainer.done
        finally:
            run.gate.close()


async def _offer_state(run: _Run, step: int, limiter: CapacityLimiter, save: Send[TrainState]) -> None:
    """A snapshot for the checkpoints stage when one is due and none is being written."""
    if step % run.limits.checkpoint_every or run.work.trainer.done:
        return
    if not save.statistics().tasks_waiting_receive:
        run.outcome.saves_left_out += 1
        return
    start = time.perf_counter()
    state = await to_thread.run_sync(run.work.trainer.snapshot, limiter=limiter)
    run.outcome.clone_s += time.perf_counter() - start
    save.send_nowait(state)


async def _metrics(run: _Run, inp: Receive[StepMetrics]) -> None:
    clock, limiter = run.clocks["metrics"], CapacityLimiter(1)
    with inp:
        while (metrics := await _next(inp, clock)) is not None:
            with clock.doing("busy", number=metrics.step):
                await to_thread.run_sync(run.work.log, metrics, limiter=limiter)


async def _checkpoints(run: _Run, inp: Receive[TrainState]) -> None:
    clock, limiter = run.clocks["checkpoints"], CapacityLimiter(1)
    with inp, run.saving:
        while (state := await _next(inp, clock)) is not None:
            with clock.doing("busy", number=state.step):
                await _save(run, state, limiter)


async def _save(run: _Run, state: TrainState, limiter: CapacityLimiter) -> None:
    start = time.perf_counter()
    await to_thread.run_sync(run.work.save, state, limiter=limiter, abandon_on_cancel=True)
    seconds = time.perf_counter() - start
    run.outcome.saves += 1
    run.saved_step = state.step
    run.outcome.save_s = max(run.outcome.save_s, seconds)
    if seconds > run.limits.stop_deadline_s:
        LOG.warning("a save took %.1f s: a stop request (deadline %.1f s) falls back to the last checkpoint",
                    seconds, run.limits.stop_deadline_s)  # fmt: skip


async def _final_save(run: _Run) -> None:
    """The state at the end; after a stop request only if it fits what is left of the deadline."""
    run.outcome.saved = run.saved_step == run.work.trainer.step
    if run.outcome.saved:
        return
    left = math.inf
    if run.outcome.stopped:
        left = run.limits.stop_deadline_s - (time.perf_counter() - run.stop_time)
        if run.outcome.save_s > left:
            return
    limiter = CapacityLimiter(1)
    with anyio.move_on_after(left):  # abandoned, the save leaves only a directory under its temporary name
        state = await to_thread.run_sync(run.work.trainer.snapshot, limiter=limiter)
        await _save(run, state, limiter)
        run.outcome.saved = True


async def _stopper(run: _Run) -> None:
    await run.stop.wait()
    run.stop_time = time.perf_counter()
    run.receiving.cancel()
    await anyio.sleep(run.limits.stop_deadline_s)
    run.saving.cancel()  # a save still in flight is abandoned


async def _watchdog(run: _Run) -> None:
    """Fails the run when no micro-batch was trained for `stall_s`; threads that cannot end are left behind, hard."""
    while (left := run.progress + run.limits.stall_s - time.perf_counter()) > 0:
        await anyio.sleep(left)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    run.leave_hard.daemon = True
    run.leave_hard.start()
    raise TimeoutError(f"no micro-batch was trained for {run.limits.stall_s} s (pipeline.stall_s); all stacks are printed above")


@contextmanager
def _unwrapped() -> Iterator[None]:
    """The first error of a task group itself, instead of the group; further ones become notes."""
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = _leaves(group)
        for other in others:
            first.add_note(f"also raised: {other!r}")
        context = first.__context__
        try:
            raise first
        finally:
            first.__context__ = context  # its own, not the group


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
