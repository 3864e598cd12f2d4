"""Assembly of micro-batches: the rows as they are stored, in memory that is used again but never while a batch is alive."""

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from dflash_core.config import TrainingConfig
from dflash_core.data.batches import BufferPool, assemble, prefetched
from dflash_core.data.plan import lay_out, plan
from dflash_core.data.reader import TokenDataset
from dflash_core.data.shards import batches_of, write_shards
from dflash_core.records import Batch, PlannedBatch, TokenRow

TRAINING = TrainingConfig(epochs=2, tokens_per_batch=600, anchors_per_row=40, anchors_per_batch=400)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenDataset, list[TokenRow]]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(3 + rng.geometric(1 / 60, 60), 90)
    made = [
        TokenRow(id=str(i), input_ids=rng.integers(1, 150_000, n).tolist(), loss_mask=rng.integers(0, 2, n).tolist())
        for i, n in enumerate(lengths)
    ]
    directory = tmp_path_factory.mktemp("rows") / "shards"
    write_shards(directory, batches_of(made), shard_tokens=700, fingerprint="f" * 64, ingredients={}, ledger={})
    return TokenDataset(directory), made


def planned_batches(dataset: TokenDataset) -> Iterator[PlannedBatch]:
    layout = lay_out(dataset.lengths, dataset.supervised, training=TRAINING)
    return plan(layout, seed=1, epochs=TRAINING.epochs, bytes_per_token=24)


def new_pool() -> BufferPool:
    return BufferPool(tokens=TRAINING.tokens_per_batch, pinned=False)


def some(rows: tuple[int, ...]) -> PlannedBatch:
    return PlannedBatch(number=0, epoch=0, rows=rows, credit=0)


def test_assembled_batches_equal_a_naive_padding(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    dataset, made = stored
    pool = new_pool()
    pool.take(1, TRAINING.tokens_per_batch)[0].fill(-1)  # the first buffer is dirty
    for planned in planned_batches(dataset):
        batch = assemble(planned, dataset, lengths=dataset.lengths, pool=pool)
        longest = max(len(made[row].input_ids) for row in planned.rows)
        ids = [made[row].input_ids + [0] * (longest - len(made[row].input_ids)) for row in planned.rows]
        mask = [made[row].loss_mask + [0] * (longest - len(made[row].loss_mask)) for row in planned.rows]
        assert batch.plan is planned
        assert (batch.input_ids.dtype, batch.loss_mask.dtype, batch.lengths.dtype) == (torch.int32, torch.uint8, torch.int32)
        assert batch.input_ids.tolist() == ids
        assert batch.loss_mask.tolist() == mask
        assert batch.lengths.tolist() == [len(made[row].input_ids) for row in planned.rows]
        assert planned.credit == 24 * batch.input_ids.numel()
        del batch
    assert pool.buffers == 2


def test_rows_are_cut_to_the_lengths_that_are_read(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    dataset, made = stored
    batch = assemble(some((3, 8, 5)), dataset, lengths=np.minimum(dataset.lengths, 4), pool=new_pool())
    assert batch.input_ids.tolist() == [made[row].input_ids[:4] for row in (3, 8, 5)]
    assert batch.loss_mask.tolist() == [made[row].loss_mask[:4] for row in (3, 8, 5)]
    assert batch.lengths.tolist() == [4, 4, 4]


def test_assembled_batches_do_not_share_memory_with_the_files(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    dataset, made = stored
    planned = some((5, 5, 2))
    pool = new_pool()
    first = assemble(planned, dataset, lengths=dataset.lengths, pool=pool)
    first.input_ids.fill_(-1)
    first.loss_mask.fill_(9)
    again = assemble(planned, dataset, lengths=dataset.lengths, pool=pool)
    assert again.input_ids[0, : len(made[5].input_ids)].tolist() == made[5].input_ids
    assert again.input_ids[0].equal(again.input_ids[1])


def test_views_of_the_files_cannot_be_written_to(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    for view in stored[0].row(7):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_prefetched_batches_are_the_same(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    assert list(prefetched(planned_batches(stored[0]), stored[0])) == list(planned_batches(stored[0]))


def test_a_batch_without_rows_has_no_rows(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    batch = assemble(some(()), stored[0], lengths=stored[0].lengths, pool=new_pool())
    assert (batch.input_ids.shape, batch.loss_mask.shape, batch.lengths.shape) == ((0, 1), (0, 1), (0,))


# ---- memory that is used again ---------------------------------------------------------------------------------------


def test_a_buffer_is_free_when_its_last_tensor_dies() -> None:
    pool = new_pool()
    ids, mask = pool.take(3, 7)
    assert (ids.shape, ids.dtype, mask.shape, mask.dtype) == ((3, 7), np.int32, (3, 7), np.uint8)
    places = ids.ctypes.data, mask.ctypes.data
    tensor = torch.from_numpy(ids)
    kept = tensor[1:].view(-1).numpy()  # a view of a view, back in numpy
    del ids, mask, tensor
    ids, mask = pool.take(3, 7)
    assert ids.ctypes.data != places[0]
    assert mask.ctypes.data == places[1]
    assert pool.buffers == 3
    del kept, ids, mask
    first, second = pool.take(2, 2), pool.take(600, 1)
    assert places[0] in (first[0].ctypes.data, second[0].ctypes.data)
    assert pool.buffers == 4


def test_a_micro_batch_above_the_pools_size_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match=r"7 rows of 100 tokens are above the pool's 600"):
        new_pool().take(7, 100)


class Constants:
    """Row k holds the constant k + 1, and its mask k mod 2."""

    def __init__(self, rows: int) -> None:
        self.lengths = np.random.default_rng(0).integers(1, 60, rows).astype(np.int32)

    def heads(self, rows: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for row, size in zip(rows, sizes, strict=True):
            yield np.full(size, row + 1, np.int32), np.full(size, row % 2, np.int8)


def mismatches(batch: Batch) -> int:
    """Wrong places of a batch of `Constants`, by a slow and obvious count."""
    wrong = 0
    for place, row in enumerate(batch.plan.rows):
        length = int(batch.lengths[place])
        ids, mask = batch.input_ids[place], batch.loss_mask[place]
        wrong += int((ids[:length] != row + 1).sum()) + int((mask[:length] != row % 2).sum())
        wrong += int((ids[length:] != 0).sum()) + int((mask[length:] != 0).sum())
    return wrong


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=[pytest.mark.gpu, NO_CUDA])])
def test_no_batch_in_flight_is_ever_overwritten(pinned: bool) -> None:
    """2,000 batches by four readers through six places in flight, some kept for long, with other memory coming and going."""
    data = Constants(500)
    pool = BufferPool(tokens=8 * 60, pinned=pinned)
    flying: queue.Queue[Batch] = queue.Queue(maxsize=6)
    rng = np.random.default_rng(1)
    picks = [tuple(rng.integers(0, 500, rng.integers(1, 9)).tolist()) for _ in range(2000)]

    def read(worker: int) -> None:
        for number in range(worker, 2000, 4):
            flying.put(assemble(some(picks[number]), data, lengths=data.lengths, pool=pool))  # type: ignore[arg-type]

    wrong = seen = 0
    kept: list[Batch] = []
    with ThreadPoolExecutor(4) as readers:
        work = [readers.submit(read, worker) for worker in range(4)]
        for number in range(2000):
            batch = flying.get(timeout=30)
            pressure = torch.full((int(rng.integers(1, 4000)),), -1, dtype=torch.int32)
            if pinned:
                batch.input_ids.to("cuda")
            if number % 7 == 0:
                kept.append(batch)
            if len(kept) > 5:
                wrong += mismatches(kept.pop(0))
            wrong += mismatches(batch)
            seen += 1
            del batch, pressure
        for done in work:
            done.result()
    assert (seen, wrong) == (2000, 0)
    assert pool.buffers <= 2 * (6 + 4 + 6 + 1)  # waiting, in the readers' hands, kept, in the consumer's
