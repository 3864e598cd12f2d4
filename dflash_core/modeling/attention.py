"""Attention of the drafter: block slots look at the context before their anchor and at their own block.

    query slot (block j, slot o) sees   context position p   where  p < anchor_j          (strict: the anchor's own hidden
                                        slot o' of block j   always, both directions       state does not exist when serving)
    in a sliding layer (window W) only  context position p   where  anchor_j + o - W < p < anchor_j
                                        slot o' of block j   where  o' <= o               (causal; else always)

Visibility follows positions, never block numbers. A padding block sees its own slots only, so that no row is empty. A window is at
least a block, so that it hides no slot.

    dense     one masked softmax over [context | all blocks]: the reference, and what runs on CUDA without compilation
    grouped   own block apart, context in runs of neighbouring anchors: what all of a run see without a mask, the rest with one;
              merged by log-sum-exp. Far fewer scores, and no mask of the size of all of them. For the CPU (modeling/grouped.py)
    flex      FlexAttention with the rule as a block mask; CUDA
"""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dflash_core.modeling.grouped import Run, grouped_attention, runs_of_blocks

Backend = Literal["dense", "grouped", "flex"]
FEW_KEYS = 512  # one kernel over all of them is as fast as several over what is seen


def block_mask(
    anchor_positions: Tensor,
    block_valid: Tensor,
    *,
    context_length: int,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> Tensor:
    """The rule above as a dense mask [B, 1, N*S, T + N*S] bool, True where the query may look."""
    rows, blocks = anchor_positions.shape
    device = anchor_positions.device
    places = torch.arange(context_length, device=device)
    context = places < anchor_positions.unsqueeze(-1)  # [B, N, T]
    context = (context & block_valid.unsqueeze(-1)).repeat_interleave(block_size, dim=1)  # [B, N*S, T]
    slots = torch.arange(block_size, device=device)
    if window is not None:
        positions = (anchor_positions.unsqueeze(-1) + slots).flatten(1)  # [B, N*S]
        context = context & (places > positions.unsqueeze(-1) - window)
    owner = torch.arange(blocks, device=device).repeat_interleave(block_size)
    own_block = owner.unsqueeze(0) == owner.unsqueeze(1)  # [N*S, N*S]
    if causal:
        own_block = own_block & (slots.repeat(blocks).unsqueeze(0) <= slots.repeat(blocks).unsqueeze(1))
    return torch.cat([context, own_block.expand(rows, -1, -1)], dim=-1).unsqueeze(1)


def choose_backend(wanted: Backend | Literal["auto"], device: str, *, keys: int) -> Backend:
    """auto: what is fastest on "cpu" or "cuda:0" for that many keys of a row, own slots included."""
    if wanted != "auto":
        return wanted
    if device.startswith("cuda"):
        return "flex"
    return "dense" if keys <= FEW_KEYS else "grouped"


def check_backend(wanted: Backend | Literal["auto"], device: str) -> None:
    """Raises ValueError where the wanted one cannot train on the device."""
    if wanted == "flex" and device == "cpu":
        raise ValueError("training.attention flex on cpu: FlexAttention has no backward pass there; choose auto or dense")
    if wanted == "grouped" and device != "cpu":
        raise ValueError(f"training.attention grouped on {device}: its kernels are the CPU's; choose auto or dense")


@dataclass(frozen=True, kw_only=True)
class BlockView:
    """Which keys the slots of a batch's blocks see; made once a batch, used by every layer of a kind."""

    anchor_positions: Tensor  # [B, N], rising in each row but for padding blocks
    block_valid: Tensor  # [B, N]
    context_length: int
    block_size: int
    backend: Backend
    window: int | None = None  # tokens that a slot sees of the text, itself included; None: all
    causal: bool = False  # within the block

    def sliding(self, window: int, *, causal: bool) -> "BlockView":
        """The same blocks in a sliding layer."""
        return replace(self, window=window, causal=causal)

    @cached_property
    def mask(self) -> Tensor:
        """[B, 1, N*S, T + N*S] bool."""
        return block_mask(
            self.anchor_positions,
            self.block_valid,
            context_length=self.context_length,
            block_size=self.block_size,
            window=self.window,
            causal=self.causal,
        )

    @cached_property
    def additive(self) -> Tensor:
        """`mask` as 0 and -inf in fp32, made once: given the mask, the kernel makes this in every layer."""
        return torch.where(self.mask, 0.0, -math.inf)

    @cached_property
    def runs(self) -> list[Run]:
        """How `grouped` reads the context."""
        return runs_of_blocks(self.anchor_positions, self.block_valid, block_size=self.block_size, window=self.window)

    @cached_property
    def flex_mask(self) -> Any:
        """The rule for FlexAttention; one for all heads."""
        from torch.nn.attention.flex_attention import create_block_mask

        anchors, valid, length, size = self.anchor_positions, self.block_valid, self.context_length, self.block_size
        window, causal = self.window, self.causal

        def rule(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // size, query % size
            context = (key < anchors[row, block]) & valid[row, block]
            if window is not None:
                context = context & (key > anchors[row, block] + slot - window)
            own = (key - length) // size == block
            if causal:
                own = own & ((key - length) % size <= slot)
            return torch.where(key < length, context, own)

        rows, queries = anchors.shape[0], anchors.shape[1] * size
        return create_block_mask(rule, rows, None, queries, length + queries, device=str(anchors.device))


def one_block(*, rows: int, context_length: int, block_size: int, device: torch.device) -> BlockView:
    """One block a row that opens where the context ends, as in decoding."""
    anchors = torch.full((rows, 1), context_length, device=device)
    return BlockView(
        anchor_positions=anchors,
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
        context_length=context_length,
        block_size=block_size,
        backend="dense",
    )


def attend(query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], view: BlockView | None) -> Tensor:
    """softmax(q k / sqrt(d)) v over context and own block, [B, heads, Q, d].

    query [B, heads, Q, d]; `context` and `own` are keys and values [B, kv_heads, T or Q, d]. `view` None: all is visible.
    """
    if view is not None and view.backend == "grouped":
        return grouped_attention(query, context, own, view.runs, block_size=view.block_size, causal=view.causal)
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    shared = query.shape[1] != key.shape[1]
    if view is not None and view.backend == "flex":
        query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast the norms give fp32
        return _flex(query.is_cuda)(query, key, value, block_mask=view.flex_mask, enable_gqa=shared)
    mask = None if view is None else view.additive.to(query.dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=shared)


@cache
def _flex(compiled: bool) -> Any:
    """FlexAttention; without compilation, as on the CPU, it has no backward pass and is for comparison only."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
