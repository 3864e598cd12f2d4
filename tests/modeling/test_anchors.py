"""Anchors, labels and weights, compared with plain loops over the written rule."""

import math

import numpy as np
import pytest
import torch

from dflash_core.modeling.anchors import build_blocks, decay_weights, draw_blocks, sample_anchors
from dflash_core.records import AnchoredBlocks
from tests.fakes import MASK, make_batch


def draw(mask: list[int], num_anchors: int = 512, *, seed: int = 0, epoch: int = 0, row: int = 0) -> list[int]:
    return sample_anchors(np.array(mask, np.uint8), num_anchors=num_anchors, seed=seed, epoch=epoch, row=row).tolist()


def blocks_of(
    ids: list[int], mask: list[int], anchors: list[int], *, block_size: int, gamma: float = 4.0, first_slot: int = 1
) -> AnchoredBlocks:
    return build_blocks(
        torch.tensor([ids]),
        torch.tensor([mask]),
        torch.tensor([anchors]),
        torch.ones(1, len(anchors), dtype=torch.bool),
        block_size=block_size,
        mask_token_id=MASK,
        gamma=gamma,
        first_slot=first_slot,
    )


@pytest.mark.parametrize(
    ("mask", "anchors"),
    [
        ([0, 0, 1, 1, 1, 0, 1, 1, 0, 1], [2, 3, 6]),  # 4 and 7: next token is not supervised; 9: no next token
        ([1, 1], [0]),
        ([0, 1, 0, 1], []),
        ([0, 0, 0], []),
        ([1], []),
    ],
)
def test_all_candidates_when_more_anchors_are_asked_than_there_are(mask: list[int], anchors: list[int]) -> None:
    assert draw(mask) == anchors


def test_anchor_is_a_supervised_token_before_a_supervised_token() -> None:
    rng = np.random.default_rng(0)
    for trial in range(200):
        mask = (rng.random(rng.integers(1, 50)) < 0.7).astype(np.uint8).tolist()
        candidates = [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]
        wanted = int(rng.integers(1, 20))
        drawn = draw(mask, wanted, row=trial)
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= set(candidates)
        assert len(drawn) == min(wanted, len(candidates))


def test_draw_depends_on_seed_epoch_and_row_alone() -> None:
    mask = [0] * 10 + [1] * 90
    first = draw(mask, 8, seed=1, epoch=2, row=3)
    np.random.seed(5)
    torch.manual_seed(5)
    assert draw(mask, 8, seed=1, epoch=2, row=3) == first
    others = [draw(mask, 8, seed=2, epoch=2, row=3), draw(mask, 8, seed=1, epoch=3, row=3), draw(mask, 8, seed=1, epoch=2, row=4)]
    assert all(other != first for other in others)


def test_draw_is_uniform_over_the_candidates() -> None:
    counts = np.zeros(20)
    for row in range(4000):
        counts[draw([1] * 21, 5, row=row)] += 1
    expected = 4000 * 5 / 20
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < 43.8  # 19 degrees of freedom, 0.1 %


def test_draw_blocks_draws_each_row_as_if_it_were_alone() -> None:
    rows = [([9] * 30, [0] * 5 + [1] * 25), ([8] * 12, [0] * 9 + [1] * 3), ([7] * 6, [0] * 6)]
    together = draw_blocks(make_batch(rows, epoch=1), block_size=4, mask_token_id=MASK, num_anchors=6, gamma=4.0, seed=3)
    assert together.block_valid.tolist() == [[True] * 6, [True] * 2 + [False] * 4, [False] * 6]
    for i, row in enumerate(rows):
        batch = make_batch([row], epoch=1, first_row=i)
        alone = draw_blocks(batch, block_size=4, mask_token_id=MASK, num_anchors=6, gamma=4.0, seed=3)
        count = int(alone.block_valid.sum())
        trained = alone.weights[0, :count] > 0
        for name in ("anchor_positions", "block_valid", "block_ids", "weights"):
            assert torch.equal(getattr(alone, name)[0, :count], getattr(together, name)[i, :count]), name
        assert torch.equal(alone.labels[0, :count][trained], together.labels[i, :count][trained])


def test_padding_blocks_hold_masks_and_weigh_nothing() -> None:
    rows = [([9] * 12, [1] * 12), ([8] * 6, [0] * 6)]
    blocks = draw_blocks(make_batch(rows), block_size=4, mask_token_id=MASK, num_anchors=3, gamma=4.0, seed=0)
    assert not blocks.block_valid[1].any()
    assert (blocks.block_ids[1] == MASK).all()
    assert blocks.weights[1].sum() == 0
    assert (blocks.anchor_positions[1] == 0).all()


def test_decay_golden_values() -> None:
    eight = [0, 1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231]
    sixteen = [
        0,
        1,
        0.8669,
        0.7515,
        0.6514,
        0.5647,
        0.4895,
        0.4244,
        0.3679,
        0.3189,
        0.2765,
        0.2397,
        0.2077,
        0.1801,
        0.1561,
        0.1353,
    ]
    assert decay_weights(8, 4.0).tolist() == pytest.approx(eight, abs=5e-5)
    assert decay_weights(16, 7.0).tolist() == pytest.approx(sixteen, abs=5e-5)


def test_block_of_anchor_five() -> None:
    blocks = blocks_of(list(range(100, 112)), [1] * 12, [5], block_size=4)
    assert blocks.block_ids.tolist() == [[[105, MASK, MASK, MASK]]]
    assert blocks.labels.tolist() == [[[105, 106, 107, 108]]]  # slot k: the token at 5 + k
    assert blocks.weights[0, 0].tolist() == pytest.approx([0, 1, math.exp(-1 / 4), math.exp(-2 / 4)])


def test_block_of_anchor_five_whose_slot_drafts_too() -> None:
    blocks = blocks_of(list(range(100, 112)), [1] * 12, [5], block_size=4, first_slot=0)
    assert blocks.block_ids.tolist() == [[[105, MASK, MASK, MASK]]]
    assert blocks.labels.tolist() == [[[106, 107, 108, 109]]]  # slot k: the token at 5 + k + 1
    assert blocks.weights[0, 0].tolist() == pytest.approx([1, math.exp(-1 / 4), math.exp(-2 / 4), math.exp(-3 / 4)])
    assert decay_weights(7, 4.0, first_slot=0).tolist() == pytest.approx(
        [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231], abs=5e-5
    )


def test_weights_stop_at_a_gap_and_at_the_end_of_the_row() -> None:
    #       0  1  2  3  4  5  6  7  8  9
    mask = [0, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    blocks = blocks_of(list(range(10)), mask, [1, 4, 8], block_size=5)
    trained = (blocks.weights[0] > 0).int().tolist()
    assert trained == [[0, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 1, 0, 0, 0]]
    blocks = blocks_of(list(range(10)), mask, [1, 4, 8], block_size=5, first_slot=0)
    trained = (blocks.weights[0] > 0).int().tolist()
    assert trained == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]  # by the mask of the label, not of the slot


@pytest.mark.parametrize("first", [1, 0])
def test_labels_and_weights_equal_a_naive_loop(first: int) -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        length, size, gamma = int(rng.integers(2, 30)), int(rng.integers(2, 9)), float(rng.uniform(1, 8))
        ids = rng.integers(4, 99, length).tolist()
        mask = (rng.random(length) < 0.8).astype(int).tolist()
        anchors = draw(mask)
        if not anchors:
            continue
        blocks = blocks_of(ids, mask, anchors, block_size=size, gamma=gamma, first_slot=first)
        for j, anchor in enumerate(anchors):
            alive = True
            for k in range(size):
                place = anchor + k + (first == 0)
                alive = alive and place < length and mask[place] == 1
                expected = math.exp(-(k - first) / gamma) if alive and k >= first else 0.0
                assert float(blocks.weights[0, j, k]) == pytest.approx(expected, rel=1e-6)
                if alive:
                    assert int(blocks.labels[0, j, k]) == ids[place]
