"""The objective on sums: decay-weighted cross entropy of block slots, and the counts that go with it.

    sum = sum over trained slots of weight x cross entropy        the optimizer divides by the window's sum of weights

Slot 0 and everything else without weight never reaches the head.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_core.records import AnchoredBlocks


class Head(Protocol):
    """Final-normed states [n, H] -> logits [n, V] with the target's own frozen head."""

    def __call__(self, states: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """Sums of one micro-batch. `loss_sum` carries the gradient."""

    loss_sum: Tensor  # []
    weight_sum: Tensor  # []
    correct: Tensor  # [S] int64, by slot
    counted: Tensor  # [S] int64
    accepted_sum: Tensor  # [] int64: draft tokens before the first wrong one, over all valid blocks


def weighted_cross_entropy(states: Tensor, blocks: AnchoredBlocks, head: Head) -> LossSums:
    """Loss and counts of final-normed block states [B, N, S, H]."""
    trained = blocks.weights > 0  # [B, N, S]
    weights = blocks.weights[trained]
    labels = blocks.labels[trained]
    logits = head(states[trained]).float()  # [n, V]
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        hit = torch.zeros_like(trained)
        hit[trained] = logits.argmax(-1) == labels
        accepted = hit[..., 1:].long().cumprod(-1).sum()
    return LossSums(
        loss_sum=(losses * weights).sum(),
        weight_sum=weights.sum(),
        correct=hit.sum((0, 1)),
        counted=trained.sum((0, 1)),
        accepted_sum=accepted,
    )
