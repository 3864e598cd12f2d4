"""MLflow, at the edge: it shows what the run directory holds, and training neither waits for it nor fails with it.

    metrics.jsonl --(tailed by a thread of its own)--> log_batch        the file is the truth, MLflow a copy
    report        --publish--> metrics, report.*, drafter/              where it fails, a warning: the files are there

One MLflow run a training. Its id stands in the run directory, so a resumed training goes on in it; the newest step that
MLflow has is asked of MLflow itself (metric `step`), so nothing is sent twice. Only explicit run ids, never the active run.
What could not be sent leaves `mlflow_behind.txt` in the run directory, and the next start of the same config sends it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import anyio
from anyio import to_thread

from dflash_core.config import Config
from dflash_core.rundir import RunDirectory
from flows.mlflow_run import connect, experiment_id, tracking_uri
from flows.mlflow_tracker import BEHIND, MlflowTracker
from flows.running import Stopped


class Tracker(Protocol):
    """Where a run's numbers are shown."""

    uri: str | None

    @property
    def page(self) -> str | None:
        """Address of the run's page; None where no server shows one."""

    def publish(self, report: dict[str, Any]) -> None:
        """Shows the finished report and its files. Blocks; never raises for the tracker's own troubles."""

    def close(self, status: str) -> None:
        """Sends what is left within FLUSH_S and ends the run as FINISHED, FAILED or KILLED."""


class NoTracker:
    """Shows nothing."""

    uri: str | None = None
    page: str | None = None

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


async def send_rest(config: Config, run: RunDirectory, report: dict[str, Any]) -> None:
    """Sends what MLflow did not take before a finished run ended, if there is anything."""
    if (run.root / BEHIND).is_file() and tracking_uri(config) is not None:
        async with tracking(config, run) as tracker:
            await to_thread.run_sync(tracker.publish, report)
