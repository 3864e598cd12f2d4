"""The drafter while decoding a batch: context keys and values of committed tokens only, and a block for every request.

    target_hidden of newly committed tokens --context--> buffers [B, kv_heads, capacity, head_dim], one pair a layer
    anchor, MASK, MASK, ... --drafter over [context | block]--> argmax from the first slot that drafts: block_size - 1 tokens, or block_size

The keys and values of the block itself are made anew each round and never kept.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_core.modeling.attention import BlockView
from dflash_core.modeling.drafter import Drafter, KeyValue
from dflash_core.modeling.target import TargetEnds


class DraftCache:
    """A drafter proposing blocks for a batch of requests."""

    def __init__(self, drafter: Drafter, ends: TargetEnds, *, block_size: int | None = None) -> None:
        """`block_size` below the trained one drafts fewer tokens. Raises ValueError above it."""
        size = drafter.shape.block_size if block_size is None else block_size
        if not 2 <= size <= drafter.shape.block_size:
            raise ValueError(
                f"evaluation.block_size {size}: the drafter was trained with {drafter.shape.block_size}; use 2 to that"
            )
        self._drafter, self._ends, self._size = drafter, ends, size
        self.start(0)

    def start(self, rows: int) -> None:
        self._context: list[KeyValue] = []  # buffers, filled up to each request's length
        self._lengths = torch.zeros(rows, dtype=torch.long)

    @torch.no_grad()
    def extend(self, target_hidden: Tensor, counts: Sequence[int]) -> None:
        added = torch.tensor(counts)
        device = self._drafter.fc.weight.device
        hidden = target_hidden[:, : int(added.max())].to(device, self._drafter.fc.weight.dtype)
        new = self._drafter.context(hidden, start=self._lengths.unsqueeze(1).to(device))
        rows = torch.arange(len(counts)).repeat_interleave(added)
        places = torch.cat([torch.arange(int(count)) for count in added])  # within what is new
        where, rows, places = [part.to(device) for part in (self._lengths[rows] + places, rows, places)]
        self._lengths = self._lengths + added
        self._grow(new, int(self._lengths.max()))
        for buffers, pair in zip(self._context, new, strict=True):
            for buffer, values in zip(buffers, pair, strict=True):
                buffer[rows, :, where] = values[rows, :, places]

    def _grow(self, like: list[KeyValue], needed: int) -> None:
        capacity = self._context[0][0].shape[2] if self._context else 0
        if needed <= capacity:
            return
        grown = []
        for number, pair in enumerate(like):
            buffers = [part.new_zeros(*part.shape[:2], max(needed, 2 * capacity), part.shape[3]) for part in pair]
            for buffer, old in zip(buffers, self._context[number] if self._context else (), strict=False):
                buffer[:, :, :capacity] = old
            grown.append((buffers[0], buffers[1]))
        self._context = grown

    @torch.no_grad()
    def propose(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        shape = self._drafter.shape
        assert [len(text) for text in texts] == (self._lengths + 1).tolist(), "the context ends just before the anchor"
        device = self._drafter.fc.weight.device
        lengths = self._lengths.unsqueeze(1).to(device)  # [B, 1]
        longest = int(self._lengths.max())
        block = torch.tensor([[text[-1]] + [shape.mask_token_id] * (self._size - 1) for text in texts], device=device)
        context = [(key[:, :, :longest], value[:, :, :longest]) for key, value in self._context]
        view = None
        if int(self._lengths.min()) < longest:
            every = torch.ones_like(lengths, dtype=torch.bool)
            view = BlockView(
                anchor_positions=lengths, block_valid=every, context_length=longest, block_size=self._size, backend="dense"
            )
        embeddings = self._ends.embed(block).to(self._drafter.fc.weight.dtype)
        states = self._drafter.denoise(embeddings, lengths + torch.arange(self._size, device=device), context, view)
        drafts = self._ends.head(states[:, shape.first_slot :].to(self._ends.head_dtype)).argmax(-1).tolist()
        fits = (self._lengths + len(drafts[0]) < shape.max_positions).tolist()
        return [draft if fit else [] for draft, fit in zip(drafts, fits, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        chosen = torch.tensor(rows)
        self._lengths = self._lengths[chosen]
        device = self._drafter.fc.weight.device
        self._context = [(key[chosen.to(device)], value[chosen.to(device)]) for key, value in self._context]
