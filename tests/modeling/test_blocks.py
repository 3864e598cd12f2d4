"""No leak: a block's logits depend on its anchor token and on the taps before the anchor, and on nothing else.

Training runs all blocks of a row in one masked pass; decoding runs one block over a context cache. Both must agree.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_core.decoding.drafts import DraftCache
from dflash_core.modeling.anchors import build_blocks
from dflash_core.modeling.attention import Backend
from dflash_core.modeling.blocks import at_labels, block_states
from dflash_core.modeling.drafter import Drafter
from dflash_core.modeling.target import TargetEnds, load_ends
from tests import fakes
from tests.fakes import MASK, VOCAB, make_drafter

LENGTH, SIZE = 16, 4
ANCHORS = [0, 2, 5, 6, 7, 12, 14]  # 5, 6, 7 are closer than a block, 14 reaches over the end
WIDTH = 3 * 32
WINDOW = 6
SLIDING = {"sliding_layers": (0, 1), "sliding_window": WINDOW}
DRAFTERS = {
    "full": make_drafter(),
    "one sliding": make_drafter(**{**SLIDING, "sliding_layers": (0,)}),
    "sliding": make_drafter(**SLIDING),
    "sliding, not causal": make_drafter(**SLIDING, sliding_causal=False),
    "from the anchor": make_drafter(sample_from_anchor=True),
}
Logits = Callable[..., Tensor]


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return DRAFTERS[request.param]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TargetEnds:
    path = fakes.save_target(tmp_path_factory.mktemp("ends"), initializer_range=0.3)
    return load_ends(str(path), dtype="float32", device="cpu", attention="auto")


def random_input(seed: int = 0, rows: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, LENGTH), generator=generator)
    return ids, torch.randn(rows, LENGTH, WIDTH, generator=generator)


@pytest.fixture(params=["dense", "grouped"])
def logits_of(request: pytest.FixtureRequest, ends: TargetEnds, drafter: Drafter) -> Logits:
    """`logits_of(ids, taps, anchors)` by each way to train on the CPU; test_attention.py has the third."""
    return functools.partial(compute_logits, drafter, ends, request.param)


def compute_logits(
    drafter: Drafter,
    ends: TargetEnds,
    backend: Backend,
    ids: Tensor,
    taps: Tensor,
    anchors: list[list[int]],
    valid: Tensor | None = None,
) -> Tensor:
    """Logits [B, N, S, V] of the blocks at `anchors`, as training computes them."""
    positions = torch.tensor(anchors)
    valid = torch.ones_like(positions, dtype=torch.bool) if valid is None else valid
    mask = torch.ones_like(ids)
    blocks = build_blocks(ids, mask, positions, valid, block_size=SIZE, mask_token_id=MASK, gamma=4.0)
    with torch.no_grad():
        return ends.head(block_states(drafter, ends.embed, drafter.context(taps), blocks, backend=backend))


def moved(a: Tensor, b: Tensor) -> list[bool]:
    """For each block, whether its logits differ beyond rounding."""
    return [(x - y).abs().max().item() > 1e-6 for x, y in zip(a[0], b[0], strict=True)]


@pytest.mark.parametrize("place", range(LENGTH))
def test_a_token_reaches_only_the_block_that_it_opens(logits_of: Logits, place: int) -> None:
    ids, taps = random_input()
    before = logits_of(ids, taps, [ANCHORS])
    ids[0, place] = 4 + (int(ids[0, place]) - 3) % (VOCAB - 4)
    after = logits_of(ids, taps, [ANCHORS])
    assert moved(before, after) == [anchor == place for anchor in ANCHORS]


@pytest.mark.parametrize("place", range(LENGTH))
def test_a_tap_reaches_only_blocks_that_open_after_it(logits_of: Logits, drafter: Drafter, place: int) -> None:
    """Where all layers slide, only those within the window: keys of the context come from the taps, not from the layer below."""
    ids, taps = random_input()
    before = logits_of(ids, taps, [ANCHORS])
    taps[0, place] += 10 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))
    after = logits_of(ids, taps, [ANCHORS])
    near = WINDOW if len(drafter.shape.sliding_layers) == 2 else LENGTH + 1
    assert moved(before, after) == [anchor - near < place < anchor for anchor in ANCHORS]


@pytest.mark.parametrize("slot", range(SIZE))
def test_a_slot_reaches_earlier_ones_unless_the_block_is_causal(ends: TargetEnds, drafter: Drafter, slot: int) -> None:
    ids, taps = random_input()
    positions = torch.tensor([[5, 9]])
    valid = torch.ones_like(positions, dtype=torch.bool)
    blocks = build_blocks(ids, torch.ones_like(ids), positions, valid, block_size=SIZE, mask_token_id=MASK, gamma=4.0)
    changed = blocks.block_ids.clone()
    changed[0, 0, slot] = 77
    with torch.no_grad():
        before, after = (
            block_states(drafter, ends.embed, drafter.context(taps), replace(blocks, block_ids=each))
            for each in (blocks.block_ids, changed)
        )
    causal = drafter.shape.sliding_layers == (0, 1) and drafter.shape.sliding_causal
    assert moved(before[:, 0], after[:, 0]) == [not causal or other >= slot for other in range(SIZE)]
    assert torch.equal(before[0, 1], after[0, 1])


def test_other_blocks_and_their_number_change_nothing(logits_of: Logits) -> None:
    ids, taps = random_input()
    together = logits_of(ids, taps, [ANCHORS])
    for j, anchor in enumerate(ANCHORS):
        torch.testing.assert_close(logits_of(ids, taps, [[anchor]])[0, 0], together[0, j], atol=1e-5, rtol=0)
    valid = torch.tensor([[True, False, True, False, True, False, True]])
    some = logits_of(ids, taps, [ANCHORS], valid)
    torch.testing.assert_close(some[0, ::2], together[0, ::2], atol=1e-5, rtol=0)
    assert torch.isfinite(some).all()


def test_context_cut_at_the_anchor_gives_the_same_logits(logits_of: Logits) -> None:
    ids, taps = random_input()
    together = logits_of(ids, taps, [ANCHORS])
    for j, anchor in enumerate(ANCHORS):
        cut = logits_of(ids[:, : anchor + 1], taps[:, : anchor + 1], [[anchor]])
        torch.testing.assert_close(cut[0, 0], together[0, j], atol=1e-5, rtol=0)


def test_decoding_over_a_cache_equals_training(ends: TargetEnds, logits_of: Logits, drafter: Drafter) -> None:
    """The decoding loop's own object, fed piece by piece, gives the logits of the masked training pass."""
    ids, taps = random_input()
    anchors = [anchor for anchor in ANCHORS if anchor > 0]
    together = logits_of(ids, taps, [anchors])
    seen: list[Tensor] = []

    class Recorder(TargetEnds):
        def __init__(self) -> None:
            self.embed = ends.embed
            self.head = torch.nn.Linear(32, VOCAB, bias=False)
            self.head.weight = ends.head.weight
            self.head.register_forward_hook(lambda module, inputs, output: seen.append(output))

    cache = DraftCache(drafter, Recorder())
    for _ in range(2):  # a second prompt starts from nothing
        cache.start(1)
        done = 0
        for j, anchor in enumerate(anchors):
            cache.extend(taps[:, done:anchor], [anchor - done])
            done = anchor
            proposal = cache.propose([ids[0, : anchor + 1].tolist()])
            drafting = together[0, j, drafter.shape.first_slot :]
            torch.testing.assert_close(seen[-1][0], drafting, atol=1e-5, rtol=0)
            assert proposal[0] == drafting.argmax(-1).tolist()


def test_a_batch_over_a_cache_equals_training(ends: TargetEnds, logits_of: Logits, drafter: Drafter) -> None:
    """Contexts of different length in one buffer, each with its own anchor."""
    ids, taps = random_input(rows=3)
    anchors = [4, 13, 9]
    cache = DraftCache(drafter, ends)
    cache.start(3)
    cache.extend(taps, anchors)
    drafts = cache.propose([ids[row, : anchor + 1].tolist() for row, anchor in enumerate(anchors)])
    together = logits_of(ids, taps, [[anchor] for anchor in anchors])
    assert drafts == together[:, 0, drafter.shape.first_slot :].argmax(-1).tolist()


def test_zero_features_equal_training_on_zero_taps(ends: TargetEnds, logits_of: Logits, drafter: Drafter) -> None:
    ids, taps = random_input()
    blind = logits_of(ids, torch.zeros_like(taps), [[9]])
    cache = DraftCache(drafter, ends)
    cache.start(1)
    cache.extend(torch.zeros_like(taps[:, :9]), [9])
    assert cache.propose([ids[0, :10].tolist()])[0] == blind[0, 0, drafter.shape.first_slot :].argmax(-1).tolist()


def test_rows_of_a_batch_do_not_see_each_other(logits_of: Logits) -> None:
    ids, taps = random_input(rows=3)
    anchors = [[1, 5, 6], [2, 9, 13], [3, 4, 14]]
    together = logits_of(ids, taps, anchors)
    for b in range(3):
        alone = logits_of(ids[b : b + 1], taps[b : b + 1], anchors[b : b + 1])
        torch.testing.assert_close(alone[0], together[b], atol=1e-5, rtol=0)


def test_right_padding_with_garbage_changes_nothing(logits_of: Logits, tmp_path: Path) -> None:
    ids, taps = random_input()
    short = logits_of(ids[:, :11], taps[:, :11], [[3, 10]])
    taps[:, 11:] = 1e4
    torch.testing.assert_close(logits_of(ids, taps, [[3, 10]]), short, atol=1e-5, rtol=0)


def test_states_at_labels_are_those_of_the_token_before(ends: TargetEnds) -> None:
    ids, _ = random_input(rows=2)
    mask = torch.ones_like(ids)
    mask[1, 7] = 0
    last = torch.arange(2 * LENGTH, dtype=torch.bfloat16).view(2, LENGTH, 1)
    anchors, valid = torch.tensor([[0, 13], [5, 0]]), torch.tensor([[True, True], [True, False]])
    blocks = build_blocks(ids, mask, anchors, valid, block_size=SIZE, mask_token_id=MASK, gamma=4.0)
    assert at_labels(last, blocks).flatten().tolist() == [0, 1, 2, 13, 14, LENGTH + 5]
    blocks = build_blocks(ids, mask, anchors, valid, block_size=SIZE, mask_token_id=MASK, gamma=4.0, first_slot=0)
    assert at_labels(last, blocks).flatten().tolist() == [0, 1, 2, 3, 13, 14, LENGTH + 5]
