"""Evaluations during training: the part of the composition root that fits measuring and pipeline together.

Watch  before training: prompts and rows read, the full replica checked, evaluations of earlier processes read
       while it goes on: snapshot -> the lent replica -> evaluations.jsonl
       after it: what they found and what they cost -> training.json
"""

import time
from collections.abc import Callable
from typing import Any

from dflash_core import preparation
from dflash_core.config import Config
from dflash_core.decoding.snapshots import SnapshotBench
from dflash_core.modeling.target import TapReplica
from dflash_core.records import DrafterShape, TargetFacts, TrainState
from dflash_core.rundir import RunDirectory
from dflash_core.training.checkpoint import load_checkpoint, stored
from dflash_core.training.evaluations import EvaluationsFile, summary
from dflash_core.training.work import Outcome


class Watch:
    """Measures snapshots with the replica that `full()` gives. Raises ValueError where that cannot be done."""

    def __init__(
        self, config: Config, run: RunDirectory, shape: DrafterShape, facts: TargetFacts, *, full: Callable[[], TapReplica]
    ) -> None:
        self._every, self._run, self._full = config.during_training.eval_every or 0, run, full
        self._file = EvaluationsFile(run.evaluations)
        validation = run.validation if config.data.conversations and run.validation.is_dir() else None
        date = preparation.frozen_date(config, run)
        self._bench = SnapshotBench(config, shape, facts, validation=validation, date=date)
        self._bench.check(full())
        self._started = time.perf_counter()

    @property
    def real(self) -> dict[int, float]:
        """Real acceptance length by step, of all processes of the run."""
        return self._file.real

    def evaluate(self, state: TrainState, wanted: Callable[[], bool]) -> bool:
        """Measures and writes down; False where it was given up."""
        found = self._bench.measure(self._full(), state, wanted)
        if found is None:
            return False
        self._file.add(found)
        return True

    def late(self, step: int) -> Callable[[], TrainState] | None:
        """Reads the checkpoint whose evaluation was due last up to `step` and is not there; None where nothing is to be made up for."""
        due = step - step % self._every
        path = stored(self._run.checkpoints, due)
        return None if path is None or due in self._file.real else lambda: load_checkpoint(path)[0]

    def summary(self, outcome: Outcome) -> dict[str, Any]:
        """For training.json."""
        return summary(
            self._file,
            left_out=outcome.evaluations_left_out,
            given_up=outcome.evaluations_given_up,
            seconds=outcome.evaluation_s,
            wall_s=time.perf_counter() - self._started,
        )
