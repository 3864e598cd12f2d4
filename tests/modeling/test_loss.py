"""The objective's sums against a loop over slots."""

import torch

from dflash_core.modeling.loss import LossSums, weighted_cross_entropy
from dflash_core.records import AnchoredBlocks

VOCAB, SIZE = 11, 4


def blocks_of(weights: torch.Tensor, labels: torch.Tensor) -> AnchoredBlocks:
    rows, count, _ = weights.shape
    return AnchoredBlocks(
        anchor_positions=torch.zeros(rows, count, dtype=torch.long),
        block_valid=weights.sum(-1) > 0,
        block_ids=torch.zeros_like(labels),
        labels=labels,
        weights=weights,
    )


def right(labels: torch.Tensor, hits: torch.Tensor) -> torch.Tensor:
    """States that are their own logits: the label's wins where `hits`, another one else."""
    winner = torch.where(hits, labels, (labels + 1) % VOCAB)
    return torch.nn.functional.one_hot(winner, VOCAB).float()


def sums_of(weights: torch.Tensor, hits: torch.Tensor) -> LossSums:
    labels = torch.arange(weights.numel()).view(weights.shape) % VOCAB
    return weighted_cross_entropy(right(labels, hits), blocks_of(weights, labels), lambda states: states)


def test_sums_equal_a_loop_over_slots() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2, 3, SIZE, generator=generator)
    weights[..., 0] = 0
    weights[1, 2] = 0
    weights[0, 1, 2:] = 0
    labels = torch.randint(0, VOCAB, weights.shape, generator=generator)
    states = torch.randn(2, 3, SIZE, VOCAB, generator=generator)
    sums = weighted_cross_entropy(states, blocks_of(weights, labels), lambda x: x)
    loss = weight = 0.0
    correct, counted = [0] * SIZE, [0] * SIZE
    for b in range(2):
        for j in range(3):
            for k in range(SIZE):
                if weights[b, j, k] > 0:
                    probability = states[b, j, k].softmax(-1)[labels[b, j, k]]
                    loss -= float(weights[b, j, k] * probability.log())
                    weight += float(weights[b, j, k])
                    counted[k] += 1
                    correct[k] += int(states[b, j, k].argmax() == labels[b, j, k])
    torch.testing.assert_close(sums.loss_sum, torch.tensor(loss))
    torch.testing.assert_close(sums.weight_sum, torch.tensor(weight))
    assert (sums.correct.tolist(), sums.counted.tolist()) == (correct, counted)


def test_accepted_counts_drafts_before_the_first_wrong_one() -> None:
    weights = torch.ones(1, 5, SIZE)
    weights[..., 0] = 0
    weights[0, 4, 3] = 0  # the row ends here: only two drafts can be accepted
    hits = torch.tensor([[[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]]], dtype=torch.bool)
    assert int(sums_of(weights, hits).accepted_sum) == 3 + 1 + 0 + 2 + 2


def test_slots_without_weight_do_not_reach_the_head() -> None:
    seen = []

    def head(states: torch.Tensor) -> torch.Tensor:
        seen.append(states.shape[0])
        return states

    weights = torch.tensor([[[0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]])
    states = torch.randn(1, 2, SIZE, VOCAB, requires_grad=True)
    weighted_cross_entropy(states, blocks_of(weights, torch.zeros(1, 2, SIZE, dtype=torch.long)), head).loss_sum.backward()
    assert seen == [2]
    assert states.grad is not None
    assert (states.grad.abs().sum(-1) > 0).tolist() == [[[False, True, True, False], [False] * 4]]
