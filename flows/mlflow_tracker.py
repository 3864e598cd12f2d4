"""The thread that brings a run's numbers to MLflow; `tracking` says what it is for.

metrics.jsonl, evaluations.jsonl --Tail--> log_batch     machine --SystemMetrics--> log_batch     report, drafter --publish--> mlflow_content
"""

import contextvars
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from dflash_core.config import Config
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory
from flows.metric_names import step_points
from flows.mlflow_content import publish_report, show_data
from flows.mlflow_evaluations import EvaluationLines
from flows.mlflow_run import connect, first_line, flat_params, own_run, shown, tags, tracking_uri, without_password
from flows.settings import config_yaml
from flows.system_metrics import SystemMetrics
from flows.tail import Tail

LOG = logging.getLogger("flows.tracking")
SEND_EVERY_S = 2.0
FLUSH_S = 30.0  # at an ending; what is not sent then is counted and left to the file
METRICS_A_CALL = 1000  # MLflow's limit for one log_batch
PARAMS_A_CALL = 100
SYSTEM_POINTS = 5000  # of the machine, kept while the store is away
PUBLISH_PAUSES_S = (2.0, 10.0)  # between the tries to upload a report and its drafter
BEHIND = "mlflow_behind.txt"  # in the run directory: what MLflow does not have


class MlflowTracker:
    """Sends the lines of metrics.jsonl from a thread of its own, and everything else on demand."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        uri = tracking_uri(config)
        assert uri is not None
        self.uri: str | None = uri
        self._config, self._run = config, run
        self._client = connect(uri)
        self._run_id = self._experiment = ""
        self._sent_step = 0  # newest step that MLflow has
        self._lines, self._evaluations = Tail(run.metrics), EvaluationLines(run.evaluations)
        self._waiting: list[tuple[int, list[tuple[str, float]]]] = []  # steps read and not sent yet
        self._not_finite = 0
        self._system, self._system_waiting = SystemMetrics(), deque[tuple[int, str, float]](maxlen=SYSTEM_POINTS)
        self._data_shown = self._publish_failed = False
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

        found = own_run(self._client, str(self.uri), self._config, self._run)
        self._run_id, self._experiment = found.info.run_id, found.info.experiment_id
        self._sent_step = int(found.data.metrics.get("step", 0))
        self._started_ms = found.info.start_time
        self._client.update_run(self._run_id, status="RUNNING")
        params = [Param(k, v) for k, v in flat_params(self._config).items() if k not in found.data.params]  # immutable
        for start in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_A_CALL])
        for key, value in tags(self._config).items():
            self._client.set_tag(self._run_id, key, value)
        self._client.log_text(self._run_id, config_yaml(without_password(self._config)), "config.yaml")
        self._mark_overlap()
        self._opened.set()

    def _mark_overlap(self) -> None:
        """Says which steps a resumed training makes again; MLflow keeps the values that it has."""
        if self._sent_step == 0:
            return
        from dflash_core.training.checkpoint import latest

        checkpoint = latest(self._run.checkpoints)
        resumed = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        if resumed < self._sent_step:
            self._client.set_tag(
                self._run_id, f"resumed_after_step.{resumed}", f"steps {resumed + 1}-{self._sent_step} made again"
            )

    def _forward(self) -> None:
        """Sends the steps and evaluations that are new in their files, many steps in a call, and what the machine did."""
        self._send_waiting()
        self._send_system()
        if not self._data_shown and (manifest := self._manifest()) is not None:
            show_data(self._client, self._run_id, self._config, self._run, manifest)
            self._data_shown = True
        while rows := self._lines.read():
            for row in rows:
                points = list(step_points(row))
                finite = [(name, value) for name, value in points if math.isfinite(value)]
                self._not_finite += len(points) - len(finite)
                self._waiting.append((row["step"], finite))
            self._send_waiting()
        self._evaluations.send(self._client, self._run_id)

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

    def _manifest(self) -> Manifest | None:
        """Of the rows that are trained; None until they are opened for the first time."""
        from dflash_core.data.shards import parse_manifest, read_manifest

        if not self._config.data.shards:
            return read_manifest(self._run.shards)
        file = self._run.index / "manifest.json"
        return parse_manifest(file.read_bytes(), str(file)) if file.is_file() else None

    def _send_system(self) -> None:
        """The step of these points is the second since the run began."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._system_waiting.extend((now, name, value) for name, value in self._system.sample())
        if self._system_waiting:
            points = list(self._system_waiting)[:METRICS_A_CALL]
            made = [Metric(name, value, at, (at - self._started_ms) // 1000) for at, name, value in points]
            self._client.log_batch(self._run_id, metrics=made)
            for _ in points:
                self._system_waiting.popleft()

    def _end(self) -> None:
        if self._not_finite:
            self._client.set_tag(self._run_id, "not_finite_points", str(self._not_finite))
            LOG.warning("MLflow: %d metric values were not finite and not sent", self._not_finite)
        self._client.set_terminated(self._run_id, status=self._status)

    # ---- the flow's side

    @property
    def page(self) -> str | None:
        """Address of the run's page; None where no server shows one, or the server has not answered yet."""
        if not str(self.uri).startswith("http") or not self._opened.is_set():
            return None
        return f"{shown(self.uri).rstrip('/')}/#/experiments/{self._experiment}/runs/{self._run_id}"

    def publish(self, report: dict[str, Any]) -> None:
        """Evaluation numbers as metrics, report and timeline as artifacts, the drafter as a logged model."""
        if not self._opened.wait(FLUSH_S):
            LOG.warning("MLflow at %s cannot be reached: the report is only in %s", shown(self.uri), self._run.root)
            self._publish_failed = True
            return
        self._publish_failed = not any(self._published(report, pause) for pause in (*PUBLISH_PAUSES_S, 0.0))
        if self._publish_failed:
            LOG.warning("MLflow did not take all of the report and the drafter; they are in %s", self._run.root)

    def _published(self, report: dict[str, Any], pause: float) -> bool:
        """One try; a failed one is followed by the pause."""
        done = self._attempt(lambda: publish_report(self._client, self._run_id, self._run, report))
        if not done:
            time.sleep(pause)
        return done

    def close(self, status: str) -> None:
        """Sends what is left within FLUSH_S and ends the run as FINISHED, FAILED or KILLED."""
        self._status = status
        self._closing.set()
        self._thread.join(FLUSH_S)
        steps, points = self._not_sent()
        if evaluations := self._evaluations.not_sent():
            LOG.warning("MLflow at %s did not take %d evaluations; %s has them, and the next start sends them",
                        shown(self.uri), evaluations, self._run.evaluations)  # fmt: skip
        if steps:
            LOG.warning(
                "MLflow at %s did not take the last %d steps (%d points); %s has them, and the next start sends them",
                shown(self.uri), steps, points, self._run.metrics,
            )  # fmt: skip
        elif self._thread.is_alive():
            LOG.warning("MLflow at %s did not end the run within %.0f s", shown(self.uri), FLUSH_S)
        behind = self._run.root / BEHIND
        if steps or evaluations or self._thread.is_alive() or self._publish_failed:
            behind.write_text(
                f"{steps} steps, {points} points, {evaluations} evaluations; report: {'no' if self._publish_failed else 'yes'}\n",
                encoding="utf-8",
            )
        else:
            behind.unlink(missing_ok=True)

    def _not_sent(self) -> tuple[int, int]:
        """(steps, points) of the file that MLflow does not have."""
        steps = points = 0
        lines = Tail(self._run.metrics)
        while rows := lines.read():
            newer = [row for row in rows if row["step"] > self._sent_step]
            steps += len(newer)
            points += sum(1 for row in newer for _ in step_points(row))
        return steps, points
