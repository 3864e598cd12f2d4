"""Target replicas as the tap stage sees them: who taps a micro-batch, and what happens when that fails.

    tap(batch) -- the replica asked for least --> TappedBatch
                  raises: the micro-batch, with its credit, goes to a replica that works; the failed one is loaded anew
                  out of memory: the micro-batch is tapped in two halves, once
    borrow(replica, call) -- between two of its micro-batches --> what the call returns; the others tap meanwhile

Each replica has a thread of its own, at whose door its next micro-batch waits while it works on one: there are two tasks a replica.
A failure costs one of `rebuilds`; when none is left, or a micro-batch fails on a second replica, the first error comes out.
A CUDA context that is broken for good fails again in this process, so that its error comes out as well.
"""

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from anyio import Lock

from dflash_core.records import Batch, TappedBatch
from dflash_core.training.halves import give_memory_back, halves, joined, name_memory_error, out_of_memory
from dflash_core.training.lane import Lane

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Tap = Callable[[Batch], TappedBatch]


class _Broken(Exception):
    """The replica failed while this call waited for it."""


class Replicas:
    """`taps[i]` is called by one thread at a time; `rebuild(i)` loads it anew in place.

    `wanted()` says whether taps are still asked for; `measure(what, start, end, worker, number)` hears what each thread did.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        rebuild: Callable[[int], None],
        *,
        rebuilds: int,
        wanted: Callable[[], bool],
        measure: Callable[..., None],
    ) -> None:
        self.failures = self.rebuilt = 0
        self.loading = 0  # replicas that are being loaded anew
        self._taps, self._rebuild, self._budget, self._wanted, self._measure = tuple(taps), rebuild, rebuilds, wanted, measure
        self._lanes = [Lane(f"tap-{i}") for i in range(len(self._taps))]
        self._mending = [Lock() for _ in self._taps]
        self._tripped = [False for _ in self._taps]  # by the thread, before it takes the call at its door
        self._broken = [False for _ in self._taps]  # once the failure is counted
        self._lent: int | None = None  # lent to somebody; micro-batches go to the others, where there are any
        self._idle_since = [time.perf_counter()] * len(self._taps)

    async def tap(self, batch: Batch) -> TappedBatch | None:
        """Hidden states of a batch from the replica that is asked for least, or another where that one fails.

        None when nobody wants them any more.
        """
        failure = None
        while True:
            replica = await self._working()
            try:
                return await self._call(replica, batch)
            except _Broken:
                continue
            except Exception as error:
                if failure is not None:
                    failure.add_note(f"replica {replica} failed with the same micro-batch: {error!r}")
                    break
                failure = error
                self._note(replica, batch, error)
        raise failure

    async def borrow(self, replica: int, call: Callable[[], T]) -> T:
        """`call()` in the replica's thread, so that nothing else uses it; one that has failed is loaded anew before."""
        span: list[float] = []

        def timed() -> T:
            if self._tripped[replica]:
                raise _Broken
            span.append(time.perf_counter())
            try:
                return call()
            finally:
                span.append(time.perf_counter())

        self._lent = replica
        try:
            while True:
                await self._load(replica)
                try:
                    return await self._lanes[replica].run(timed)
                except _Broken:
                    continue
        finally:
            self._lent = None
            if span:
                self._measure("starved", self._idle_since[replica], span[0], worker=replica)
                self._idle_since[replica] = span[1]

    async def mend(self) -> None:
        """Loads the replicas that have failed anew, but for those that another task is loading."""
        for replica, broken in enumerate(self._broken):
            if broken and not self._mending[replica].locked():
                await self._load(replica)

    async def _load(self, replica: int) -> None:
        async with self._mending[replica]:
            if not self._broken[replica]:
                return
            self.loading += 1
            try:
                await self._lanes[replica].run(self._rebuild, replica)
            finally:
                self.loading -= 1
            self._tripped[replica] = self._broken[replica] = False
            self.rebuilt += 1

    def close(self) -> None:
        """Lets the threads end."""
        for lane in self._lanes:
            lane.close()

    def _note(self, replica: int, batch: Batch, error: Exception) -> None:
        """Marks the replica as failed. Raises `error` where that ends the run."""
        if out_of_memory(error) or self.failures == self._budget:
            raise error
        self.failures += 1
        self._broken[replica] = True
        traceback.clear_frames(error.__traceback__)  # they hold the old model, and the new one needs its room
        LOG.warning("target replica %d failed with micro-batch %d (%r): another one gets it, and the replica is loaded anew (%d of "
                    "pipeline.rebuilds %d)", replica, batch.plan.number, error, self.failures, self._budget)  # fmt: skip

    async def _working(self) -> int:
        """The working replica that is asked for least; where all have failed, the first, loaded anew."""
        while not (working := [i for i, broken in enumerate(self._broken) if not broken]):
            await self._load(0)
        free = [i for i in working if i != self._lent]
        return min(free or working, key=lambda i: self._lanes[i].asked)

    async def _call(self, replica: int, batch: Batch) -> TappedBatch | None:
        span: list[float] = []

        def call() -> TappedBatch | None:
            if self._tripped[replica]:
                raise _Broken
            if not self._wanted():
                return None
            span.append(time.perf_counter())
            try:
                return _tap_in_memory(self._taps[replica], batch)
            except Exception:
                self._tripped[replica] = True
                raise
            finally:
                span.append(time.perf_counter())

        try:
            return await self._lanes[replica].run(call)
        finally:
            if len(span) == 2:
                self._measure("starved", self._idle_since[replica], span[0], worker=replica)
                self._measure("busy", *span, worker=replica, number=batch.plan.number)
                self._idle_since[replica] = span[1]


def _tap_in_memory(tap: Tap, batch: Batch) -> TappedBatch:
    """`tap(batch)`, in two halves where memory is short."""
    try:
        return tap(batch)
    except Exception as error:
        parts = halves(batch)
        if not out_of_memory(error):
            raise
        if parts is None:
            name_memory_error(error, batch, "the target")
            raise
    LOG.warning("micro-batch %d is tapped in two halves: out of memory in the target", batch.plan.number)
    give_memory_back()
    try:
        return joined(batch, tap(parts[0]), tap(parts[1]))
    except Exception as error:
        if out_of_memory(error):
            name_memory_error(error, batch, "the target")
        raise
