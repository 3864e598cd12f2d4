"""No leak: a block's logits depend on its anchor token and on the taps before the anchor, and on nothing else.

Training runs all blocks of a row in one masked pass; decoding runs one block over a context cache. Both must agree.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_core.decoding.speculate import DraftCache
from dflash_core.modeling.anchors import build_blocks
from dflash_core.modeling.target import TargetEnds, load_ends
from dflash_core.training.trainer import block_states
from tests import fakes
from tests.fakes import MASK, VOCAB, make_drafter

LENGTH, SIZE = 16, 4
ANCHORS = [0, 2, 5, 6, 7, 12, 14]  # 5, 6, 7 are closer than a block, 14 reaches over the end
DRAFTER = make_drafter()
WIDTH = 3 * 32


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TargetEnds:
    path = fakes.save_target(tmp_path_factory.mktemp("ends"), initializer_range=0.3)
    return load_ends(str(path), dtype="float32", device="cpu", attention="auto")


def random_input(seed: int = 0, rows: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, LENGTH), generator=generator)
    return ids, torch.randn(rows, LENGTH, WIDTH, generator=generator)


def logits_of(ends: TargetEnds, ids: Tensor, taps: Tensor, anchors: list[list[int]], valid: Tensor | None = None) -> Tensor:
    """Logits [B, N, S, V] of the blocks at `anchors`, as training computes them."""
    positions = torch.tensor(anchors)
    valid = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
    mask = torch.ones_like(ids)
    blocks = build_blocks(ids, mask, positions, valid, block_size=SIZE, mask_token_id=MASK, gamma=4.0)
    with torch.no_grad():
        return ends.head(block_states(DRAFTER, ends, taps, blocks))


def moved(a: Tensor, b: Tensor) -> list[bool]:
    """For each block, whether its logits differ beyond rounding."""
    return [(x - y).abs().max().item() > 1e-6 for x, y in zip(a[0], b[0], strict=True)]


@pytest.mark.parametrize("place", range(LENGTH))
def test_a_token_reaches_only_the_block_that_it_opens(ends: TargetEnds, place: int) -> None:
    ids, taps = random_input()
    before = logits_of(ends, ids, taps, [ANCHORS])
    ids[0, place] = 4 + (int(ids[0, place]) - 3) % (VOCAB - 4)
    after = logits_of(ends, ids, taps, [ANCHORS])
    assert moved(before, after) == [anchor == place for anchor in ANCHORS]


@pytest.mark.parametrize("place", range(LENGTH))
def test_a_tap_reaches_only_blocks_that_open_after_it(ends: TargetEnds, place: int) -> None:
    ids, taps = random_input()
    before = logits_of(ends, ids, taps, [ANCHORS])
    taps[0, place] += 10 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    after = logits_of(ends, ids, taps, [ANCHORS])
    assert moved(before, after) == [anchor > place for anchor in ANCHORS]


def test_other_blocks_and_their_number_change_nothing(ends: TargetEnds) -> None:
    ids, taps = random_input()
    together = logits_of(ends, ids, taps, [ANCHORS])
    for j, anchor in enumerate(ANCHORS):
        torch.testing.assert_close(logits_of(ends, ids, taps, [[anchor]])[0, 0], together[0, j], atol=1e-5, rtol=0)
    valid = torch.tensor([[True, False, True, False, True, False, True]])
    some = logits_of(ends, ids, taps, [ANCHORS], valid)
    torch.testing.assert_close(some[0, ::2], together[0, ::2], atol=1e-5, rtol=0)
    assert torch.isfinite(some).all()


def test_context_cut_at_the_anchor_gives_the_same_logits(ends: TargetEnds) -> None:
    ids, taps = random_input()
    together = logits_of(ends, ids, taps, [ANCHORS])
    for j, anchor in enumerate(ANCHORS):
        cut = logits_of(ends, ids[:, : anchor + 1], taps[:, : anchor + 1], [[anchor]])
        torch.testing.assert_close(cut[0, 0], together[0, j], atol=1e-5, rtol=0)


def test_decoding_over_a_cache_equals_training(ends: TargetEnds) -> None:
    """The decoding loop's own object, fed piece by piece, gives the logits of the masked training pass."""
    ids, taps = random_input()
    anchors = [anchor for anchor in ANCHORS if anchor > 0]
    together = logits_of(ends, ids, taps, [anchors])
    seen: list[Tensor] = []

    class Recorder(TargetEnds):
        def __init__(self) -> None:
            self.embed = ends.embed
            self.head = torch.nn.Linear(32, VOCAB, bias=False)
            self.head.weight = ends.head.weight
            self.head.register_forward_hook(lambda module, inputs, output: seen.append(output))

    cache = DraftCache(DRAFTER, Recorder())
    for _ in range(2):  # a second prompt starts from nothing
        cache.start()
        done = 0
        for j, anchor in enumerate(anchors):
            cache.extend(taps[:, done:anchor])
            done = anchor
            proposal = cache.propose(ids[0, : anchor + 1].tolist())
            torch.testing.assert_close(seen[-1], together[0, j, 1:], atol=1e-5, rtol=0)
            assert proposal == together[0, j, 1:].argmax(-1).tolist()


def test_zero_features_equal_training_on_zero_taps(ends: TargetEnds) -> None:
    ids, taps = random_input()
    blind = logits_of(ends, ids, torch.zeros_like(taps), [[9]])
    cache = DraftCache(DRAFTER, ends, zero_features=True)
    cache.start()
    cache.extend(taps[:, :9])
    assert cache.propose(ids[0, :10].tolist()) == blind[0, 0, 1:].argmax(-1).tolist()


def test_rows_of_a_batch_do_not_see_each_other(ends: TargetEnds) -> None:
    ids, taps = random_input(rows=3)
    anchors = [[1, 5, 6], [2, 9, 13], [3, 4, 14]]
    together = logits_of(ends, ids, taps, anchors)
    for b in range(3):
        alone = logits_of(ends, ids[b : b + 1], taps[b : b + 1], anchors[b : b + 1])
        torch.testing.assert_close(alone[0], together[b], atol=1e-5, rtol=0)


def test_right_padding_with_garbage_changes_nothing(ends: TargetEnds, tmp_path: Path) -> None:
    ids, taps = random_input()
    short = logits_of(ends, ids[:, :11], taps[:, :11], [[3, 10]])
    taps[:, 11:] = 1e4
    torch.testing.assert_close(logits_of(ends, ids, taps, [[3, 10]]), short, atol=1e-5, rtol=0)
