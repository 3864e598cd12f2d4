"""Halves of a micro-batch hold the same rows, and their taps joined are the taps of the whole."""

import pytest
import torch

from dflash_core.records import Batch, TappedBatch
from dflash_core.training.halves import halves, joined, out_of_memory, tapped_halves
from tests.fakes import make_batch

ROWS = [([5, 6, 7], [0, 1, 1]), ([8, 9], [1, 1]), ([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([7], [1]), ([6, 6], [0, 1])]


def tap(batch: Batch) -> TappedBatch:
    ids = batch.input_ids.float()
    return TappedBatch(batch=batch, target_hidden=torch.stack([ids, 2 * ids], dim=-1))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_halves_hold_each_row_once_and_join_to_the_whole(count: int) -> None:
    batch = make_batch(ROWS[:count], number=3, first_row=40)
    first, second = halves(batch) or pytest.fail("it can be cut")
    assert first.plan.rows + second.plan.rows == batch.plan.rows
    assert first.plan.number == second.plan.number == 3
    for name in ("input_ids", "loss_mask", "lengths"):
        assert torch.equal(torch.cat([getattr(first, name), getattr(second, name)]), getattr(batch, name))
    whole, again = tap(batch), joined(batch, tap(first), tap(second))
    assert torch.equal(whole.target_hidden, again.target_hidden)
    assert again.batch is batch
    assert (whole.split, again.split) == (False, True)
    for part, half in zip(tapped_halves(whole) or (), (first, second), strict=True):
        assert torch.equal(part.target_hidden, tap(half).target_hidden)
        assert part.batch.plan.rows == half.plan.rows


def test_one_row_cannot_be_cut() -> None:
    batch = make_batch(ROWS[:1])
    assert halves(batch) is None
    assert tapped_halves(tap(batch)) is None


def test_what_is_short_of_memory() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    assert out_of_memory(refused.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shapes do not match"))
