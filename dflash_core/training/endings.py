"""How a run of the pipeline ends before its data does: stop requests, stalls, and the error of a task group itself."""

import faulthandler
import math
import os
import sys
import threading
import time
import traceback

import anyio

from dflash_core.training.work import Run

LEAVE_HARD_S = 10.0  # a stalled run that cannot end by itself is left after so long


async def stopper(run: Run) -> None:
    """After a stop request: ends the trainer's wait at once, and at the deadline a save in flight."""
    await run.stop.wait()
    run.stop_time = time.perf_counter()
    run.receiving.cancel()
    await anyio.sleep(run.limits.stop_deadline_s)
    run.saving.cancel()


def deadline_left(run: Run) -> float:
    """Seconds until a stopped run must be over; infinite for others."""
    if not run.outcome.stopped:
        return math.inf
    return run.limits.stop_deadline_s - (time.perf_counter() - run.stop_time)


async def watchdog(run: Run, leave_hard: threading.Timer) -> None:
    """Fails the run when no micro-batch was trained for too long; threads that cannot end are left behind, hard."""
    while True:
        early = run.outcome.consumed == 0 or run.replicas.loading > 0
        name, patience = ("first_batch_s", run.limits.first_batch_s) if early else ("stall_s", run.limits.stall_s)
        if run.limits.evaluate_s:  # this rank, or the first one, may be evaluating
            name, patience = f"{name} + during_training.limit_s", patience + run.limits.evaluate_s
        left = run.progress + patience - time.perf_counter()
        if left <= 0:
            break
        await anyio.sleep(min(left, run.limits.stall_s))
    stderr = sys.__stderr__ or sys.stderr
    if run.error is not None:
        traceback.print_exception(run.error, file=stderr)
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    leave_hard.daemon = True
    leave_hard.start()
    raise TimeoutError(f"no micro-batch was trained for {patience} s (pipeline.{name}); all stacks are printed above")


def hard_leave() -> threading.Timer:
    """A timer that ends the process, whatever its threads do."""
    return threading.Timer(LEAVE_HARD_S, os._exit, [70])
