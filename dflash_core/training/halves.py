"""A micro-batch that was too large for a device's memory, in two halves of its rows.

Batch --halves--> two batches of the same padded length --tap each--> joined --> TappedBatch, the numbers as before
"""

import dataclasses
from typing import Any

import torch

from dflash_core.records import Batch, TappedBatch


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no room for a tensor."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def give_memory_back() -> None:
    """What the allocator keeps for later goes back to the device, so that smaller pieces find room."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def name_memory_error(error: BaseException, batch: Batch, where: str) -> None:
    """Says in a note what did not fit and what to lower."""
    rows, length = len(batch.plan.rows), batch.input_ids.shape[-1]
    error.add_note(
        f"micro-batch {batch.plan.number} of {rows} rows x {length} tokens: out of memory in {where}, in halves too; lower "
        f"training.tokens_per_batch, training.anchors_per_batch or pipeline.ahead_bytes"
    )


def halves(batch: Batch) -> tuple[Batch, Batch] | None:
    """The first and the second half of a batch's rows, without copies; None where there is only one row."""
    rows = len(batch.plan.rows)
    if rows < 2:
        return None
    return _part(batch, slice(0, rows // 2)), _part(batch, slice(rows // 2, rows))


def _part(batch: Batch, rows: slice) -> Batch:
    tensors = {name: value[rows] for name, value in _tensors(batch).items()}
    return dataclasses.replace(batch, plan=dataclasses.replace(batch.plan, rows=batch.plan.rows[rows]), **tensors)


def tapped_halves(tapped: TappedBatch) -> tuple[TappedBatch, TappedBatch] | None:
    """`halves` with the hidden states."""
    parts = halves(tapped.batch)
    if parts is None:
        return None
    middle, rows = len(parts[0].plan.rows), len(tapped.batch.plan.rows)
    first, second = (
        dataclasses.replace(tapped, batch=part, **{name: value[cut] for name, value in _tensors(tapped).items()})
        for part, cut in zip(parts, (slice(0, middle), slice(middle, rows)), strict=True)
    )
    return first, second


def joined(batch: Batch, first: TappedBatch, second: TappedBatch) -> TappedBatch:
    """The taps of both halves as those of the whole batch, marked as split."""
    tensors: dict[str, Any] = {name: torch.cat([value, _tensors(second)[name]]) for name, value in _tensors(first).items()}
    return dataclasses.replace(first, batch=batch, split=True, **tensors)


def _tensors(record: Batch | TappedBatch) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if isinstance(value, torch.Tensor)}
