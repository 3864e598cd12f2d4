"""Evaluations during training on their way to MLflow: each at the step of its snapshot, which training has long left behind.

evaluations.jsonl --Tail--> lines not known to MLflow --log_batch--> metrics `evaluation/<name>`
"""

import math
import time
from pathlib import Path
from typing import Any

from flows.metric_names import EVALUATION_KNOWN, evaluation_points
from flows.tail import Tail


class EvaluationLines:
    """Sends what MLflow does not have; which steps those are, it is asked once."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines = path, Tail(path)
        self._waiting: list[dict[str, Any]] = []
        self._sent: set[int] | None = None

    def send(self, client: Any, run_id: str) -> None:
        """All lines that are there. Raises what MLflow raises; nothing is lost or sent twice by calling it again."""
        from mlflow.entities import Metric

        while rows := self._lines.read():
            self._waiting += rows
        if self._waiting and self._sent is None:
            self._sent = {point.step for point in client.get_metric_history(run_id, EVALUATION_KNOWN)}
        while self._waiting:
            row, now = self._waiting[0], int(time.time() * 1000)
            if row["step"] not in (sent := self._sent or set()):
                points = [(name, value) for name, value in evaluation_points(row) if math.isfinite(value)]
                client.log_batch(run_id, metrics=[Metric(name, value, now, row["step"]) for name, value in points])
                self._sent = {*sent, row["step"]}
            self._waiting.pop(0)

    def not_sent(self) -> int:
        """Evaluations of the file that MLflow is not known to have."""
        lines, steps = Tail(self._path), set[int]()
        while rows := lines.read():
            steps |= {row["step"] for row in rows}
        return len(steps - (self._sent or set()))
