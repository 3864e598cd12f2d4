"""A run's copy on S3, at the edge: training neither waits for the store nor fails with it.

    COPIES/NAME --(before a run is opened, where this machine lacks it)--> runs/NAME
    runs/NAME   --(followed by a thread of its own)--> COPIES/NAME         the directory is the truth, the place a copy

Without `places.copies` nothing of this happens. What could not be sent is named in `copies_behind.txt` in the run directory, and the
next start of the same config sends it.
"""

import contextvars
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
from anyio import to_thread

from dflash_core.config import Config
from dflash_core.rundir import RunDirectory
from flows import console
from flows.running import in_thread, opened

LOG = logging.getLogger("flows.copies")
LOOK_EVERY_S = 5.0
LONGEST_PAUSE_S = 300.0  # between tries while the store is away
END_S, STOP_S = 600.0, 8.0  # for what is left: after work that ended well, and after a stop or failure
NAMED = 5  # of what is not copied, in a warning
_ONE = threading.Lock()  # one upload at a time, whatever flows follow each other in this process


@asynccontextmanager
async def working_in(
    config: Config, stop: anyio.Event, *, fresh: bool = False, begin: bool = True
) -> AsyncIterator[RunDirectory]:
    """`opened`, and with `places.copies` the run is fetched from there before and copied there meanwhile. Raises as `opened`."""
    if config.places.copies is None:
        with opened(config, fresh=fresh, begin=begin) as run:
            yield run
        return
    from dflash_core.fetching import bring

    if fetched := await in_thread(stop, partial(bring, config, fresh=fresh)):
        console.say(fetched)
    with opened(config, fresh=fresh, begin=begin) as run:
        copier = Copier(config, run)
        left_s = STOP_S
        try:
            yield run
            left_s = END_S
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(copier.close, left_s, stop.is_set)


class Copier:
    """Sends what is new in a run directory from a thread of its own."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        from dflash_core.copies import RunCopy

        self._copy, self._run = RunCopy(config, run), run
        self._warned = False
        self._closing = threading.Event()
        context = contextvars.copy_context()  # so that warnings reach the flow run's log
        self._thread = threading.Thread(target=context.run, args=(self._follow,), name="copies", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        pause = LOOK_EVERY_S
        while not self._closing.wait(pause):
            if self._sent(everything=False):
                pause = LOOK_EVERY_S
            else:
                pause = min(2 * pause, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        self._sent(everything=True)

    def _sent(self, *, everything: bool) -> bool:
        """Whether all that is due went through. Whatever the store answers, the run directory keeps everything."""
        from dflash_core.data.remote import refusals, trouble
        from dflash_core.data.storage import forget_clients

        try:
            with _ONE:
                self._copy.send(everything=everything)
        except (*trouble(), ValueError) as error:
            if not self._warned:
                LOG.warning("%s: %s; trying again, %s keeps everything", self._copy.place, error, self._run.root)
            self._warned = True
            if isinstance(error, refusals()):
                forget_clients()  # credentials may be renewed in their file
            return False
        self._warned = False
        return True

    def close(self, left_s: float, stopped: Callable[[], bool]) -> None:
        """Sends what is left within `left_s` seconds, or STOP_S once a stop is asked for; says what could not be sent."""
        from dflash_core.copies import BEHIND

        self._closing.set()
        started = asked = time.monotonic()
        while self._thread.is_alive() and time.monotonic() < min(started + left_s, asked + STOP_S):
            if not stopped():
                asked = time.monotonic()
            self._thread.join(0.1)
        behind, file = self._copy.behind(), self._run.root / BEHIND
        if not behind:
            file.unlink(missing_ok=True)
            if self._copy.found:
                console.say(f"copied to            {self._copy.place}")
            return
        file.write_text("".join(f"{name}\n" for name in behind), encoding="utf-8")
        named = ", ".join(behind[:NAMED]) + (", ..." if len(behind) > NAMED else "")
        LOG.warning(
            "%s did not take %d files and directories (%s); %s has them, and the next start sends them",
            self._copy.place, len(behind), named, self._run.root,
        )  # fmt: skip
