"""Many blocks of a row in one drafter pass, as training and replaying need them; decoding drafts one block at a time.

anchors a, context of the row --> each block at its own positions a .. a+S-1, seeing the context before a and itself
last states of the target     --> those that predict the labels, each of the token before
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dflash_core.modeling.attention import Backend, BlockView, choose_backend
from dflash_core.modeling.drafter import Drafter, KeyValue
from dflash_core.records import AnchoredBlocks


def block_states(
    drafter: Drafter,
    embed: Callable[[Tensor], Tensor],
    context: list[KeyValue],
    blocks: AnchoredBlocks,
    *,
    backend: Backend | Literal["auto"] = "auto",
) -> Tensor:
    """Final-normed states [B, N, S, H] of all blocks of a batch, each seeing the context before its anchor.

    `embed` is the target's embedding; `context` are keys and values of the whole rows (`Drafter.context`). `backend` computes
    attention.
    """
    rows, count, size = blocks.block_ids.shape
    keys = context[0][0]
    positions = (blocks.anchor_positions.unsqueeze(-1) + torch.arange(size, device=keys.device)).flatten(1)  # [B, N*S]
    view = BlockView(
        anchor_positions=blocks.anchor_positions,
        block_valid=blocks.block_valid,
        context_length=keys.shape[2],
        block_size=size,
        backend=choose_backend(backend, keys.device.type, keys=keys.shape[2] + count * size),
    )
    embeddings = embed(blocks.block_ids.flatten(1)).to(keys.dtype)
    return drafter.denoise(embeddings, positions, context, view).view(rows, count, size, -1)


def at_labels(last_hidden: Tensor, blocks: AnchoredBlocks) -> Tensor:
    """The states [n, H] fp32 from which the target predicts the n trained labels: those of one token before, out of [B, T, H]."""
    rows, block, slots = (blocks.weights > 0).nonzero().unbind(-1)
    return last_hidden[rows, blocks.anchor_positions[rows, block] + slots - blocks.first_slot].float()
