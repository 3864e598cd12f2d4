"""Real processes for the flows' tests: a Prefect server on loopback, and flows started as a user starts them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import fakes

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240  # for a slow machine; nothing takes so long on an idle one


def clean_environment(home: Path, **extra: str) -> dict[str, str]:
    """The environment without the caller's Prefect, MLflow and run settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "DFLASH_"))}
    home.mkdir(parents=True, exist_ok=True)
    return {**kept, "PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1", **extra}


@contextmanager
def process(command: list[str], environment: dict[str, str], log: Path, *, cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which ends with the block; it hears SIGINT whatever started the tests."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            yield child
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(10)


def wait_for(what: str, found, child: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until `found()` is true; fails with the log when the process ends before or patience does."""
    end = time.monotonic() + PATIENCE_S
    while not found():
        if child.poll() is not None or time.monotonic() > end:
            pytest.fail(f"{what} did not come (exit code {child.poll()}):\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.1)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A server of its own; yields the environment that talks to it."""
    home = tmp_path_factory.mktemp("prefect-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = clean_environment(
        home, PREFECT_API_URL=f"http://127.0.0.1:{port}/api", PREFECT_SERVER_ANALYTICS_ENABLED="false"
    )
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]

    def healthy() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2) as answer:
            return answer.status == 200
        return False

    with process(command, environment, home / "server.log") as server:
        wait_for("the server", healthy, server, home / "server.log")
        yield environment
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def api(prefect_server: dict[str, str]) -> Iterator[None]:
    """Flows called in the test's own process talk to the server."""
    from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, PREFECT_HOME, temporary_settings

    updates = {
        PREFECT_API_URL: prefect_server["PREFECT_API_URL"],
        PREFECT_HOME: prefect_server["PREFECT_HOME"],
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
    }
    with temporary_settings(updates):
        yield


@pytest.fixture
def run_file(tmp_path: Path, target_dir: Path) -> Path:
    """The YAML of a tiny complete run: 24 conversations, 4 prompts, runs under tmp_path/runs."""
    return fakes.save_config(fakes.make_config(tmp_path, target_dir), tmp_path / "tiny.yaml")


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """MLflow's own server on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts")),
    ]

    def healthy() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
        return False

    with process(
        command, clean_environment(tmp_path / "home", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false"), tmp_path / "mlflow.log"
    ) as server:
        wait_for("MLflow", healthy, server, tmp_path / "mlflow.log")
        yield f"http://127.0.0.1:{port}"
