"""Micro-batches from mapped rows, assembled in host memory that is used again.

    PlannedBatch --assemble--> Batch in buffers of the pool --read, tap, order, train--> nobody holds it: the buffers are free

A buffer comes back when the last tensor over it dies, which is when the step has consumed the micro-batch; no stage has to
say so, and one that keeps a batch too long costs a buffer, never a wrong token.
"""

import weakref
from collections.abc import Iterator

import numpy as np
import torch

from dflash_core.data.reader import TokenDataset
from dflash_core.records import Batch, PlannedBatch


class BufferPool:
    """Host buffers for `tokens` padded tokens each; there are never more than micro-batches were alive at once.

    `pinned`: page-locked memory, which a CUDA device copies from without a detour.
    """

    def __init__(self, *, tokens: int, pinned: bool) -> None:
        self.tokens, self.pinned = tokens, pinned
        self.buffers = 0  # made so far, of ids and of masks
        self._free: dict[torch.dtype, list[np.ndarray]] = {torch.int32: [], torch.uint8: []}
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], torch.dtype, np.ndarray]] = {}

    def take(self, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Uninitialised input_ids int32 and loss_mask uint8, both [rows, length].

        A buffer is lent for as long as this very array lives: a tensor made over it keeps it, a slice of it does not.
        """
        assert rows * length <= self.tokens, f"{rows} rows of {length} tokens are above the pool's {self.tokens}"
        return self._lend(torch.int32, rows, length), self._lend(torch.uint8, rows, length)

    def _lend(self, dtype: torch.dtype, rows: int, length: int) -> np.ndarray:
        try:
            buffer = self._free[dtype].pop()
        except IndexError:
            buffer = torch.empty(self.tokens, dtype=dtype, pin_memory=self.pinned).numpy()
            self.buffers += 1
        lent = buffer[: rows * length].reshape(rows, length)
        watch = weakref.ref(lent, self._returned)
        self._lent[id(watch)] = watch, dtype, buffer
        return lent

    def _returned(self, watch: "weakref.ref[np.ndarray]") -> None:
        _, dtype, buffer = self._lent.pop(id(watch))
        self._free[dtype].append(buffer)


def prefetched(batches: Iterator[PlannedBatch], dataset: TokenDataset) -> Iterator[PlannedBatch]:
    """The same micro-batches, the kernel told of each one's rows: from a cold disk they come while the batch waits for a reader."""
    for planned in batches:
        dataset.prefetch(planned.rows)
        yield planned


def assemble(planned: PlannedBatch, dataset: TokenDataset, *, lengths: np.ndarray, pool: BufferPool) -> Batch:
    """Rows copied from the mapped files into one right-padded batch (id 0 and mask 0 where there is nothing).

    `lengths` [R] says how many tokens of each row are read.
    """
    read = lengths[list(planned.rows)]
    sizes = read.tolist()
    input_ids, loss_mask = pool.take(len(sizes), max([1, *sizes]))
    input_ids.fill(0)
    loss_mask.fill(0)
    marks = loss_mask.view(np.int8)  # as the files have it: a cast takes longer than a copy
    for place, (size, (ids, mask)) in enumerate(zip(sizes, dataset.heads(planned.rows, sizes), strict=True)):
        input_ids[place, :size] = ids
        marks[place, :size] = mask
    return Batch(
        plan=planned,
        input_ids=torch.from_numpy(input_ids),
        loss_mask=torch.from_numpy(loss_mask),
        lengths=torch.from_numpy(read.astype(np.int32, copy=False)),
    )
