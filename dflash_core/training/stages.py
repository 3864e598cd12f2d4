"""The stages of the pipeline as async functions: each receives, calls its function in a thread of its own, and sends.

A closed end is the message: at the end of a stream a stage drains and returns, and a send into a closed one means that
downstream has all it wants.
"""

import heapq
import logging
import math
import time
from typing import TypeVar

import anyio
from anyio import BrokenResourceError, CancelScope, CapacityLimiter, to_thread
from anyio.streams.memory import MemoryObjectReceiveStream as Receive
from anyio.streams.memory import MemoryObjectSendStream as Send

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from dflash_core.training.endings import deadline_left
from dflash_core.training.work import Clock, Run

T = TypeVar("T")
LOG = logging.getLogger(__name__)


async def plan(run: Run, out: Send[PlannedBatch]) -> None:
    """Lets planned micro-batches through the gate, in order."""
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
            except BrokenResourceError:
                return


async def read(run: Run, worker: int, inp: Receive[PlannedBatch], out: Send[Batch]) -> None:
    """One reader: rows of a planned micro-batch in host memory."""
    clock, limiter = run.clocks["read"], CapacityLimiter(1)
    with inp, out:
        while (planned := await _next(inp, clock)) is not None and not run.gate.closed:
            with clock.doing("busy", worker=worker, number=planned.number):
                batch = await to_thread.run_sync(run.work.read, planned, limiter=limiter)
            if not await _send(out, batch, clock):
                return
            del planned, batch  # a worker that waits must not hold memory whose credit was given back


async def tap(run: Run, inp: Receive[Batch], out: Send[TappedBatch]) -> None:
    """Hidden states of one batch after the other. There are two such tasks a replica, so that its next batch waits at its door."""
    replicas, outcome = run.replicas, run.outcome
    with inp, out:
        async for batch in inp:
            tapped = await replicas.tap(batch)
            if tapped is None or not await _send(out, tapped, run.clocks["tap"]):
                return
            del batch, tapped  # as in read
            if not run.gate.closed:
                await replicas.mend()
            if (replicas.failures, replicas.rebuilt) != (outcome.failures, outcome.rebuilds):
                outcome.failures, outcome.rebuilds = replicas.failures, replicas.rebuilt
                run.progress = time.perf_counter()


async def _next(inp: Receive[T], clock: Clock) -> T | None:
    """The next item, None at the end of the stream; the wait counts as starved."""
    with clock.doing("starved"):
        try:
            return await inp.receive()
        except anyio.EndOfStream:
            return None


async def _send(out: Send[T], item: T, clock: Clock) -> bool:
    """Whether downstream took the item; the wait counts as blocked."""
    try:
        with clock.doing("blocked"):
            await out.send(item)
    except BrokenResourceError:
        return False
    return True


async def order(run: Run, inp: Receive[TappedBatch], out: Send[TappedBatch]) -> None:
    """Passes micro-batches on by number, whatever replica was faster."""
    expected = run.work.first
    early: list[tuple[int, TappedBatch]] = []
    with inp, out:
        while (tapped := await _next(inp, run.clocks["order"])) is not None:
            heapq.heappush(early, (tapped.batch.plan.number, tapped))
            del tapped  # as in read
            while early and early[0][0] == expected:
                try:
                    await out.send(heapq.heappop(early)[1])
                except BrokenResourceError:
                    return
                expected += 1


async def train(run: Run, inp: Receive[TappedBatch], log: Send[StepMetrics], save: Send[TrainState]) -> None:
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
                run.outcome.consumed += 1
                with clock.doing("busy", number=plan.number):
                    metrics = await to_thread.run_sync(trainer.train, tapped, limiter=limiter)
                del tapped
                run.gate.give(plan.credit)
                run.progress = time.perf_counter()
                if metrics is not None:
                    with clock.doing("blocked"):
                        await log.send(metrics)
                        await _offer_state(run, metrics.step, limiter, save)
            run.outcome.stopped = not trainer.done
        finally:
            run.gate.close()


async def _offer_state(run: Run, step: int, limiter: CapacityLimiter, save: Send[TrainState]) -> None:
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


async def metrics(run: Run, inp: Receive[StepMetrics]) -> None:
    """Writes each step down."""
    clock, limiter = run.clocks["metrics"], CapacityLimiter(1)
    with inp:
        while (step := await _next(inp, clock)) is not None:
            with clock.doing("busy", number=step.step):
                await to_thread.run_sync(run.work.log, step, limiter=limiter)


async def checkpoints(run: Run, inp: Receive[TrainState]) -> None:
    """Writes snapshots, one at a time."""
    clock, limiter = run.clocks["checkpoints"], CapacityLimiter(1)
    with inp, run.saving:
        while (state := await _next(inp, clock)) is not None:
            with clock.doing("busy", number=state.step):
                await _save(run, state, limiter)


async def _save(run: Run, state: TrainState, limiter: CapacityLimiter) -> None:
    start = time.perf_counter()
    await to_thread.run_sync(run.work.save, state, limiter=limiter, abandon_on_cancel=True)
    seconds = time.perf_counter() - start
    run.outcome.saves += 1
    run.saved_step = state.step
    run.outcome.save_s = max(run.outcome.save_s, seconds)
    if seconds > run.limits.stop_deadline_s:
        LOG.warning("a save took %.1f s: a stop request (deadline %.1f s) falls back to the last checkpoint",
                    seconds, run.limits.stop_deadline_s)  # fmt: skip


async def final_save(run: Run) -> None:
    """The state at the end; after a stop request only if it fits what is left of the deadline."""
    run.outcome.saved = run.saved_step == run.work.trainer.step
    left = deadline_left(run)
    if run.outcome.saved or run.outcome.save_s > left:
        return
    limiter = CapacityLimiter(1)
    with anyio.move_on_after(left):  # abandoned, the save leaves only a directory under its temporary name
        state = await to_thread.run_sync(run.work.trainer.snapshot, limiter=limiter)
        await _save(run, state, limiter)
        run.outcome.saved = True
