"""The objective's sums against loops in float64, its gradients against autograd, and the golden values of D-PACE."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.modeling.loss import LossSums, block_loss, dpace_weights
from dflash_core.records import AnchoredBlocks

VOCAB, SIZE, HIDDEN = 11, 4, 6
TERMS = ["ce", "soft_ce", "kl", "tv", "nla", "lk"]


def blocks_of(weights: Tensor, labels: Tensor) -> AnchoredBlocks:
    rows, count, _ = weights.shape
    return AnchoredBlocks(
        anchor_positions=torch.zeros(rows, count, dtype=torch.long),
        block_valid=weights.sum(-1) > 0,
        block_ids=torch.zeros_like(labels),
        labels=labels,
        weights=weights,
    )


def right(labels: Tensor, hits: Tensor) -> Tensor:
    """States that are their own logits: the label's wins where `hits`, another one else."""
    winner = torch.where(hits, labels, (labels + 1) % VOCAB)
    return torch.nn.functional.one_hot(winner, VOCAB).float()


def sums_of(weights: Tensor, hits: Tensor) -> LossSums:
    labels = torch.arange(weights.numel()).view(weights.shape) % VOCAB
    return block_loss(right(labels, hits), blocks_of(weights, labels), lambda states: states, terms={"ce": 1.0})


class Case:
    """Random blocks, one of them a padding block and one cut short, a head, and a teacher that excludes a token."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.rand(2, 3, SIZE, generator=generator) + 0.1
        self.weights[..., 0] = 0
        self.weights[1, 1] = 0
        self.weights[0, 1, 2:] = 0
        self.trained = self.weights > 0
        self.labels = torch.randint(0, VOCAB, self.weights.shape, generator=generator)
        self.states = torch.randn(2, 3, SIZE, HIDDEN, generator=generator)
        self.matrix = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.shift = torch.zeros(VOCAB)
        self.teacher = torch.randn(int(self.trained.sum()), HIDDEN, generator=generator)

    def head(self, states: Tensor) -> Tensor:
        return states @ self.matrix.to(states).T

    def sums(self, states: Tensor, terms: dict[str, float], **options: Any) -> LossSums:
        teacher = None if terms.keys() == {"ce"} else self.teacher
        return block_loss(states, blocks_of(self.weights, self.labels), self.head, terms=terms, teacher_states=teacher, **options)

    def slow(self, terms: dict[str, float], *, alpha: float | None = None) -> tuple[float, float, Tensor]:
        """(loss sum, weight sum, gradient) slot by slot in float64, differentiated by autograd."""
        states = self.states.double().requires_grad_()
        loss, weight, number = torch.zeros((), dtype=torch.float64), 0.0, 0
        for b in range(2):
            for j in range(3):
                slots = [k for k in range(SIZE) if self.trained[b, j, k]]
                q = {k: self.head(states[b, j, k]).softmax(-1) for k in slots}
                chances = [float(q[k].detach()[self.labels[b, j, k]]) for k in slots]
                for place, k in enumerate(slots):
                    p = self.head(self.teacher[number].double()).softmax(-1)
                    number += 1
                    w = float(self.weights[b, j, k]) if alpha is None else slow_dpace(chances, alpha)[place]
                    loss = loss + w * sum(share * one(p, q[k], int(self.labels[b, j, k]), name) for name, share in terms.items())
                    weight += w
        (gradient,) = torch.autograd.grad(loss, states)
        return float(loss.detach()), weight, gradient


def one(p: Tensor, q: Tensor, label: int, name: str) -> Tensor:
    """A term as its paper writes it."""
    overlap = torch.minimum(p, q).sum()
    kl = (p * (p / q).log()).sum()
    mix = torch.exp(-3 * overlap.detach())
    return {
        "ce": -q[label].log(),
        "soft_ce": -(p * q.log()).sum(),
        "kl": kl,
        "tv": (p - q).abs().sum() / 2,
        "nla": -overlap.log(),
        "lk": mix * kl + (1 - mix) * (1 - overlap),
    }[name]


def slow_dpace(chances: list[float], alpha: float) -> list[float]:
    reached = [math.prod((1 - alpha) * q + alpha for q in chances[: k + 1]) for k in range(len(chances))]
    return [sum(reached[k:]) for k in range(len(chances))]


OBJECTIVES: list[tuple[dict[str, float], float | None]] = [
    *[({name: 1.0}, None) for name in TERMS],
    ({"ce": 0.1, "tv": 0.9}, None),
    ({"ce": 0.5, "kl": 2.0, "lk": 0.25, "nla": 1.5}, None),
    ({"ce": 1.0}, 0.5),
    ({"kl": 1.0, "ce": 0.5}, 0.3),
]


@pytest.mark.parametrize(("terms", "alpha"), OBJECTIVES)
def test_sums_and_gradients_equal_the_written_terms(terms: dict[str, float], alpha: float | None) -> None:
    case = Case()
    states = case.states.clone().requires_grad_()
    sums = case.sums(states, terms, dpace_alpha=alpha)
    loss, weight, expected = case.slow(terms, alpha=alpha)
    (3 * sums.loss_sum).backward()
    assert float(sums.loss_sum) == pytest.approx(loss, rel=1e-5)
    assert float(sums.weight_sum) == pytest.approx(weight, rel=1e-6)
    torch.testing.assert_close(states.grad, 3 * expected.float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("terms", "alpha"), OBJECTIVES)
@pytest.mark.parametrize("slots_at_once", [1, 4, 7])
def test_chunks_change_nothing(terms: dict[str, float], alpha: float | None, slots_at_once: int) -> None:
    case, seen = Case(), []
    whole, parts = (case.states.clone().requires_grad_() for _ in range(2))
    a = case.sums(whole, terms, dpace_alpha=alpha)
    plain = case.head

    def head(states: Tensor) -> Tensor:
        seen.append(len(states))
        return plain(states)

    case.head = head  # type: ignore[method-assign]
    b = case.sums(parts, terms, dpace_alpha=alpha, slots_at_once=slots_at_once)
    a.loss_sum.backward()
    b.loss_sum.backward()
    torch.testing.assert_close(whole.grad, parts.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close([a.loss_sum, a.weight_sum], [b.loss_sum, b.weight_sum])
    assert (a.correct.tolist(), a.counted.tolist(), int(a.accepted_sum)) == (
        b.correct.tolist(),
        b.counted.tolist(),
        int(b.accepted_sum),
    )
    heads = 1 if terms.keys() == {"ce"} else 2  # blocks of 3, 1, 3, 3, 3 trained slots
    assert seen[::heads] == {1: [3, 1, 3, 3, 3], 4: [4, 3, 3, 3], 7: [7, 6]}[slots_at_once]


def test_counts_equal_a_loop_over_slots() -> None:
    case = Case(seed=1)
    sums = case.sums(case.states, {"ce": 1.0})
    correct, counted = [0] * SIZE, [0] * SIZE
    for b in range(2):
        for j in range(3):
            for k in range(SIZE):
                if case.trained[b, j, k]:
                    counted[k] += 1
                    correct[k] += int(case.head(case.states[b, j, k]).argmax() == case.labels[b, j, k])
    assert (sums.correct.tolist(), sums.counted.tolist()) == (correct, counted)


def test_accepted_counts_drafts_before_the_first_wrong_one() -> None:
    weights = torch.ones(1, 5, SIZE)
    weights[..., 0] = 0
    weights[0, 4, 3] = 0  # the row ends here: only two drafts can be accepted
    hits = torch.tensor([[[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]]], dtype=torch.bool)
    assert int(sums_of(weights, hits).accepted_sum) == 3 + 1 + 0 + 2 + 2


def test_the_anchors_slot_counts_where_it_drafts() -> None:
    weights, labels = torch.ones(1, 4, SIZE), torch.arange(4 * SIZE).view(1, 4, SIZE) % VOCAB
    hits = torch.tensor([[[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 0]]], dtype=torch.bool)
    blocks = replace(blocks_of(weights, labels), first_slot=0)
    sums = block_loss(right(labels, hits), blocks, lambda states: states, terms={"ce": 1.0}, dpace_alpha=0.5)
    assert int(sums.accepted_sum) == 4 + 1 + 0 + 3
    assert (sums.counted.tolist(), sums.correct.tolist()) == ([4] * SIZE, [3, 3, 4, 3])
    q = {True: math.exp(1) / (math.exp(1) + VOCAB - 1), False: 1 / (math.exp(1) + VOCAB - 1)}
    expected = 0.0
    for row in hits[0].tolist():
        reached = [math.prod(0.5 * q[hit] + 0.5 for hit in row[: k + 1]) for k in range(SIZE)]
        expected += sum(sum(reached[k:]) for k in range(SIZE))
    assert float(sums.weight_sum) == pytest.approx(expected, rel=1e-5)


def test_accuracy_of_two_right_slots_out_of_three() -> None:
    weights = torch.tensor([[[0.0, 1.0, 0.7, 0.5]]])
    sums = sums_of(weights, torch.tensor([[[1, 1, 0, 1]]], dtype=torch.bool))
    assert int(sums.correct.sum()) / int(sums.counted.sum()) == pytest.approx(0.667, abs=1e-3)


def test_slots_without_weight_do_not_reach_the_head() -> None:
    seen = []

    def head(states: Tensor) -> Tensor:
        seen.append(states.shape[0])
        return states

    weights = torch.tensor([[[0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    states = torch.randn(1, 2, SIZE, VOCAB, requires_grad=True)
    blocks = blocks_of(weights, torch.zeros(1, 2, SIZE, dtype=torch.long))
    block_loss(states, blocks, head, terms={"ce": 1.0}).loss_sum.backward()
    assert seen == [2]
    assert states.grad is not None
    assert (states.grad.abs().sum(-1) > 0).tolist() == [[[False, True, True, False], [False] * 4]]


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_without_any_trained_slot_the_sums_are_zero(alpha: float | None) -> None:
    states = torch.randn(1, 2, SIZE, VOCAB, requires_grad=True)
    blocks = blocks_of(torch.zeros(1, 2, SIZE), torch.zeros(1, 2, SIZE, dtype=torch.long))
    sums = block_loss(states, blocks, lambda x: x, terms={"ce": 1.0}, dpace_alpha=alpha)
    sums.loss_sum.backward()
    assert (float(sums.loss_sum), float(sums.weight_sum), int(sums.accepted_sum)) == (0.0, 0.0, 0)
    assert states.grad is not None
    assert not states.grad.any()


def test_a_head_that_is_not_linear_is_differentiated_too() -> None:
    """Gemma's soft cap: logits are 5 tanh(x / 5)."""
    case = Case()
    plain = case.head

    def capped(states: Tensor) -> Tensor:
        return 5 * torch.tanh(plain(states) / 5)

    case.head = capped  # type: ignore[method-assign]
    states = case.states.clone().requires_grad_()
    case.sums(states, {"ce": 1.0, "kl": 1.0}).loss_sum.backward()
    torch.testing.assert_close(states.grad, case.slow({"ce": 1.0, "kl": 1.0})[2].float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", TERMS)
def test_a_token_that_the_target_excludes_gives_no_nan(name: str) -> None:
    labels = torch.tensor([[[0, 1]]])
    blocks = blocks_of(torch.tensor([[[0.0, 1.0]]]), labels)

    def head(states: Tensor) -> Tensor:
        return states if states.requires_grad else states.masked_fill(torch.arange(VOCAB) == 5, -math.inf)

    states = torch.randn(1, 1, 2, VOCAB, requires_grad=True)
    sums = block_loss(states, blocks, head, terms={name: 1.0}, teacher_states=torch.randn(1, VOCAB))
    sums.loss_sum.backward()
    assert states.grad is not None
    assert torch.isfinite(sums.loss_sum)
    assert torch.isfinite(states.grad).all()


@pytest.mark.parametrize("name", ["nla", "tv", "lk", "kl"])
def test_distributions_apart_and_equal(name: str) -> None:
    """All terms are bounded or clamped where p and q hardly overlap, and zero with zero gradient where they are equal."""
    blocks = blocks_of(torch.tensor([[[0.0, 1.0]]]), torch.zeros(1, 1, 2, dtype=torch.long))
    logits = torch.zeros(1, 1, 2, VOCAB)
    logits[..., 3] = 40
    teacher = torch.zeros(1, VOCAB)
    teacher[:, 4] = 40
    for target, low, high in ((teacher, 0.99, 41.0), (logits[0, 0, 1:], 0.0, 1e-5)):
        states = logits.clone().requires_grad_()
        sums = block_loss(states, blocks, lambda x: x, terms={name: 1.0}, teacher_states=target)
        sums.loss_sum.backward()
        assert low <= float(sums.loss_sum) + 1e-6 <= high + 1e-6
        assert states.grad is not None
        assert float(states.grad.abs().sum()) <= 2.1 if low else float(states.grad.abs().sum()) < 1e-5


def test_golden_dpace_weights() -> None:
    one_block, slots = torch.zeros(3, dtype=torch.long), torch.tensor([1, 2, 3])
    weights = dpace_weights(torch.tensor([0.9, 0.5, 0.2]), one_block, slots, alpha=0.5)
    assert weights.tolist() == pytest.approx([2.09, 1.14, 0.4275])
    gap = dpace_weights(torch.tensor([0.9, 0.2]), torch.zeros(2, dtype=torch.long), torch.tensor([1, 3]), alpha=0.5)
    assert gap.tolist() == pytest.approx([1.52, 0.57])
    both = dpace_weights(
        torch.tensor([0.9, 0.5, 0.2, 0.9, 0.2]), torch.tensor([4, 4, 4, 9, 9]), torch.tensor([1, 2, 3, 1, 3]), alpha=0.5
    )
    assert both.tolist() == pytest.approx([2.09, 1.14, 0.4275, 1.52, 0.57])
