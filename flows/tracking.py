"""MLflow, at the edge: it shows what the run directory holds, and training neither waits for it nor fails with it.

    metrics.jsonl --(tailed by a thread of its own)--> log_batch        the file is the truth, MLflow a copy
    report        --publish--> metrics, report.*, drafter/              where it fails, a warning: the files are there

One MLflow run a training. Its id stands in the run directory, so a resumed training goes on in it; the newest step that
MLflow has is asked of MLflow itself (metric `step`), so nothing is sent twice. Only explicit run ids, never the active run.
"""

import contextvars
import json
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import anyio
from anyio import to_thread

from dflash_core.config import Config
from dflash_core.rundir import RunDirectory
from flows.mlflow_run import (
    REPORT_METRICS,
    connect,
    experiment_id,
    find_run,
    first_line,
    flat_params,
    shown,
    step_points,
    tags,
    tracking_uri,
    without_password,
)
from flows.running import Stopped
from flows.settings import config_yaml

LOG = logging.getLogger("flows.tracking")
SEND_EVERY_S = 2.0
FLUSH_S = 30.0  # at an ending; what is not sent then is counted and left to the file
METRICS_A_CALL = 1000  # MLflow's limit for one log_batch
PARAMS_A_CALL = 100
READ_BYTES = 2**20  # of metrics.jsonl at a time, so a store that is away for days costs no memory


class Tracker(Protocol):
    """Where a run's numbers are shown."""

    uri: str | None

    def publish(self, report: dict[str, Any]) -> None:
        """Shows the finished report and its files. Blocks; never raises for the tracker's own troubles."""

    def close(self, status: str) -> None:
        """Sends what is left within FLUSH_S and ends the run as FINISHED, FAILED or KILLED."""


class NoTracker:
    """Shows nothing."""

    uri: str | None = None

    def publish(self, report: dict[str, Any]) -> None:
        """Nothing."""

    def close(self, status: str) -> None:
        """Nothing."""


def open_store(config: Config) -> None:
    """Imports MLflow and makes the tables of a new local store, seconds of work that else compete with the first steps.

    What goes wrong here goes wrong again in the tracker, which tells it.
    """
    uri = tracking_uri(config)
    if uri is not None and uri.startswith("sqlite:"):
        client = connect(uri)
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException, OSError):
            Path(config.places.runs).mkdir(parents=True, exist_ok=True)
            experiment_id(client, uri, config)


@asynccontextmanager
async def tracking(config: Config, run: RunDirectory) -> AsyncIterator[Tracker]:
    """The run's tracker, closed with the status that the block ended with."""
    tracker: Tracker = NoTracker()
    if tracking_uri(config) is not None:
        tracker = await to_thread.run_sync(MlflowTracker, config, run)  # imports MLflow, which takes a second
    status = "KILLED"
    try:
        yield tracker
        status = "FINISHED"
    except Stopped:
        raise
    except Exception:
        status = "FAILED"
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(tracker.close, status)


class MlflowTracker:
    """Sends the lines of metrics.jsonl from a thread of its own, and everything else on demand."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        uri = tracking_uri(config)
        assert uri is not None
        self.uri: str | None = uri
        self._config, self._run = config, run
        self._client = connect(uri)
        self._run_id = ""
        self._sent_step = 0  # newest step that MLflow has
        self._lines = _Tail(run.metrics)
        self._waiting: list[tuple[int, list[tuple[str, float]]]] = []  # steps read and not sent yet
        self._not_finite = 0
        self._warned = False
        self._opened, self._closing = threading.Event(), threading.Event()
        self._status = "RUNNING"
        context = contextvars.copy_context()  # so that warnings reach the flow run's log
        self._thread = threading.Thread(target=context.run, args=(self._send_all,), name="mlflow", daemon=True)
        self._thread.start()

    # ---- the sender's thread

    def _send_all(self) -> None:
        while not self._closing.is_set():
            self._try_once()
            self._closing.wait(SEND_EVERY_S)
        if self._try_once():
            self._attempt(self._end)

    def _try_once(self) -> bool:
        return (self._opened.is_set() or self._attempt(self._open)) and self._attempt(self._forward)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether `action` went through. Whatever MLflow raises, training goes on and the file keeps the numbers."""
        try:
            action()
        except Exception as error:
            if not self._warned:
                LOG.warning(
                    "MLflow at %s: %s; trying again, %s keeps the numbers", shown(self.uri), first_line(error), self._lines.path
                )
            self._warned = True
            return False
        self._warned = False
        return True

    def _open(self) -> None:
        """Finds or makes the MLflow run, and describes it."""
        from mlflow.entities import Param

        record = self._run.root / "mlflow_run.txt"
        found = find_run(self._client, record.read_text(encoding="utf-8").strip()) if record.is_file() else None
        if found is None:
            experiment = experiment_id(self._client, str(self.uri), self._config)
            found = self._client.create_run(experiment, run_name=self._config.name)
            beside = record.with_name(record.name + ".partial")
            beside.write_text(found.info.run_id + "\n", encoding="utf-8")
            beside.replace(record)
        self._run_id = found.info.run_id
        self._sent_step = int(found.data.metrics.get("step", 0))
        self._client.update_run(self._run_id, status="RUNNING")
        params = [Param(k, v) for k, v in flat_params(self._config).items() if k not in found.data.params]  # immutable
        for start in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_A_CALL])
        for key, value in tags(self._config).items():
            self._client.set_tag(self._run_id, key, value)
        self._client.log_text(self._run_id, config_yaml(without_password(self._config)), "config.yaml")
        self._opened.set()

    def _forward(self) -> None:
        """Sends the steps that are new in the file, many in a call."""
        self._send_waiting()
        while rows := self._lines.read():
            for row in rows:
                points = list(step_points(row))
                finite = [(name, value) for name, value in points if math.isfinite(value)]
                self._not_finite += len(points) - len(finite)
                self._waiting.append((row["step"], finite))
            self._send_waiting()

    def _send_waiting(self) -> None:
        from mlflow.entities import Metric

        self._waiting = [entry for entry in self._waiting if entry[0] > self._sent_step]
        while self._waiting:
            now = int(time.time() * 1000)
            batch: list[Metric] = []
            taken = 0
            for step, points in self._waiting:
                if taken and len(batch) + len(points) > METRICS_A_CALL:
                    break
                batch += [Metric(name, value, now, step) for name, value in points]
                taken += 1
            self._client.log_batch(self._run_id, metrics=batch)
            self._sent_step = self._waiting[taken - 1][0]
            self._waiting = self._waiting[taken:]

    def _end(self) -> None:
        if self._not_finite:
            self._client.set_tag(self._run_id, "not_finite_points", str(self._not_finite))
            LOG.warning("MLflow: %d metric values were not finite and not sent", self._not_finite)
        self._client.set_terminated(self._run_id, status=self._status)

    # ---- the flow's side

    def publish(self, report: dict[str, Any]) -> None:
        """Evaluation numbers as metrics; report, timeline and the drafter's directory as artifacts."""
        if not self._opened.wait(FLUSH_S):
            LOG.warning("MLflow at %s cannot be reached: the report is only in %s", shown(self.uri), self._run.root)
            return
        step = report["training"]["step"]

        def send() -> None:
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            points = [Metric(name, float(report[name]), now, step) for name in REPORT_METRICS if math.isfinite(report[name])]
            self._client.log_batch(self._run_id, metrics=points)
            for file in (self._run.report, self._run.report_text, self._run.timeline):
                self._client.log_artifact(self._run_id, str(file))
            self._client.log_artifacts(self._run_id, str(self._run.export), "drafter")

        if not self._attempt(send):
            LOG.warning("MLflow did not take all of the report and the drafter; they are in %s", self._run.root)

    def close(self, status: str) -> None:
        """Sends what is left within FLUSH_S and ends the run as FINISHED, FAILED or KILLED."""
        self._status = status
        self._closing.set()
        self._thread.join(FLUSH_S)
        steps, points = self._not_sent()
        if steps:
            LOG.warning(
                "MLflow at %s did not take the last %d steps (%d points); %s has them, and a resumed training sends them",
                shown(self.uri), steps, points, self._run.metrics,
            )  # fmt: skip
        elif self._thread.is_alive():
            LOG.warning("MLflow at %s did not end the run within %.0f s", shown(self.uri), FLUSH_S)

    def _not_sent(self) -> tuple[int, int]:
        """(steps, points) of the file that MLflow does not have."""
        steps = points = 0
        lines = _Tail(self._run.metrics)
        while rows := lines.read():
            newer = [row for row in rows if row["step"] > self._sent_step]
            steps += len(newer)
            points += sum(1 for row in newer for _ in step_points(row))
        return steps, points


class _Tail:
    """Complete new lines of a growing JSONL file; begins again when the file was replaced, as a resumed training does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset = -1, 0

    def read(self) -> list[dict[str, Any]]:
        """What came since the last call, a piece at a time; lines of a replaced file come again."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            complete = file.read(READ_BYTES).rpartition(b"\n")
        self._offset += len(complete[0]) + len(complete[1])
        return [json.loads(line) for line in complete[0].splitlines()]
