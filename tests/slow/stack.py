"""The whole stack as `make up` starts it, for tests: Prefect, MLflow, S3 store, worker, on free ports of loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.flows.conftest import ROOT, clean_environment

PATIENCE_S = 900  # for a slow machine
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass(frozen=True)
class Stack:
    """A running stack: `place` has its pids and logs, `environment` leads to it."""

    place: Path
    environment: dict[str, str]

    @property
    def api(self) -> str:
        return self.environment["PREFECT_API_URL"]

    def pid(self, name: str) -> int:
        """Of s3, mlflow, prefect or worker."""
        return int((self.place / f"{name}.pid").read_text())

    def command(self, *command: str | Path) -> str:
        """Output of a command in the repository. Raises AssertionError where it fails."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def prefect(self, *arguments: str) -> str:
        """Output of the prefect command."""
        return self.command(Path(sys.executable).with_name("prefect"), "--no-prompt", *arguments)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """An answer of Prefect's API: POST where a body is given, else GET."""
        answer = httpx.request("GET" if body is None else "POST", f"{self.api}/{path}", json=body, timeout=60)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def start(self, deployment: str, **parameters: Any) -> str:
        """Asks for a run of a deployment; returns its id."""
        flow, _, name = deployment.partition("/")
        found = self.ask(f"deployments/name/{flow}/{name}")
        return self.ask(f"deployments/{found['id']}/create_flow_run", {"parameters": parameters, "state": {"type": "SCHEDULED"}})[
            "id"
        ]

    def state(self, run_id: str) -> dict[str, Any]:
        return self.ask(f"flow_runs/{run_id}")["state"]

    def final(self, run_id: str) -> dict[str, Any]:
        """The state that a run ends with."""
        wait_until(lambda: self.state(run_id)["type"] in FINAL)
        return self.state(run_id)

    def children(self, run_id: str) -> list[dict[str, Any]]:
        """Flow runs that a chain started."""
        return self.ask("flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}})

    def process_of(self, run_id: str) -> int:
        """Pid of the process that a worker started for a flow run."""
        for child in descendants(self.pid("worker")):
            with suppress(OSError):
                if run_id.encode() in Path(f"/proc/{child}/environ").read_bytes():
                    return child
        raise ProcessLookupError(run_id)

    def local(self, verb: str, name: str) -> None:
        """Starts or stops one of s3, mlflow, prefect, worker; a started server answers when this returns."""
        self.command(ROOT / "infra" / "local", verb, name)
        if (verb, name) == ("start", "prefect"):
            wait_until(self._answers)

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.api}/health", timeout=5).status_code == 200
        return False


def descendants(pid: int) -> list[int]:
    """All processes below a process."""
    found: list[int] = []
    for line in subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.splitlines():
        child, parent = map(int, line.split())
        if parent == pid:
            found += [child, *descendants(child)]
    return found


def has_ended(pid: int) -> bool:
    """Also where its parent did not ask for its exit code yet."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_until(found: Callable[[], Any], patience_s: float = PATIENCE_S) -> float:
    """Waits until `found()` is true; returns the seconds that it took."""
    start = time.monotonic()
    while not found():
        assert time.monotonic() - start < patience_s
        time.sleep(0.5)
    return time.monotonic() - start


def _free_port(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    for first in range(20000, 60000, 100):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports")


@contextmanager
def running_stack(place: Path) -> Iterator[Stack]:
    """`make up`, and `make down` at the end. DFLASH_TEST_STACK names the directory of one that runs already, and is left running."""
    given = os.environ.get("DFLASH_TEST_STACK")
    place = Path(given) if given else place
    ports = {}
    if not given:
        place.mkdir(parents=True, exist_ok=True)
        first = _free_port(20)
        ports = {"PREFECT_PORT": first, "MLFLOW_PORT": first + 1, "S3_PORT": first + 2}
        (place / "ports.json").write_text(json.dumps(ports))
    ports = json.loads((place / "ports.json").read_text())
    environment = clean_environment(
        place / "client",
        LOCAL=str(place),
        BIN=str(Path(sys.executable).parent),
        PREFECT_WORKER_QUERY_SECONDS="2",
        PREFECT_API_URL=f"http://127.0.0.1:{ports['PREFECT_PORT']}/api",
        DFLASH_RUNS=str(place / "runs"),
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{ports['S3_PORT']}",
        AWS_ACCESS_KEY_ID="dflash",
        AWS_SECRET_ACCESS_KEY="local-secret",
        DFLASH_MLFLOW_URI=f"http://127.0.0.1:{ports['MLFLOW_PORT']}",
        **{name: str(port) for name, port in ports.items()},
    )
    stack = Stack(place, environment)
    make = ("make", f"BIN={Path(sys.executable).parent}", "-o", ".venv/.installed-dev", "-o", ".venv/.installed")
    if not given:
        stack.command(*make, "up")
    try:
        yield stack
    finally:
        if not given:
            stack.command(*make, "down")
