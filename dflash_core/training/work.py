"""What a run of the pipeline is made of: the functions its stages call, its limits, and how it ended."""

import math
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from anyio import CancelScope, Event

from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from dflash_core.training.gate import CreditGate
from dflash_core.training.replicas import Replicas

STAGES = ("plan", "read", "tap", "order", "train", "metrics", "checkpoints", "evaluations")
FULL = 0  # the replica with all layers and the head, where snapshots are evaluated


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
    def add(self, what: Any, start: float, end: float, *, worker: int = 0, number: int = -1) -> None: ...


class Observation(Protocol):
    """Where a run is watched: a clock for each of STAGES, and gauges that the pipeline hangs up when it begins."""

    @property
    def clocks(self) -> Mapping[str, Clock]: ...
    @property
    def gauges(self) -> dict[str, Callable[[], int]]: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the stages call; each function runs in a thread of its stage."""

    plan: Iterator[PlannedBatch]
    first: int  # number of the plan's first micro-batch
    read: Callable[[PlannedBatch], Batch]
    taps: tuple[Callable[[Batch], TappedBatch], ...]  # one a replica
    rebuild: Callable[[int], None]  # loads a replica anew after its tap has failed
    trainer: Trainer
    log: Callable[[StepMetrics], None]
    save: Callable[[TrainState], None]
    evaluate: Callable[[TrainState, Callable[[], bool]], bool] | None = None
    """Measures a snapshot in the thread of the full replica; False where it was given up because `wanted()` said no. None: not here."""
    evaluated: Container[int] = ()  # steps that an earlier process has measured
    late: Callable[[], TrainState] | None = None  # reads the snapshot whose evaluation an earlier process did not end


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much, how far ahead, how long."""

    readers: int
    ahead_bytes: int
    checkpoint_every: int  # optimizer steps
    stop_deadline_s: float
    stall_s: float
    first_batch_s: float  # the same until the first micro-batch is trained, and while a replica is loaded anew
    rebuilds: int
    evaluate_every: int = sys.maxsize  # optimizer steps; each of them is a checkpoint, too
    evaluate_s: float = 0.0  # an evaluation that takes longer is given up; the watchdog waits so much longer
    together: bool = False  # snapshots are taken by several ranks together, so by each one whenever they are due


@dataclass
class Outcome:
    """How the run ended; times in seconds. Filled while it runs, so it says something after an error too."""

    stopped: bool = False  # by request, before the end
    saved: bool = False  # the state at the end is on disk
    issued: int = 0  # micro-batches let in by the gate
    consumed: int = 0  # ... that were given to the trainer; the others are read again by the next run
    failures: int = 0  # of replicas
    rebuilds: int = 0  # ... that were loaded anew
    first_batch_s: float = math.nan
    clone_s: float = 0.0
    save_s: float = 0.0  # the longest
    saves: int = 0
    saves_left_out: int = 0  # due while one was in flight
    evaluating: int = -1  # step of the snapshot being evaluated, whose checkpoint must stay
    evaluations: int = 0
    evaluations_left_out: int = 0  # due while one, or a save, was in flight
    evaluations_given_up: int = 0  # over their limit
    evaluation_s: float = 0.0  # for which the full replica was lent, given up or not


@dataclass
class Run:
    """What the stages of one run share."""

    work: Work
    limits: Limits
    clocks: Mapping[str, Clock]
    stop: Event
    gate: CreditGate
    replicas: Replicas
    outcome: Outcome
    error: BaseException | None = None  # the first that a stage raised
    receiving: CancelScope = field(default_factory=CancelScope)
    started: float = field(default_factory=time.perf_counter)
    progress: float = field(default_factory=time.perf_counter)
    stop_time: float = math.nan
    saving: CancelScope = field(default_factory=CancelScope)  # around the checkpoints stage
    saved_step: int = -1
