"""The training pipeline: stages joined by bounded channels under one credit gate, in one task group.

    plan -> gate -> read x R -> tap x N -> order -> train -> metrics
                                                         \\-> checkpoints, evaluations

stage        waits for                                      woken by
plan, gate   credit for the next micro-batch, in order      train having consumed an earlier one
read         a planned micro-batch                          plan
tap          a read batch; two tasks a target replica       read
order        the next number, whatever replica was faster   tap
train        the next tapped batch                          order
metrics      a step                                         train
checkpoints  a snapshot; one save in flight                 train
evaluations  a snapshot, the full replica; one in flight    train, tap

Endings: (1) the plan ends: ends close downstream, each stage drains; the last, shorter window is applied. (2) all steps are
done: train leaves, ends close upstream, each stage stops at its next send; then a final save. (3) a stage raises: the group
cancels the rest and that error comes out unwrapped; nothing is saved. (4) a stop request: as (2), but the open window is
dropped, and the save must fit the deadline; else the last checkpoint stands. A failed target replica is no ending (`replicas`).
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from anyio import Event, create_memory_object_stream
from anyio.streams.memory import MemoryObjectReceiveStream as Receive

from dflash_core.errors import unwrapped
from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from dflash_core.training import endings, stages
from dflash_core.training.gate import MOST_AHEAD, CreditGate
from dflash_core.training.replicas import Replicas
from dflash_core.training.work import Limits, Observation, Outcome, Run, Work


async def run_pipeline(work: Work, limits: Limits, observation: Observation, stop: Event, outcome: Outcome) -> None:
    """Runs every stage until an ending above; returns when the final state is on disk, or raises the stage's own error.

    `outcome` says how far it came. `stop` may be set at any time, from the event loop's thread.
    """
    clocks = observation.clocks
    gate = CreditGate(limits.ahead_bytes)
    replicas = Replicas(
        work.taps, work.rebuild, rebuilds=limits.rebuilds, wanted=lambda: not gate.closed, measure=clocks["tap"].add
    )
    run = Run(work, limits, clocks, stop, gate, replicas, outcome)
    clocks["read"].workers, clocks["tap"].workers = limits.readers, len(work.taps)
    leave_hard = endings.hard_leave()
    try:
        with unwrapped():
            async with anyio.create_task_group() as helpers:
                helpers.start_soon(endings.watchdog, run, leave_hard)
                helpers.start_soon(endings.stopper, run)
                await _run_stages(run, observation)
                helpers.cancel_scope.cancel()
    finally:
        leave_hard.cancel()
        replicas.close()
    await stages.final_save(run)


async def _run_stages(run: Run, observation: Observation) -> None:
    send_planned, planned = create_memory_object_stream[PlannedBatch](MOST_AHEAD)
    send_read, read = create_memory_object_stream[Batch](MOST_AHEAD)
    send_tapped, tapped = create_memory_object_stream[TappedBatch](MOST_AHEAD)
    send_ordered, ordered = create_memory_object_stream[TappedBatch](MOST_AHEAD)
    send_metrics, metrics = create_memory_object_stream[StepMetrics](MOST_AHEAD)
    send_state, states = create_memory_object_stream[TrainState](0)
    send_snapshot, snapshots = create_memory_object_stream[TrainState](0)
    waiting = {"read": planned, "tap": read, "order": tapped, "train": ordered, "metrics": metrics}  # for which stage
    observation.gauges.update({name: partial(_depth, stream) for name, stream in waiting.items()})
    observation.gauges["credit"] = lambda: run.gate.held
    async with anyio.create_task_group() as group:

        def start(stage: Callable[..., Awaitable[None]], *arguments: object, name: str) -> None:
            group.start_soon(partial(_noting_errors, run, stage, *arguments), name=name)

        start(stages.plan, send_planned, name="plan")
        with planned, send_read:
            for i in range(run.limits.readers):
                start(stages.read, i, planned.clone(), send_read.clone(), name=f"read-{i}")
        with read, send_tapped:
            for i in range(2 * len(run.work.taps)):
                start(stages.tap, read.clone(), send_tapped.clone(), name=f"tap-{i}")
        start(stages.order, tapped, send_ordered, name="order")
        start(stages.train, ordered, send_metrics, send_state, send_snapshot, name="train")
        start(stages.metrics, metrics, name="metrics")
        start(stages.checkpoints, states, name="checkpoints")
        start(stages.evaluations, snapshots, name="evaluations")


def _depth(stream: Receive[Any]) -> int:
    return stream.statistics().current_buffer_used


async def _noting_errors(run: Run, stage: Callable[..., Awaitable[None]], *arguments: object) -> None:
    """Remembers the first error, which the watchdog prints where a thread keeps the run from ending."""
    try:
        await stage(run, *arguments)
    except Exception as error:
        run.error = run.error or error
        raise
