"""Attention of many blocks over one shared context on the CPU, part by part.

    own block                 [B*N] small softmaxes, nothing hidden
    run of neighbouring blocks  context before its first anchor: no mask     up to its last anchor: masked
    merge                     out = sum of exp(lse_part - lse) out_part       backward: each part's own, with the merged out and lse

The parts are torch's CPU flash kernels, which return the log-sum-exp. Their backward kernels compute exp(score - lse) themselves,
so that with the merged log-sum-exp and output they give each part's exact share of the gradient.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
RUN = 8  # blocks of a run where the context is long; the fewer, the less is masked and the more kernels are called
SHORT = 1024  # context up to which all blocks are one run, where there is no window


@dataclass(frozen=True, kw_only=True)
class Run:
    """Blocks `first` .. `last`-1 of every row over the context positions `start` .. `end`-1."""

    first: int
    last: int
    start: int
    end: int
    hidden: Tensor | None  # [B, blocks, 1 or S, end - start] bool, True where a slot must not look; None: all of it is seen


def runs_of_blocks(
    anchors: Tensor, valid: Tensor, *, block_size: int, window: int | None = None, run: int | None = None
) -> list[Run]:
    """The context parts of blocks with `anchors` [B, N] (rising but for padding, which sees no context)."""
    longest = int(torch.where(valid, anchors, 0).max())
    run = run or (anchors.shape[1] if window is None and longest <= SHORT else RUN)
    runs = []
    for first in range(0, anchors.shape[1], run):
        last = min(first + run, anchors.shape[1])
        seen = torch.where(valid, anchors, 0)[:, first:last]  # a block sees positions below this
        high = int(seen.max())
        if window is None:
            low = int(seen.min())
            if low < 64:  # a kernel of its own is not worth it
                low = 0
            if low:
                runs.append(Run(first=first, last=last, start=0, end=low, hidden=None))
        else:
            begins = seen.unsqueeze(-1) + torch.arange(block_size, device=anchors.device) - window + 1  # [B, blocks, S]
            low = int(begins[valid[:, first:last]].clamp(min=0).min()) if high else 0
        if high > low:
            places = torch.arange(low, high, device=anchors.device)
            hidden = places >= seen[..., None, None]
            if window is not None:
                hidden = hidden | (places < begins.unsqueeze(-1))
            runs.append(Run(first=first, last=last, start=low, end=high, hidden=hidden))
    return runs


def grouped_attention(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], runs: list[Run], *, block_size: int, causal: bool
) -> Tensor:
    """[B, heads, N*S, d]; arguments as in `attend`. `causal`: within the block."""
    dtype = own[1].dtype  # under autocast the norms of queries and keys give fp32
    return _Grouped.apply(query.to(dtype), *(x.to(dtype) for x in (*context, *own)), runs, block_size, causal)


class _Grouped(torch.autograd.Function):
    """Six axes: [B, kv_heads, heads of one kv head, N, S, d]. The heads that share keys are queries of one kernel call."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, ck: Tensor, cv: Tensor, k: Tensor, v: Tensor, runs: list[Run], size: int, causal: bool
    ) -> Tensor:
        six = _six(query, k.shape[1], size)
        earlier = _earlier_slots(six) if causal else None
        out, lse = FORWARD(_fold(six), _own(k, size), _own(v, size), 0.0, False, attn_mask=earlier)
        out, lse = _unfold(out, six).float().contiguous(), _unfold(lse.unsqueeze(-1), six).contiguous()
        for run in runs:
            part_out, part_lse = _context_part(six, ck, cv, run)
            here, before = out[:, :, :, run.first : run.last], lse[:, :, :, run.first : run.last]
            after = torch.logaddexp(before, part_lse)
            here.mul_((before - after).exp_()).addcmul_(part_out.float(), part_lse.sub_(after).exp_())
            before.copy_(after)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, ck, cv, k, v, out, lse)
        ctx.runs, ctx.size, ctx.earlier = runs, size, earlier
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, ck, cv, k, v, out, lse = ctx.saved_tensors
        size = ctx.size
        six, grad = _six(query, k.shape[1], size), _six(grads[0], k.shape[1], size)
        dq, dk, dv = BACKWARD(
            _fold(grad), _fold(six), _own(k, size), _own(v, size), _fold(out), _fold(lse).squeeze(-1), 0.0, False,
            attn_mask=ctx.earlier,
        )  # fmt: skip
        dq = _unfold(dq, six).contiguous()
        dck, dcv = torch.zeros_like(ck), torch.zeros_like(cv)
        for run in ctx.runs:
            blocks, keys = slice(run.first, run.last), slice(run.start, run.end)
            parts = [_queries(x[:, :, :, blocks]) for x in (grad, six, out, lse)]
            part_q, part_k, part_v = BACKWARD(
                parts[0], parts[1], ck[:, :, keys], cv[:, :, keys], parts[2], parts[3].squeeze(-1), 0.0, False,
                attn_mask=_additive(run, six),
            )  # fmt: skip
            here = dq[:, :, :, blocks]
            here += part_q.view(here.shape)
            dck[:, :, keys] += part_k
            dcv[:, :, keys] += part_v
        own = [x.view(len(k), -1, *x.shape[1:]).transpose(1, 2).reshape(k.shape) for x in (dk, dv)]
        return dq.view(query.shape), dck, dcv, *own, None, None, None


def _context_part(six: Tensor, ck: Tensor, cv: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    """(out, lse) of a run's queries over its piece of context, as [B, kv_heads, heads, blocks, S, d or 1]."""
    queries = six[:, :, :, run.first : run.last]
    keys = slice(run.start, run.end)
    out, lse = FORWARD(_queries(queries), ck[:, :, keys], cv[:, :, keys], 0.0, False, attn_mask=_additive(run, six))
    lse = lse.view(*queries.shape[:-1], 1)
    if run.hidden is not None:  # of a query that sees nothing the kernel says 0
        lse = lse.masked_fill(run.hidden.all(-1)[:, None, None, :, :, None], -math.inf)
    return out.view(queries.shape), lse


def _additive(run: Run, six: Tensor) -> Tensor | None:
    """The run's mask as the kernel wants it: [B, 1, heads * blocks * S, keys] of 0 and -inf."""
    if run.hidden is None:
        return None
    batch, _, heads, _, size, _ = six.shape
    mask = torch.zeros(run.hidden.shape, dtype=six.dtype).masked_fill_(run.hidden, -math.inf)
    return mask.unsqueeze(1).expand(-1, heads, -1, size, -1).reshape(batch, 1, -1, mask.shape[-1])


def _earlier_slots(six: Tensor) -> Tensor:
    """The mask of a block that is causal, as the kernel wants it: [1, 1, heads * S, S] of 0 and -inf."""
    heads, size = six.shape[2], six.shape[4]
    return torch.full((size, size), -math.inf, dtype=six.dtype).triu(1).repeat(heads, 1)[None, None]


def _six(x: Tensor, kv_heads: int, size: int) -> Tensor:
    batch, heads, queries, dim = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads, queries // size, size, dim)


def _queries(six: Tensor) -> Tensor:
    """[B, kv_heads, heads * blocks * S, d]."""
    return six.flatten(2, 4)


def _fold(six: Tensor) -> Tensor:
    """Each block as a row of its own: [B*N, kv_heads, heads * S, d]."""
    return six.permute(0, 3, 1, 2, 4, 5).flatten(3, 4).flatten(0, 1)


def _unfold(x: Tensor, six: Tensor) -> Tensor:
    """The way back of `_fold`, to the shape of `six` but for its last axis."""
    batch, kv_heads, heads, blocks, size, _ = six.shape
    return x.view(batch, blocks, kv_heads, heads, size, -1).permute(0, 2, 3, 1, 4, 5)


def _own(x: Tensor, size: int) -> Tensor:
    """Keys or values [B, kv_heads, N*S, d] with each block as a row of its own: [B*N, kv_heads, S, d]."""
    return x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
