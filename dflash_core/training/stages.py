"""The stages of the pipeline as async functions: each receives, calls its function in a thread of its own, and sends.

A closed end is the message: at the end of a stream a stage drains and returns, and a send into a closed one means that
downstream has all it wants.
"""

import heapq
import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import TypeVar

import anyio
from anyio import BrokenResourceError, CancelScope, CapacityLimiter, to_thread
from anyio.streams.memory import MemoryObjectReceiveStream as Receive
from anyio.streams.memory import MemoryObjectSendStream as Send

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from dflash_core.training.endings import deadline_left
from dflash_core.training.work import FULL, Clock, Run

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


async def train(
    run: Run, inp: Receive[TappedBatch], log: Send[StepMetrics], save: Send[TrainState], evaluate: Send[TrainState]
) -> None:
    """The step loop: one micro-batch, give its credit back, and when a step was applied, log and perhaps save and evaluate."""
    clock, limiter, trainer = run.clocks["train"], CapacityLimiter(1), run.work.trainer
    with inp, log, save, evaluate:
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
                        await _offer_state(run, metrics.step, limiter, save, evaluate)
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
                        await _offer_state(run, metrics.step, limiter, save, evaluate)
            run.outcome.stopped = not trainer.done
        finally:
            run.gate.close()


async def _offer_state(run: Run, step: int, limiter: CapacityLimiter, save: Send[TrainState], evaluate: Send[TrainState]) -> None:
    """A snapshot for the stages where one is due and none is in work; what is evaluated is a checkpoint, or there is no best one."""
    outcome, every, last = run.outcome, run.limits.evaluate_every, run.work.trainer.done  # the last state is saved at the end
    saved = not last and (step % run.limits.checkpoint_every == 0 or step % every == 0)
    evaluated = step % every == 0 and run.work.evaluate is not None and step not in run.work.evaluated
    together = run.limits.together and (saved or step % every == 0)
    if saved and not save.statistics().tasks_waiting_receive:
        outcome.saves_left_out, saved = outcome.saves_left_out + 1, False
    if evaluated and not (evaluate.statistics().tasks_waiting_receive and (saved or last)):
        outcome.evaluations_left_out, evaluated = outcome.evaluations_left_out + 1, False
    if not (saved or evaluated or together):
        return
    start = time.perf_counter()
    state = await to_thread.run_sync(run.work.trainer.snapshot, limiter=limiter)
    outcome.clone_s += time.perf_counter() - start
    if evaluated:
        outcome.evaluating = step
        evaluate.send_nowait(replace(state, moments={}))
    if saved:
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


async def evaluations(run: Run, inp: Receive[TrainState]) -> None:
    """Measures snapshots in the full replica's thread, one at a time; first the one that an earlier process did not end."""
    clock, limiter = run.clocks["evaluations"], CapacityLimiter(1)
    with inp:
        if run.work.late is not None and not run.stop.is_set():
            await _evaluate(run, await to_thread.run_sync(run.work.late, limiter=limiter), clock)
        while (state := await _next(inp, clock)) is not None:
            await _evaluate(run, state, clock)
            del state  # as in read


async def _evaluate(run: Run, state: TrainState, clock: Clock) -> None:
    """One snapshot: to its end, to a stop request, to an error of another stage, or to the limit."""
    limit = run.limits.evaluate_s
    run.outcome.evaluating = state.step
    ended, start, end = await run.replicas.borrow(FULL, partial(_evaluate_within, run, state, limit))
    run.outcome.evaluating = -1
    clock.add("busy", start, end, number=state.step)
    run.outcome.evaluation_s += end - start
    run.progress = time.perf_counter()
    if ended:
        run.outcome.evaluations += 1
    elif not run.stop.is_set():
        run.outcome.evaluations_given_up += 1
        LOG.warning("the evaluation of step %d was given up after %.1f s (during_training.limit_s %.1f), training goes on; raise it, or "
                    "lower during_training.num_prompts or max_new_tokens", state.step, end - start, limit)  # fmt: skip


def _evaluate_within(run: Run, state: TrainState, limit: float) -> tuple[bool, float, float]:
    """(whether it came to its end, when it began and ended), in the replica's thread."""
    start = time.perf_counter()

    def wanted() -> bool:
        return not run.stop.is_set() and run.error is None and time.perf_counter() - start < limit

    assert run.work.evaluate is not None, "nothing is sent to be evaluated without it"
    return run.work.evaluate(state, wanted), start, time.perf_counter()


async def final_save(run: Run) -> None:
    """The state at the end; after a stop request only if it fits what is left of the deadline."""
    run.outcome.saved = run.saved_step == run.work.trainer.step
    left = deadline_left(run)
    needless = run.outcome.saved or run.outcome.save_s > left
    if needless and not run.limits.together:
        return
    limiter = CapacityLimiter(1)
    state = await to_thread.run_sync(run.work.trainer.snapshot, limiter=limiter)
    if needless:
        return
    with anyio.move_on_after(deadline_left(run)):  # abandoned, the save leaves only a directory under its temporary name
        await _save(run, state, limiter)
        run.outcome.saved = True
