"""What every flow needs while it runs: stop requests, blocking work in threads, the core imported once.

SIGTERM, SIGINT --stop_requests()--> an anyio.Event that the whole flow shares; the outermost flow holds the receiver
`in_thread`     a blocking function beside the event loop, so that signals are heard
`Stopped`       raised where work ended on request: nothing after it runs, and no state reads Completed
"""

import functools
import importlib
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from prefect.states import State, StateType

T = TypeVar("T")
LOG = logging.getLogger("flows")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP: ContextVar[anyio.Event | None] = ContextVar("stop", default=None)


class Stopped(Exception):
    """The work ended because it was asked to; the message says where it stands."""


def stopped_state(reason: Stopped) -> State[None]:
    """The final state of a stopped flow run: terminal, named `Stopped`, and never Completed."""
    return State(type=StateType.CANCELLED, name="Stopped", message=str(reason))


class _OneLine(logging.Filter):
    """Prefect reports every exception of a task as an error with its traceback; being stopped is none."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Stopped):
            record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
            record.msg, record.args = str(error), ()
        return True


logging.getLogger("prefect.task_runs").addFilter(_OneLine())


@asynccontextmanager
async def stop_requests() -> AsyncIterator[anyio.Event]:
    """The event that SIGTERM and SIGINT set. An inner flow gets the outermost flow's; handlers are restored at the end."""
    outer = _STOP.get()
    if outer is not None:
        yield outer
        return
    stop, error = anyio.Event(), None
    token = _STOP.set(stop)
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        async with anyio.create_task_group() as group:
            if threading.current_thread() is threading.main_thread():  # only there signals can be received
                await group.start(_listen, stop)
            try:
                yield stop
            except Exception as raised:  # kept out of the group, which would wrap it
                error = raised
            group.cancel_scope.cancel()
    finally:
        _STOP.reset(token)
        if threading.current_thread() is threading.main_thread():
            for number, handler in previous.items():
                signal.signal(number, handler)
    if error is not None:
        raise error


async def _listen(stop: anyio.Event, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(*SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            if stop.is_set():
                LOG.warning("%s again: already stopping", signal.Signals(number).name)
            else:
                LOG.warning("%s: stopping; the work in flight ends first", signal.Signals(number).name)
                stop.set()


async def in_thread(stop: anyio.Event, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a thread. A call in flight cannot be cancelled: a stop request raises Stopped when it has ended."""
    result = await to_thread.run_sync(partial(function, *arguments))
    if stop.is_set():
        raise Stopped(f"stopped after {function.__name__}")
    return result


@functools.cache
def load_core() -> tuple[ModuleType, float]:
    """`dflash_core.assembly` and the seconds that its import took: torch and transformers, so not at the top of a flow."""
    start = time.perf_counter()
    module = importlib.import_module("dflash_core.assembly")
    return module, time.perf_counter() - start
