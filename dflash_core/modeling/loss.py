"""The objective on sums: weighted losses of block slots against the token, the target's distribution, or both.

    loss_sum = sum over trained slots of w_k x sum over terms of share x term        the optimizer divides by the sum of w_k

    term     p: the target's distribution, q: the drafter's                     needs p
    ce       -log q(token)                                                       no
    soft_ce  -sum p log q        kl  sum p log(p / q)        (one gradient)      yes
    tv       1 - sum min(p, q)                                                   yes
    nla      -log sum min(p, q)                                                  yes
    lk       c kl + (1 - c) tv,  c = exp(-3 sum min(p, q)) held fixed            yes      (arXiv 2602.23881)

    w_k      decay: that of the blocks (anchors.py); dpace: what the acceptance of the block gains by slot k (arXiv 2605.18810)

Logits of a few blocks exist at a time: the gradient towards their states is taken at once, so nothing is kept for the backward
pass or computed twice. What has no weight, such as slot 0 where the anchor does not draft, never reaches the head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_core.config import LossTerm
from dflash_core.records import AnchoredBlocks

LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**28}  # of fp32 logits at a time
LEAST_OVERLAP = 1e-5  # of p and q, where -log would grow without bound


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


def block_loss(
    states: Tensor,
    blocks: AnchoredBlocks,
    head: Head,
    *,
    terms: Mapping[LossTerm, float],
    dpace_alpha: float | None = None,
    teacher_states: Tensor | None = None,
    slots_at_once: int | None = None,
) -> LossSums:
    """Loss and counts of final-normed block states [B, N, S, H].

    `terms` are shares of the losses above. `dpace_alpha`: weights by D-PACE with this smoothing, in place of those of `blocks`.
    `teacher_states` [n, H]: the target's final-normed states one token before each trained label (`at_labels`), where a term needs them.
    `slots_at_once`: of how many slots logits exist at a time (those of a block always together); None: all.
    """
    trained = blocks.weights > 0  # [B, N, S]
    block, slots = trained.flatten(0, 1).nonzero().unbind(-1)
    given = _Given(
        head=head,
        terms=dict(terms),
        dpace_alpha=dpace_alpha,
        labels=blocks.labels[trained],
        weights=blocks.weights[trained],
        block=block,
        slots=slots,
        teacher=teacher_states,
        slots_at_once=slots_at_once or len(block),
    )
    loss_sum, weight_sum, right = _Fused.apply(states[trained], given)
    hit = torch.zeros_like(trained)
    hit[trained] = right
    return LossSums(
        loss_sum=loss_sum,
        weight_sum=weight_sum,
        correct=hit.sum((0, 1)),
        counted=trained.sum((0, 1)),
        accepted_sum=hit[..., blocks.first_slot :].long().cumprod(-1).sum(),
    )


def slots_that_fit(vocab_size: int, *, device: str) -> int:
    """Of how many slots logits may exist at a time on "cpu" or "cuda:0"."""
    return max(1, LOGIT_BYTES[device.partition(":")[0]] // (4 * vocab_size))


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What the fused loss needs besides the states: n trained slots, those of a block side by side."""

    head: Head
    terms: dict[LossTerm, float]
    dpace_alpha: float | None
    labels: Tensor  # [n]
    weights: Tensor  # [n]
    block: Tensor  # [n] number of the block, rising
    slots: Tensor  # [n] place in it
    teacher: Tensor | None  # [n, H]
    slots_at_once: int

    def chunks(self) -> Iterator[slice]:
        """Runs of whole blocks with at most `slots_at_once` slots, at least one block each."""
        ends = [*(torch.diff(self.block).nonzero()[:, 0] + 1).tolist(), len(self.block)]
        begin = 0
        for end, next_end in zip(ends, [*ends[1:], None], strict=True):
            if next_end is None or next_end - begin > self.slots_at_once:
                yield slice(begin, end)
                begin = end


class _Fused(torch.autograd.Function):
    """(loss sum, weight sum, right [n]) of trained states [n, H]; keeps only the gradient [n, H] for the backward pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, given: _Given) -> tuple[Tensor, Tensor, Tensor]:
        wants_grad = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(states) if wants_grad else None
        right = torch.zeros_like(given.labels, dtype=torch.bool)
        loss_sum, weight_sum = (torch.zeros((), device=states.device) for _ in range(2))
        for part in given.chunks() if len(states) else ():
            x = states[part].detach().requires_grad_(wants_grad)
            with torch.set_grad_enabled(wants_grad):
                logits = given.head(x)
            teacher = None if given.teacher is None else given.head(given.teacher[part])
            losses, weights, towards, right[part] = _losses(logits.detach(), teacher, given, part)
            loss_sum += (losses * weights).sum()
            weight_sum += weights.sum()
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(logits, x, towards.to(logits.dtype))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(weight_sum, right)
        return loss_sum, weight_sum, right

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None


def _losses(logits: Tensor, teacher: Tensor | None, given: _Given, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss [n], weight [n], weighted gradient towards the logits [n, V] fp32, right [n]) of a chunk's logits [n, V].

    The logits are overwritten: passes over them are what this costs.
    """
    labels, terms = given.labels[part].unsqueeze(-1), given.terms
    log_q = logits.float()
    top, guess = log_q.max(-1, keepdim=True)
    log_q.sub_(top)
    at_label = log_q.gather(-1, labels)
    q = log_q.exp_() if teacher is None else log_q.exp()  # times `total`
    total = q.sum(-1, keepdim=True)
    cross_entropy = (total.log() - at_label).squeeze(-1)
    weights = given.weights[part]
    if given.dpace_alpha is not None:
        weights = dpace_weights(cross_entropy.neg().exp(), given.block[part], given.slots[part], alpha=given.dpace_alpha)
    to_token = terms.get("ce", 0.0)
    losses, column = to_token * cross_entropy, weights.unsqueeze(-1)
    if teacher is None:
        towards = q.mul_(to_token * column / total)
    else:
        q.div_(total)
        compared, towards = _teacher_losses(log_q.sub_(total.log()), q, teacher.float().log_softmax(-1), terms)
        losses = losses + compared
        towards.add_(q, alpha=to_token).mul_(column)
    towards.scatter_add_(-1, labels, -to_token * column)
    return losses, weights, towards, guess.squeeze(-1) == labels.squeeze(-1)


def _teacher_losses(log_q: Tensor, q: Tensor, log_p: Tensor, terms: Mapping[LossTerm, float]) -> tuple[Tensor, Tensor]:
    """(loss [n], gradient towards the logits [n, V]) of the terms that compare with the target's distribution.

    With c the share of (p, q) terms and o = sum min(p, q): d kl = q - p, and d o = q (1[q < p] - sum of q where q < p).
    """
    p = log_p.exp()
    soft_ce, nla, lk = (terms.get(name, 0.0) for name in ("soft_ce", "nla", "lk"))
    kl, tv = (torch.full_like(log_p[:, 0], terms.get(name, 0.0)) for name in ("kl", "tv"))  # [n]
    losses, towards = torch.zeros_like(kl), q - p
    if terms.keys() & {"tv", "nla", "lk"}:
        below = (q < p).to(q.dtype)
        overlap = torch.minimum(p, q).sum(-1)  # [n]
        share = torch.exp(-3 * overlap)
        kl, tv = kl + lk * share, tv + lk * (1 - share)
        bounded = overlap.clamp(min=LEAST_OVERLAP)
        losses = tv * (1 - overlap) - nla * bounded.log()
        to_overlap = tv + nla / bounded * (overlap > LEAST_OVERLAP)
        below.sub_((q * below).sum(-1, keepdim=True)).mul_(q).mul_(to_overlap.unsqueeze(-1))
        towards.mul_((soft_ce + kl).unsqueeze(-1)).sub_(below)
    elif soft_ce + terms.get("kl", 0.0) != 1:
        towards.mul_((soft_ce + kl).unsqueeze(-1))
    if terms.keys() & {"soft_ce", "kl", "lk"}:
        soft = -(p * log_q).sum(-1)
        entropy = -(p * log_p.clamp(min=-1e4)).sum(-1)  # a token that the target excludes has p = 0
        losses = losses + soft_ce * soft + kl * (soft - entropy)
    return losses, towards


def dpace_weights(q: Tensor, block: Tensor, slots: Tensor, *, alpha: float) -> Tensor:
    """D-PACE weights [n] of slots whose token has probability q [n]; slots of one block stand side by side.

    s_k = (1 - alpha) q_k + alpha; C_k = s_1 .. s_k; w_k = C_k + .. + C_last. Slots that are not trained count as s = 1, C = 0.
    """
    rows = torch.unique_consecutive(block, return_inverse=True)[1]
    width = int(slots.max()) + 1
    smoothed = torch.ones(int(rows[-1]) + 1, width, dtype=q.dtype, device=q.device)
    smoothed[rows, slots] = (1 - alpha) * q + alpha
    reached = torch.zeros_like(smoothed)
    reached[rows, slots] = smoothed.cumprod(-1)[rows, slots]
    return reached.flip(-1).cumsum(-1).flip(-1)[rows, slots]
