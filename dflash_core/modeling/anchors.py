"""Anchors and blocks: which positions open a trained block, what is in it, what it must predict.

    loss_mask, lengths --sample_anchors--> positions a (m_a and m_a+1)      random per (seed, epoch, row) only
    ids, positions     --build_blocks----> [x_a, MASK, MASK, ...], labels x_a+k, weights exp(-(k-1)/gamma)
                                           from the anchor (first_slot 0):  x_a+k+1          exp(-k/gamma)

The rule is SpecForge's: an anchor is a supervised token followed by a supervised token, drawn without replacement, sorted.
A block near the end is kept; labels past the row or past the first unsupervised token (contiguous prefix) weigh nothing.
"""

import numpy as np
import torch
from torch import Tensor

from dflash_core.records import AnchoredBlocks, Batch


def sample_anchors(loss_mask: np.ndarray, *, num_anchors: int, seed: int, epoch: int, row: int) -> np.ndarray:
    """At most `num_anchors` sorted positions [n] of one row; the same for the same (seed, epoch, row), whatever the batch."""
    candidates = np.flatnonzero((loss_mask[:-1] != 0) & (loss_mask[1:] != 0))
    if len(candidates) <= num_anchors:
        return candidates
    rng = np.random.default_rng([seed, epoch, row])
    return np.sort(rng.choice(candidates, num_anchors, replace=False))


def decay_weights(block_size: int, gamma: float, *, first_slot: int = 1) -> Tensor:
    """Weight of each slot [S]: exp(-(k-f)/gamma) for slot k from the first one f that drafts, else 0 (DFlash paper, appendix A.1)."""
    slots = torch.arange(block_size, dtype=torch.float32)
    weights = torch.exp(-(slots - first_slot) / gamma)
    weights[:first_slot] = 0.0
    return weights


def draw_blocks(
    batch: Batch, *, block_size: int, mask_token_id: int, num_anchors: int, gamma: float, seed: int, first_slot: int = 1
) -> AnchoredBlocks:
    """The blocks of a batch, anchors drawn by (seed, epoch, row). N is the most that any row has, at least 1."""
    masks = batch.loss_mask.cpu().numpy()
    drawn = [
        sample_anchors(masks[i, :length], num_anchors=num_anchors, seed=seed, epoch=batch.plan.epoch, row=row)
        for i, (row, length) in enumerate(zip(batch.plan.rows, batch.lengths.tolist(), strict=True))
    ]
    slots = max(1, max(len(positions) for positions in drawn))
    anchors = np.zeros((len(drawn), slots), np.int64)
    valid = np.zeros((len(drawn), slots), bool)
    for i, positions in enumerate(drawn):
        anchors[i, : len(positions)] = positions
        valid[i, : len(positions)] = True
    return build_blocks(
        batch.input_ids,
        batch.loss_mask,
        torch.from_numpy(anchors),
        torch.from_numpy(valid),
        block_size=block_size,
        mask_token_id=mask_token_id,
        gamma=gamma,
        first_slot=first_slot,
    )


def build_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    valid: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float,
    first_slot: int = 1,
) -> AnchoredBlocks:
    """Blocks [B, N, S] opened by `anchors` [B, N]; padding of a row must have loss_mask 0. Slot `first_slot` predicts the next token."""
    length = input_ids.shape[1]
    places = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)  # [B, N, S]
    positions = places + 1 - first_slot  # of the labels
    inside = positions < length
    flat = positions.clamp(max=length - 1).flatten(1)
    labels = input_ids.long().gather(1, flat).view(positions.shape)
    supervised = (loss_mask.long().gather(1, flat).view(positions.shape) != 0) & inside & valid.unsqueeze(-1)
    supervised[..., :first_slot] = valid.unsqueeze(-1)  # the anchor's own mask, which the sampling has checked
    prefix = supervised.long().cumprod(dim=-1)
    block_ids = torch.full_like(labels, mask_token_id)
    block_ids[..., 0] = torch.where(valid, input_ids.long().gather(1, anchors), mask_token_id)
    return AnchoredBlocks(
        anchor_positions=anchors,
        block_valid=valid,
        block_ids=block_ids,
        labels=labels,
        weights=prefix * decay_weights(block_size, gamma, first_slot=first_slot).to(prefix.device),
        first_slot=first_slot,
    )
