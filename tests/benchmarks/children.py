"""What is measured in a fresh process: `python -m tests.benchmarks.children NAME ARGUMENTS...` prints one JSON object.

Imports come first and are not timed.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_core.config import TrainingConfig
from dflash_core.data.batches import BufferPool, assemble
from dflash_core.data.plan import lay_out, plan
from dflash_core.data.reader import TokenDataset
from dflash_core.records import Batch, PlannedBatch
from tests.benchmarks.stores import anonymous_bytes

ROWS = 30  # of a micro-batch
TRAINING = TrainingConfig(epochs=2)


def picks(rows: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` micro-batches of random row numbers."""
    return [tuple(part) for part in np.random.default_rng(seed).integers(0, rows, (count, ROWS)).tolist()]


def open_mapped(store: Path, seed: int) -> dict[str, Any]:
    """Seconds to open our reader and read any 30 rows; their sum is checked against the others'."""
    places = np.random.default_rng(seed).random(ROWS).tolist()
    start = time.perf_counter()
    dataset = TokenDataset(store / "shards")
    found = sum(int(part.sum()) for place in places for part in dataset.row(int(place * len(dataset))))
    return {"seconds": time.perf_counter() - start, "check": found}


def open_load_from_disk(store: Path, seed: int, directory: str) -> dict[str, Any]:
    """The same through `datasets`."""
    import datasets

    places = np.random.default_rng(seed).random(ROWS).tolist()
    start = time.perf_counter()
    dataset = datasets.load_from_disk(str(store / directory))
    found = 0
    for place in places:
        row = dataset[int(place * len(dataset))]
        found += sum(row["input_ids"]) + sum(row["loss_mask"])
    return {"seconds": time.perf_counter() - start, "check": found}


def first_planned(store: Path, seed: int) -> dict[str, Any]:
    """Seconds from nothing to the first micro-batch of the plan, assembled."""
    start = time.perf_counter()
    dataset = TokenDataset(store / "shards")
    opened = time.perf_counter() - start
    layout = lay_out(dataset.lengths, dataset.supervised, training=TRAINING)
    planned = next(plan(layout, seed=seed, epochs=2, bytes_per_token=1))
    known = time.perf_counter() - start
    pool = BufferPool(tokens=TRAINING.tokens_per_batch, pinned=False)
    batch = assemble(planned, dataset, lengths=layout.lengths, pool=pool)
    assert batch.lengths.tolist() == [len(dataset.row(row)[0]) for row in planned.rows]
    return {"seconds": time.perf_counter() - start, "opened": opened, "planned": known}


def memory(store: Path, seed: int) -> dict[str, Any]:
    """Anonymous bytes that opening, planning and 1,000 micro-batches in each of two epochs leave."""
    torch.zeros(8).add_(1)
    before = anonymous_bytes()
    dataset = TokenDataset(store / "shards")
    layout = lay_out(dataset.lengths, dataset.supervised, training=TRAINING)
    pool = BufferPool(tokens=TRAINING.tokens_per_batch, pinned=False)
    used = []
    for epoch in range(2):
        batches = plan(layout, seed=seed, epochs=2, bytes_per_token=1, position=epoch * layout.micro_batches)
        for _, planned in zip(range(1000), batches, strict=False):
            assemble(planned, dataset, lengths=layout.lengths, pool=pool)
        used.append(anonymous_bytes() - before)
        del batches
    return {"rows": len(dataset), "used": used}


def padded(rows: list[tuple[Any, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids and mask as a collate function pads them."""
    ids, mask = ([torch.as_tensor(row[part]) for row in rows] for part in range(2))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True), pad(mask, batch_first=True)


class LoadFromDisk:
    """30 rows at a time as `datasets` gives them, one by one."""

    def __init__(self, store: Path) -> None:
        import datasets

        self._rows = datasets.load_from_disk(str(store / "shards"))

    def batch(self, rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """ds[i] and torch.tensor."""
        found = [self._rows[row] for row in rows]
        return padded([(torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])) for row in found])


def mapped_batches(store: Path) -> tuple[Callable[[tuple[int, ...]], Batch], int]:
    """Our assembly as a function of row numbers, and how many rows there are."""
    dataset = TokenDataset(store / "shards")
    lengths = dataset.lengths
    pool = BufferPool(tokens=ROWS * int(lengths.max()), pinned=False)
    return (
        lambda rows: assemble(PlannedBatch(number=0, epoch=0, rows=rows, credit=0), dataset, lengths=lengths, pool=pool)
    ), len(dataset)


def stolen(store: Path, how: str, seed: int) -> dict[str, Any]:
    """Milliseconds that a thread launching small torch ops loses for each micro-batch that one busy loader thread makes."""
    make: Callable[[tuple[int, ...]], Any]
    make, rows = mapped_batches(store)
    if how == "load_from_disk":
        make = LoadFromDisk(store).batch
    chosen = picks(rows, 200, seed)
    state = torch.zeros(8)
    stop, made = threading.Event(), [0]

    def launch() -> float:
        start = time.perf_counter()
        for _ in range(100_000):
            state.add_(1)
        return time.perf_counter() - start

    def load() -> None:
        while not stop.is_set():
            make(chosen[made[0] % len(chosen)])
            made[0] += 1

    torch.set_num_threads(1)
    launch()
    alone = min(launch() for _ in range(3))
    loader = threading.Thread(target=load)
    loader.start()
    time.sleep(0.2)
    before = made[0]
    beside = launch()
    batches = made[0] - before
    stop.set()
    loader.join()
    return {"stolen_ms": (beside - alone) / max(batches, 1) * 1e3, "slower": beside / alone, "batches": batches}


class MappedRows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Our reader as torch's DataLoader takes it; a spawned worker opens the files itself."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._rows = TokenDataset(store / "shards")

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return MappedRows, (self._store,)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = self._rows.row(row)
        return ids.copy(), mask.copy()


def data_loader(store: Path, context: str, count: str) -> dict[str, Any]:
    """torch's DataLoader over the same store, two workers: batches a second, and seconds to the first one."""
    rows = MappedRows(store)
    chosen = picks(len(rows), int(count), 0)
    start = time.perf_counter()
    loader = torch.utils.data.DataLoader(
        rows, batch_sampler=chosen, num_workers=2, collate_fn=padded, multiprocessing_context=context
    )
    return _consume(iter(loader), start, int(count))


def threads(store: Path, readers: str, count: str) -> dict[str, Any]:
    """The same from prefetch threads, in order: one micro-batch in each one's hands, as in the read stage."""
    from collections import deque
    from concurrent.futures import ThreadPoolExecutor

    make, rows = mapped_batches(store)
    chosen = picks(rows, int(count), 0)
    start = time.perf_counter()
    with ThreadPoolExecutor(int(readers)) as pool:
        ahead = deque(pool.submit(make, part) for part in chosen[: int(readers)])

        def batches() -> Any:
            for part in [*chosen[int(readers) :], *[None] * int(readers)]:
                batch = ahead.popleft().result()
                if part is not None:
                    ahead.append(pool.submit(make, part))
                yield batch.input_ids, batch.loss_mask

        return _consume(batches(), start, int(count))


def _consume(batches: Any, start: float, count: int) -> dict[str, Any]:
    first, check = 0.0, 0
    for number, (ids, mask) in enumerate(batches):
        if number == 0:
            first = time.perf_counter() - start
            began = time.perf_counter()
        check += int(ids[0].sum()) + int(mask[-1].sum())
    return {"first_s": first, "per_s": (count - 1) / (time.perf_counter() - began), "check": check}


NAMES = {
    function.__name__: function
    for function in (open_mapped, open_load_from_disk, first_planned, memory, stolen, data_loader, threads)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    name, directory, *arguments = sys.argv[1:]
    numbers = [int(value) if value.isdigit() and name not in ("data_loader", "threads") else value for value in arguments]
    print(json.dumps(NAMES[name](Path(directory), *numbers)))
