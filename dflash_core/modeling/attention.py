"""Attention of the drafter: block slots look at the context before their anchor and at their own block.

    query slot (block j, slot o) sees   context position p   where  p < anchor_j          (strict: the anchor's own hidden
                                        slot o' of block j   always, both directions       state does not exist when serving)

Visibility follows positions, never block numbers. A padding block sees its own slots only, so that no row is empty.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def block_mask(anchor_positions: Tensor, block_valid: Tensor, *, context_length: int, block_size: int) -> Tensor:
    """The rule above as a dense mask [B, 1, N*S, T + N*S] bool, True where the query may look."""
    rows, blocks = anchor_positions.shape
    device = anchor_positions.device
    context = torch.arange(context_length, device=device) < anchor_positions.unsqueeze(-1)  # [B, N, T]
    context = (context & block_valid.unsqueeze(-1)).repeat_interleave(block_size, dim=1)  # [B, N*S, T]
    owner = torch.arange(blocks, device=device).repeat_interleave(block_size)
    own_block = (owner.unsqueeze(0) == owner.unsqueeze(1)).expand(rows, -1, -1)  # [B, N*S, N*S]
    return torch.cat([context, own_block], dim=-1).unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(d)) v, not causal. query [B, heads, Q, d]; key, value [B, kv_heads, K, d]; mask None: all visible."""
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
