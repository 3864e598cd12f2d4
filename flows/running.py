"""What every flow needs while it runs: stop requests, blocking work in threads, the core imported once.

SIGTERM, SIGINT --stop_requests()--> an anyio.Event that the whole flow shares; the outermost flow holds the receiver.
                                     A second SIGINT leaves at once, without a save
`opened`        the run directory of a checked config, held while a flow works in it
`in_thread`     a blocking function beside the event loop, so that signals are heard
`beside`        a helper that lives as long as a block, such as a display
`Stopped`       raised where work ended on request: nothing after it runs, and no state reads Completed
"""

import errno
import functools
import importlib
import logging
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from prefect.states import State, StateType

from dflash_core.config import Config
from dflash_core.errors import unwrapped
from dflash_core.rundir import RunDirectory, hold, open_run

T = TypeVar("T")
LOG = logging.getLogger("flows")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP: ContextVar[tuple[anyio.Event, dict[int, Any]] | None] = ContextVar("stop", default=None)  # with the receiver's handlers


class Stopped(Exception):
    """The work ended because it was asked to; the message says where it stands."""


def worth_retrying(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Whether a task that failed may go through at the next try: trouble of networks and servers, not what someone has to mend."""
    lasting = (FileNotFoundError, PermissionError)
    full = (errno.ENOSPC, errno.EDQUOT)
    error = state.data
    return isinstance(error, OSError) and not isinstance(error, lasting) and error.errno not in full


RETRIES: dict[str, Any] = {"retries": 2, "retry_delay_seconds": [2, 10], "retry_condition_fn": worth_retrying}  # of a task


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
        stop, handlers = outer
        with _handlers(handlers):  # Prefect has put its own in their place for the inner flow
            yield stop
        return
    stop = anyio.Event()
    main = threading.current_thread() is threading.main_thread()  # only there signals can be received
    with _handlers({}), unwrapped():
        async with anyio.create_task_group() as group:
            if main:
                await group.start(_listen, stop)
            token = _STOP.set((stop, {number: signal.getsignal(number) for number in SIGNALS if main}))
            try:
                yield stop
            finally:
                _STOP.reset(token)
            group.cancel_scope.cancel()


@contextmanager
def _handlers(handlers: dict[int, Any]) -> Iterator[None]:
    """Signal handlers of a block; at its end those of before are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _listen(stop: anyio.Event, *, task_status: anyio.abc.TaskStatus[None]) -> None:
    with anyio.open_signal_receiver(*SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            if stop.is_set() and number == signal.SIGINT:
                raise KeyboardInterrupt  # a person who asks twice does not want to wait for a save
            if stop.is_set():
                LOG.warning("%s again: already stopping", signal.Signals(number).name)
            else:
                LOG.warning("%s: stopping; the work in flight ends first", signal.Signals(number).name)
                stop.set()


@contextmanager
def opened(config: Config, *, fresh: bool = False, begin: bool = True) -> Iterator[RunDirectory]:
    """The run of a config that was checked against its target, kept from other processes; `begin`: it may be a new one.

    Bad input leaves no trace of a run that it began: its name stays free for the corrected config. Raises ValueError.
    """
    load_core()[0].check(config)
    run = open_run(config, fresh=fresh, begin=begin)
    with hold(run):
        try:
            yield run
        except ValueError:
            if run.state == "new" and not run.shards.exists() and not run.checkpoints.exists():
                shutil.rmtree(run.root)
            raise


async def in_thread(stop: anyio.Event, function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a thread. A call in flight cannot be cancelled: a stop request raises Stopped when it has ended."""
    result = await to_thread.run_sync(partial(function, *arguments))
    if stop.is_set():
        raise Stopped(f"stopped after {function.__name__}")
    return result


@asynccontextmanager
async def beside(helper: Callable[..., Awaitable[None]], *arguments: Any) -> AsyncIterator[None]:
    """Runs `helper(*arguments)` until the block ends, and then cancels it. The block's error comes out as it is."""
    with unwrapped():
        async with anyio.create_task_group() as group:
            group.start_soon(helper, *arguments)
            yield
            group.cancel_scope.cancel()


@functools.cache
def load_core() -> tuple[ModuleType, float]:
    """`dflash_core.assembly` and the seconds that its import took: torch and transformers, so not at the top of a flow."""
    start = time.perf_counter()
    module = importlib.import_module("dflash_core.assembly")
    return module, time.perf_counter() - start
