"""Prefect's temporary server, for a command line without PREFECT_API_URL.

    LocalServer --python -m flows.local_server PORT--> Prefect's API        standard input: its end means that the parent is gone

Prefect starts the same process when a flow finds no server, but imports its whole server into the flow's own process for that,
seconds of work on the critical path, and leaves it behind where the flow's process is killed.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from flows.garbage import begin_work, keep_imports

AGAIN = 3  # times that one that ended is started anew: the first on a machine make the tables of one file, and not together
PATIENCE_S = 120  # the first start makes the tables: 20 s, Prefect's own limit, are too few on a slow or busy machine
GRACE_S = 5.0  # in which it ends when it is told to
STARTED: list[str] = []  # addresses: pages there are gone with this process


class LocalServer:
    """Starts when it is made; `wait` until it answers. Ends with this process, even a killed one, and is deaf to the terminal's
    Ctrl-C: the flow needs it until its own, later end."""

    def __init__(self) -> None:
        from prefect.settings import get_current_settings

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.api = f"http://127.0.0.1:{port}/api"
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        kind = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        self._command = [sys.executable, "-m", "flows.local_server", str(port)]
        self._environment = {**os.environ, **kind, **settings}
        self._child = self._start()
        STARTED.append(self.api)
        atexit.register(self.stop)

    def _start(self) -> "subprocess.Popen[bytes]":
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child inherits the mask
        try:
            quiet, pipe = subprocess.DEVNULL, subprocess.PIPE
            return subprocess.Popen(self._command, env=self._environment, stdin=pipe, stdout=quiet)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError where it ends before, or takes longer than both Prefect's limit and PATIENCE_S."""
        import httpx
        from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS as LIMIT

        limit, again = max(LIMIT.value(), PATIENCE_S), AGAIN
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self._child.poll() is not None:
                if again == 0:
                    break
                again -= 1
                self._child = self._start()
            try:
                if httpx.get(f"{self.api}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        code = self._child.poll()
        what = (
            f"did not answer within {limit:.0f} s" if code is None else f"ended {AGAIN + 1} times, the last with exit code {code}"
        )
        raise RuntimeError(f"Prefect's temporary server {what}; what it says is above")

    def stop(self) -> None:
        """Ends it; again: nothing."""
        self._child.terminate()
        try:
            self._child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def needed() -> bool:
    """Whether no server is set and Prefect may start one."""
    from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_ENABLED

    return not PREFECT_API_URL.value() and bool(PREFECT_SERVER_EPHEMERAL_ENABLED.value())


# ---- its own process -------------------------------------------------------------------------------------------------


def serve(port: int) -> None:
    """Prefect's API on a port of this machine, as long as the parent lives."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    keep_imports()
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app()
    begin_work()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")


def _watch_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # it sends what it has not stored yet
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
