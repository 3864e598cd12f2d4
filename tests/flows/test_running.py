"""flows.running: stop requests by signal, and what importing the flows costs."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import anyio
import httpx
import pytest
from prefect import flow, task

from flows.running import RETRIES, Stopped, beside, in_thread, stop_requests, stopped_state

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_sets_the_event_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    async with stop_requests() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        with anyio.fail_after(5):
            await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)  # again: no harm
        await anyio.sleep(0.05)
    assert signal.getsignal(number) is before


async def test_inner_flow_shares_the_outer_event() -> None:
    async with stop_requests() as outer:
        async with stop_requests() as inner:
            assert inner is outer
        os.kill(os.getpid(), signal.SIGTERM)  # the inner one's end took nothing away
        with anyio.fail_after(5):
            await outer.wait()
    async with stop_requests() as fresh:
        assert fresh is not outer
        assert not fresh.is_set()


async def test_an_inner_flow_hears_signals_although_its_engine_installed_a_handler_of_its_own() -> None:
    def engine(*_: object) -> None:
        raise AssertionError("the engine's handler was called")

    async with stop_requests() as outer:
        before = signal.signal(signal.SIGTERM, engine)  # as Prefect does before it calls a subflow
        async with stop_requests():
            os.kill(os.getpid(), signal.SIGTERM)
            with anyio.fail_after(5):
                await outer.wait()
        assert signal.getsignal(signal.SIGTERM) is engine
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("error", [ValueError("bad input"), Stopped("enough")])
async def test_errors_come_out_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        async with stop_requests():
            raise error
    assert raised.value is error


async def test_signal_is_heard_beside_blocking_work_whose_end_raises_stopped() -> None:
    heard: list[float] = []
    start = time.monotonic()

    async def listen(stop: anyio.Event) -> None:
        await stop.wait()
        heard.append(time.monotonic() - start)

    async with stop_requests() as stop, anyio.create_task_group() as group:
        group.start_soon(listen, stop)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(Stopped):
            await in_thread(stop, time.sleep, 0.6)
    assert heard[0] < 0.4


async def test_work_without_a_stop_request_gives_its_result() -> None:
    assert await in_thread(anyio.Event(), sum, [1, 2]) == 3


@pytest.mark.parametrize(
    "error, again",
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (TimeoutError("no answer"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (FileNotFoundError("x.jsonl"), False),
        (PermissionError("s3://other"), False),
        (ValueError("bad input"), False),
        (Stopped("enough"), False),
    ],
)
def test_only_passing_trouble_is_tried_again(error: Exception, again: bool, api: None) -> None:
    calls = []

    @task(**RETRIES | {"retry_delay_seconds": 0})
    async def work() -> None:
        calls.append(1)
        raise error

    @flow
    async def whole() -> None:
        await work()

    with pytest.raises(type(error)):
        anyio.run(whole)
    assert len(calls) == (3 if again else 1)


async def test_a_helper_lives_as_long_as_the_block_and_errors_come_out_as_they_are() -> None:
    ended = anyio.Event()

    async def helper(number: int) -> None:
        try:
            await anyio.sleep(60 * number)
        finally:
            ended.set()

    async def block() -> None:
        async with beside(helper, 1):
            await anyio.sleep(0)
            raise Stopped("enough")

    with pytest.raises(Stopped, match="enough"):
        await block()
    assert ended.is_set()


def test_stopped_state_is_final_and_not_completed() -> None:
    state = stopped_state(Stopped("stopped at step 7, resumable"))
    assert state.name == "Stopped"
    assert state.is_final()
    assert not state.is_completed()
    assert state.message == "stopped at step 7, resumable"


@pytest.mark.parametrize("module", ["train", "prepare", "evaluate", "promote", "regenerate", "full_run"])
def test_importing_a_flow_imports_no_heavy_package(module: str) -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'mlflow'}"
    code = f"import sys, flows.{module}; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


LOGGING = """
import logging, threading
from anyio import to_thread
from prefect import flow
from dflash_core.training.lane import Lane

LOG = logging.getLogger("dflash_core.training")

def work(place):
    LOG.warning("a line of %s", place)
    try:
        raise KeyError(place)
    except KeyError:
        LOG.exception("the error of %s", place)

@flow(name="logging")
async def main():
    await to_thread.run_sync(work, "a stage")
    lane = Lane("tap-0")
    await lane.run(work, "a target")
    lane.close()

thread = threading.Thread(target=work, args=("no flow",))
thread.start()
thread.join()
import anyio
anyio.run(main)
"""


@pytest.mark.slow
def test_lines_of_every_thread_are_in_the_runs_log(prefect_server: dict[str, str]) -> None:
    environment = prefect_server | {
        "PREFECT_LOGGING_EXTRA_LOGGERS": "flows,dflash_core",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }
    done = subprocess.run([sys.executable, "-c", LOGGING], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "MissingContextError" not in done.stdout + done.stderr
    answer = httpx.post(f"{prefect_server['PREFECT_API_URL']}/logs/filter", json={"limit": 200}, timeout=60)
    lines = [line["message"] for line in answer.json()]
    for place in ("a stage", "a target"):
        assert f"a line of {place}" in lines
        assert any(line.startswith(f"the error of {place}\nTraceback") and f"KeyError: '{place}'" in line for line in lines)
    assert not any("no flow" in line for line in lines)


def test_help_is_quick_and_useful() -> None:
    start = time.perf_counter()
    out = subprocess.run([sys.executable, "-X", "importtime", "-m", "flows.train", "--help"], capture_output=True, text=True)
    assert time.perf_counter() - start < 30, "on an idle machine 0.6 s"
    assert out.returncode == 0
    for text in (
        "--training.learning_rate",
        "The frozen model whose output is preserved.",
        "(default: 0.0006)",
        "--fresh",
        "DFLASH_RUNS",
    ):
        assert text in out.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in out.stderr.splitlines()}
    assert not imported & {"torch", "prefect", "mlflow", "transformers"}
