"""Which rows form which micro-batch, and their assembly.

    lengths, supervised, seed, epoch --plan_epoch--> [PlannedBatch, ...]      pure: same input, same plan
    PlannedBatch + TokenDataset --assemble--> Batch                            padded on the right

Rows are shuffled, sorted by length only inside windows, cut into micro-batches, and the micro-batches shuffled again: little
padding, and an order that stays random.
"""

from collections.abc import Iterator

import numpy as np
import torch

from dflash_core.config import TrainingConfig
from dflash_core.data.shards import TokenDataset
from dflash_core.records import Batch, PlannedBatch

WINDOW = 1024  # rows sorted by length together


def row_groups(
    lengths: np.ndarray, supervised: np.ndarray, *, seed: int, epoch: int, training: TrainingConfig
) -> list[tuple[int, ...]]:
    """Micro-batches of one epoch as row numbers; every row is in exactly one.

    A micro-batch holds at most `tokens_per_batch` padded tokens and `anchors_per_batch` anchors.
    """
    rng = np.random.default_rng([seed, epoch])
    anchors = np.minimum(np.maximum(supervised - 1, 1), training.anchors_per_row)
    order = rng.permutation(len(lengths))
    groups: list[tuple[int, ...]] = []
    for start in range(0, len(order), WINDOW):
        window = order[start : start + WINDOW]
        window = window[np.argsort(lengths[window], kind="stable")]
        group: list[int] = []
        most_anchors = 0
        for row in window.tolist():
            longest, widest = int(lengths[row]), max(most_anchors, int(anchors[row]))
            size = len(group) + 1
            if group and (size * longest > training.tokens_per_batch or size * widest > training.anchors_per_batch):
                groups.append(tuple(group))
                group, widest = [], int(anchors[row])
            group.append(row)
            most_anchors = widest
        groups.append(tuple(group))
    return [groups[i] for i in rng.permutation(len(groups))]


def count_batches(
    lengths: np.ndarray, supervised: np.ndarray, *, seed: int, training: TrainingConfig, enough: int | None = None
) -> int:
    """Micro-batches of all epochs (their number differs a little by epoch); counting ends once there are `enough`."""
    count = 0
    for epoch in range(training.epochs):
        count += len(row_groups(lengths, supervised, seed=seed, epoch=epoch, training=training))
        if enough is not None and count >= enough:
            break
    return count


def plan(
    lengths: np.ndarray,
    supervised: np.ndarray,
    *,
    seed: int,
    training: TrainingConfig,
    bytes_per_token: int,
    position: int = 0,
) -> Iterator[PlannedBatch]:
    """All micro-batches of the run from number `position` on, in the order of training."""
    first = 0
    for epoch in range(training.epochs):
        groups = row_groups(lengths, supervised, seed=seed, epoch=epoch, training=training)
        for number, rows in enumerate(groups, first):
            if number >= position:
                tokens = len(rows) * int(lengths[list(rows)].max())
                yield PlannedBatch(number=number, epoch=epoch, rows=rows, credit=tokens * bytes_per_token)
        first += len(groups)


def assemble(planned: PlannedBatch, dataset: TokenDataset) -> Batch:
    """Rows copied from the mapped files into one right-padded batch (id 0 and mask 0 where there is nothing)."""
    views = [dataset.row(row) for row in planned.rows]
    lengths = torch.tensor([len(ids) for ids, _ in views], dtype=torch.int32)
    longest = int(lengths.max())
    input_ids = torch.zeros(len(views), longest, dtype=torch.int32)
    loss_mask = torch.zeros(len(views), longest, dtype=torch.uint8)
    for place, (ids, mask) in enumerate(views):
        input_ids.numpy()[place, : len(ids)] = ids
        loss_mask.numpy()[place, : len(mask)] = mask
    return Batch(plan=planned, input_ids=input_ids, loss_mask=loss_mask, lengths=lengths)
