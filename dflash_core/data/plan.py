"""Which rows form which micro-batch, and in which order: a pure function of lengths, supervised counts, seed, epoch and config.

    lengths, supervised --lay_out--> Layout: rows in cells of like length and like anchors, cells cut into slots     once a run
    Layout, seed, epoch --shuffle rows inside their cells, then the micro-batches--> order                           every epoch
    Layout --plan(position)--> PlannedBatch, PlannedBatch, ...       --share_of_rank--> those of one rank

The cuts depend on a cell's largest row and not on which of its rows sits where, so every epoch has the same number of
micro-batches: the run's length is known without walking it, and reading resumes anywhere without replaying an epoch.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from dflash_core.config import TrainingConfig
from dflash_core.records import PlannedBatch

# A length class spans a hundredth of its longest row, or up to a twentieth while it has too few rows for this many
# micro-batches: the narrower, the less padding; the more rows, the more the company that a row keeps changes by epoch.
NARROW, WIDE, ENOUGH = 100, 20, 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What all epochs share. R rows, G micro-batches an epoch."""

    lengths: np.ndarray  # [R] int32, tokens that are read of each row
    rows: np.ndarray  # [R] int32, row numbers sorted by cell
    cells: np.ndarray  # [C + 1] int64, where cells begin among `rows`; rows of one cell may change places
    starts: np.ndarray  # [G + 1] int64, where micro-batches begin among `rows`

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one epoch."""
        return len(self.starts) - 1


def limit_lengths(lengths: np.ndarray, *, most: int, too_long: str) -> np.ndarray:
    """Lengths [R] of the rows as they are read. Raises ValueError for a row above `most` tokens unless `too_long` is cut."""
    over = np.flatnonzero(lengths > most)
    if over.size and too_long == "error":
        raise ValueError(
            f"{over.size} of {len(lengths)} rows are longer than data.max_length {most}, the first is row {over[0]} with "
            f"{lengths[over[0]]} tokens; raise data.max_length, or set training.too_long to cut"
        )
    return np.minimum(lengths, most) if over.size else lengths


def lay_out(lengths: np.ndarray, supervised: np.ndarray, *, training: TrainingConfig) -> Layout:
    """Cells and cuts for rows of `lengths` [R] with `supervised` [R] tokens.

    A micro-batch holds at most `tokens_per_batch` padded tokens and `anchors_per_batch` rows x anchors, unless it is one row.
    """
    if not len(lengths):
        return Layout(lengths=lengths, rows=lengths, cells=np.zeros(1, np.int64), starts=np.zeros(1, np.int64))
    equal = training.batching == "equal"
    classes, longest = _length_classes(lengths, tokens=training.tokens_per_batch, equal=equal)
    edges = _steps(int(_anchors(supervised.max(keepdims=True), training)[0]))
    used, rows, cells = _sorted(_labels(classes[lengths], edges, _anchors(supervised, training)))
    widest = np.maximum.reduceat(_anchors(supervised[rows], training), cells[:-1])
    used_classes = used // len(edges)
    each = zip(np.diff(cells).tolist(), longest[used_classes].tolist(), widest.tolist(), used_classes.tolist(), strict=True)
    sizes = _cut(each, training, equal=equal)
    return Layout(lengths=lengths, rows=rows, cells=cells, starts=np.concatenate([[0], np.cumsum(sizes)]))


def _anchors(supervised: np.ndarray, training: TrainingConfig) -> np.ndarray:
    """Anchors int32 that a row has room for: its last supervised token opens no block."""
    return np.clip(supervised - 1, 1, training.anchors_per_row).astype(np.int32, copy=False)


def _labels(length_class: np.ndarray, edges: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """A number for each pair of length class and anchor class, rising as a snake does: neighbours have like anchors.

    In place, and given up before sorting: rows may be a million.
    """
    anchor_class = np.searchsorted(edges, np.arange(edges[-1] + 1)).astype(np.int32)[anchors]
    np.subtract(len(edges) - 1, anchor_class, out=anchor_class, where=(length_class % 2).astype(bool))
    length_class *= len(edges)
    length_class += anchor_class
    return length_class


def _length_classes(lengths: np.ndarray, *, tokens: int, equal: bool) -> tuple[np.ndarray, np.ndarray]:
    """The class of each length int32, 0 for the longest rows, and the longest row of each class; `equal`: a class is one length."""
    counts = np.bincount(lengths)
    table = np.zeros(len(counts), np.int32)
    longest: list[int] = []
    rows = full = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        below = longest[-1] - length if longest else 0
        if not longest or equal or below * WIDE > longest[-1] or (below * NARROW > longest[-1] and rows >= ENOUGH * full):
            longest.append(max(length, 1))
            rows, full = 0, max(1, tokens // longest[-1])
        table[length] = len(longest) - 1
        rows += int(counts[length])
    return table, np.asarray(longest)


def _steps(largest: int) -> np.ndarray:
    """Upper edges 1, 2, 3, ... of anchor classes, each at most a fifth above the one before it; the last is >= `largest`."""
    edges = [1]
    while edges[-1] < largest:
        edges.append(edges[-1] + max(1, edges[-1] // 5))
    return np.asarray(edges)


def _sorted(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The labels [C] in use, rising; the rows [R] int32 sorted by label; where each label's rows begin, and their end [C + 1]."""
    counts = np.bincount(labels)
    used = np.flatnonzero(counts)
    numbers = np.zeros(len(counts), np.uint16 if len(used) <= 2**16 else np.uint32)  # numpy sorts 16 bits by radix
    numbers[used] = np.arange(len(used))
    cell = numbers[labels]
    del labels
    rows = np.argsort(cell, kind="stable").astype(np.int32)
    return used, rows, np.concatenate([[0], np.cumsum(counts[used])])


def _cut(cells: Iterable[tuple[int, int, int, int]], training: TrainingConfig, *, equal: bool) -> list[int]:
    """Rows of each micro-batch, greedily along cells of (rows, longest, widest, length class); `equal`: none spans two classes."""
    sizes: list[int] = []
    size = longest = widest = last_class = 0
    for rows, length, width, length_class in cells:
        while rows:
            most = _most_rows(max(longest, length), max(widest, width), training)
            if size and (size >= most or (equal and length_class != last_class)):
                sizes.append(size)
                size = longest = widest = 0
                continue
            if not size and rows >= most:  # as many full ones as there are
                sizes += [most] * (rows // most)
                rows %= most
                continue
            taken = min(rows, most - size)
            size, longest, widest, last_class = size + taken, max(longest, length), max(widest, width), length_class
            rows -= taken
    return sizes + [size] if size else sizes


def _most_rows(longest: int, widest: int, training: TrainingConfig) -> int:
    return max(1, min(training.tokens_per_batch // longest, training.anchors_per_batch // widest))


def epoch_order(layout: Layout, *, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows [R] int32 in the order of their slots, and the order [G] in which the micro-batches are trained."""
    rng = np.random.default_rng([seed, epoch])
    rows = layout.rows.copy()
    several = np.flatnonzero(np.diff(layout.cells) > 1)
    for start, end in zip(layout.cells[several].tolist(), layout.cells[several + 1].tolist(), strict=True):
        rng.shuffle(rows[start:end])
    return rows, rng.permutation(layout.micro_batches)


def plan(layout: Layout, *, seed: int, epochs: int, bytes_per_token: int, position: int = 0) -> Iterator[PlannedBatch]:
    """All micro-batches of the run from number `position` on, in the order of training; earlier epochs are not looked at."""
    count = layout.micro_batches
    for epoch in range(position // count if count else epochs, epochs):
        rows, order = epoch_order(layout, seed=seed, epoch=epoch)
        longest = np.maximum.reduceat(layout.lengths[rows], layout.starts[:-1])
        for place in range(max(position - epoch * count, 0), count):
            group = order[place]
            chosen = rows[layout.starts[group] : layout.starts[group + 1]].tolist()
            credit = len(chosen) * max(int(longest[group]), 1) * bytes_per_token
            yield PlannedBatch(number=epoch * count + place, epoch=epoch, rows=tuple(chosen), credit=credit)


def share_of_rank(
    batches: Iterator[PlannedBatch], *, rank: int, ranks: int, accumulate: int, first: int = 0
) -> Iterator[PlannedBatch]:
    """One rank's micro-batches of a plan, numbered from `first`; every rank gets equally many.

    A step takes the plan's next ranks x accumulate, so the order of the data is the same for any number of ranks, and deals
    them out by size, back and forth, so that ranks wait little for each other. Where the plan ends within a step, ranks left
    over get a micro-batch without rows.
    """
    numbers = itertools.count(first)
    while step := list(itertools.islice(batches, ranks * accumulate)):
        if ranks > 1:
            step.sort(key=lambda planned: (-planned.credit, planned.number))
        idle = PlannedBatch(number=0, epoch=step[0].epoch, rows=(), credit=0)
        for turn in range(-(-len(step) // ranks)):
            place = turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)
            yield replace(step[place] if place < len(step) else idle, number=next(numbers))


def order_statistics(lengths: np.ndarray, order: np.ndarray) -> dict[str, float]:
    """How random an `order` [R] of rows is. 0, 0 and 1 are what a full shuffle has in the mean.

    length_correlation   rank correlation of a row's length with its place
    row_correlation      rank correlation of a row's number with its place
    distance_moved       mean |place - row number|, over the third of all rows that a full shuffle moves a row
    """
    places = np.arange(len(order))
    counts = np.bincount(lengths)
    mean_rank = np.cumsum(counts) - (counts + 1) / 2  # rows of one length share a rank
    return {
        "length_correlation": float(np.corrcoef(mean_rank[lengths[order]], places)[0, 1]),
        "row_correlation": float(np.corrcoef(order, places)[0, 1]),
        "distance_moved": float(np.abs(places - order).mean() / (len(order) / 3)),
    }
