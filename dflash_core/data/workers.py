"""Who tokenizes the parts: this process, or a pool of spawned ones; from both, one callable `part -> Ledger`.

    Tokenizing --save--> tokenizing.pickle --> worker 1: tokenize_part(part 0)     the tokenizer is loaded once a process,
                                          \\--> worker 2: tokenize_part(part 1)     torch and Prefect never

`rows_done` and `stop` reach into a part: a worker counts after every batch, and ends at the next one when a file `stop` lies
beside the saved one, which workers on other machines see as well.
"""

import functools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from dflash_core.data.chat import Chat, open_chat
from dflash_core.data.tokenization import Interrupted, Ledger, Limits, tokenize_part


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """What turns a part into rows, whatever process does it: each opens the chat format for itself."""

    tokenizer: Any  # of transformers
    stop_ids: frozenset[int]
    mask_token_id: int | None
    date: str | None
    thinking: bool | None
    limits: Limits

    def open(self) -> Chat:
        """Raises ValueError where the tokenizer has no usable chat template."""
        return open_chat(
            self.tokenizer, stop_ids=self.stop_ids, mask_token_id=self.mask_token_id, date=self.date, thinking=self.thinking
        )

    def save(self, path: Path) -> None:
        """Into a file that workers load, on this machine or on one that shares the directory."""
        path.write_bytes(pickle.dumps(self))


class PartTokenizer(Protocol):
    """Tokenizes parts; may be called from several threads."""

    def __call__(self, part: Path) -> Ledger:
        """Writes the part's rows. Raises Interrupted after `stop`."""

    def stop(self) -> None:
        """Parts in work end at their next batch, later ones at once."""

    @property
    def rows_done(self) -> int:
        """Conversations of all parts so far."""


class InProcess:
    """Tokenizes in the caller's thread."""

    def __init__(self, chat: Chat, limits: Limits) -> None:
        self._chat, self._limits = chat, limits
        self._stop = threading.Event()
        self.rows_done = 0

    def __call__(self, part: Path) -> Ledger:
        return tokenize_part(part, chat=self._chat, limits=self._limits, tick=self._tick)

    def stop(self) -> None:
        self._stop.set()

    def _tick(self, conversations: int) -> None:
        self.rows_done += conversations
        if self._stop.is_set():
            raise Interrupted


@dataclass(frozen=True)
class Saved:
    """Tokenizes in whatever process it is called, from the file that `Tokenizing.save` wrote; can be sent anywhere."""

    path: Path
    count: Any = None  # a multiprocessing Value where processes share one
    rows_done: int = 0  # unknown: nobody counts for workers elsewhere

    def __call__(self, part: Path) -> Ledger:
        chat, limits = load(self.path, self.path.stat().st_mtime_ns)
        return tokenize_part(part, chat=chat, limits=limits, tick=self._tick)

    def stop(self) -> None:
        self._request.touch()

    @property
    def _request(self) -> Path:
        return self.path.with_name("stop")

    def _tick(self, conversations: int) -> None:
        if self.count is not None:
            with self.count.get_lock():
                self.count.value += conversations
        if self._request.exists():
            raise Interrupted


class Pool:
    """Tokenizes in spawned processes; each call waits for its part."""

    def __init__(self, saved: Saved, processes: int) -> None:
        context = _Spawn()
        self._saved, self._count = saved, context.Value("q", 0)
        self._executor = ProcessPoolExecutor(
            processes, mp_context=context, initializer=_begin, initargs=(replace(saved, count=self._count),)
        )

    def __call__(self, part: Path) -> Ledger:
        return self._executor.submit(_work, part).result()

    def stop(self) -> None:
        self._saved.stop()

    @property
    def rows_done(self) -> int:
        return int(self._count.value)

    def close(self) -> None:
        """Ends the processes; parts in work are given up."""
        self.stop()
        self._executor.shutdown(cancel_futures=True)


@contextmanager
def part_tokenizer(tokenizing: Tokenizing, *, saved: Path, processes: int, elsewhere: bool = False) -> Iterator[PartTokenizer]:
    """In this process for one, else a pool of so many; or what workers `elsewhere` call, which share the directory of `saved`.

    Raises ValueError where the tokenizer has no usable chat template.
    """
    chat = tokenizing.open()  # here in any case: what is wrong with the template is said once, and before workers start
    if processes == 1 and not elsewhere:
        yield InProcess(chat, tokenizing.limits)
        return
    tokenizing.save(saved)
    if elsewhere:
        yield Saved(saved)
        return
    pool = Pool(Saved(saved), processes)
    try:
        yield pool
    finally:
        pool.close()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- in a worker -----------------------------------------------------------------------------------------------------

_SAVED: list[Saved] = []  # of this worker process


@functools.lru_cache(1)
def load(path: Path, modified_ns: int) -> tuple[Chat, Limits]:
    """What `Tokenizing.save` wrote, opened once a process; `modified_ns` tells one run's file from the next one's."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    tokenizing: Tokenizing = pickle.loads(path.read_bytes())
    return tokenizing.open(), tokenizing.limits


def _begin(saved: Saved) -> None:
    logging.getLogger("dflash_core").addHandler(logging.NullHandler())  # the parent has said it
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _SAVED[:] = [saved]


def _work(part: Path) -> Ledger:
    return _SAVED[0](part)


def _leave_with_parent() -> None:
    """A pool's process waits for work for ever when its parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Process(SpawnProcess):
    """A spawned process that imports only what its work needs, and does not hear the terminal's Ctrl-C.

    A spawned child imports its parent's `__main__` again, here a flow with all of Prefect, unless there is nothing to import.
    """

    def start(self) -> None:
        main, previous = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()  # the child inherits the mask
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class _Spawn(SpawnContext):
    Process = _Process
