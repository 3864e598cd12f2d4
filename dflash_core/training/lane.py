"""A thread of its own for the calls of one device, where the next call waits at the door while one runs.

    task 1 -- run(tap, batch 7) --> [ thread: batch 7, then at once batch 8 ]
    task 2 -- run(tap, batch 8) -->        `-- results --> event loop, when it comes to it

With one task that awaits each call, the device idles between two of them until the event loop has woken, passed the result on and
handed over the next item.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


class Lane:
    """One daemon thread that makes its calls in the order in which they were asked for. Used from one event loop."""

    def __init__(self, name: str) -> None:
        self.asked = 0  # calls in the thread's hands and at its door
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in the thread. Cancelled, a call at the door is taken back; one that runs is waited for."""
        future: Future[T] = Future()
        context = copy_context()
        self.asked += 1
        self._calls.put((future, lambda: context.run(function, *arguments)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not future.cancel():
                with anyio.CancelScope(shield=True):
                    await asyncio.wrap_future(future)
            raise
        finally:
            self.asked -= 1

    def close(self) -> None:
        """Lets the thread end after what it was asked for."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del call, future, function  # a thread that waits must not hold what its last call worked on
