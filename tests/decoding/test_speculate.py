"""The decoding loop: lossless for any proposer, whole blocks for a perfect one, caches that never remember too much."""

from typing import Any

import pytest
import torch

from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.drafts import DraftCache
from dflash_core.decoding.speculate import accept, decode, offered
from dflash_core.decoding.summary import acceptance_length
from dflash_core.modeling.target import TargetEnds
from tests.decoding.texts import LAYERS, NEVER, EachRow, Oracle, alone, one, prompt_of
from tests.fakes import make_drafter

# ---- accept ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "verified", "room", "stop_ids", "new"),
    [
        ([1, 2, 3], [1, 2, 3, 9], 99, (), [1, 2, 3, 9]),  # all right, and the bonus token
        ([1, 2, 3], [1, 2, 7, 9], 99, (), [1, 2, 7]),
        ([1, 2, 3], [7, 2, 3, 9], 99, (), [7]),
        ([1, 2, 3], [1, 7, 3, 9], 99, (), [1, 7]),  # right again after a wrong one: worth nothing
        ([1, 2, 3], [1, 2, 3, 9], 99, (2,), [1, 2]),  # a stop token inside the block
        ([1, 2, 3], [1, 5, 3, 9], 99, (5,), [1, 5]),  # a stop token in place of a wrong one
        ([1, 2, 3], [1, 2, 3, 9], 99, (9,), [1, 2, 3, 9]),
        ([1, 2, 3], [1, 2, 3, 9], 99, (1,), [1]),
        ([1, 2, 3], [1, 2, 3, 9], 3, (), [1, 2, 3]),  # room ends before the bonus token
        ([1, 2, 3], [1, 2, 3, 9], 1, (), [1]),
        ([1, 2, 3], [7, 2, 3, 9], 1, (), [7]),
        ([], [7], 99, (), [7]),
    ],
)
def test_accept(draft: list[int], verified: list[int], room: int, stop_ids: tuple[int, ...], new: list[int]) -> None:
    assert accept(draft, verified, room=room, stop_ids=frozenset(stop_ids)) == new


@pytest.mark.parametrize(
    ("draft", "new", "ended", "count"),
    [
        ([1, 2, 3], [1, 2, 3, 9], False, 3),
        ([1, 2, 3], [7], False, 3),
        ([1, 2, 3], [1, 2], True, 1),  # the last token equals its draft: the target's own all the same
        ([1, 2, 3], [1, 7], True, 2),  # the second draft was judged, and wrong
        ([1, 2, 3], [1, 2, 3, 9], True, 3),
        ([1], [1], True, 0),
        ([], [9], True, 0),
    ],
)
def test_offered(draft: list[int], new: list[int], ended: bool, count: int) -> None:
    assert offered(draft, new, ended=ended) == count


# ---- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_drafts_leave_the_targets_own_text(target: DecodingTarget, seed: int) -> None:
    prompt = prompt_of(seed, length=1 + 3 * seed)
    text = alone(target, prompt)
    oracle = Oracle([[*prompt, *text]], 1 + seed, wrong=0.3, seed=seed)
    generation = one(target, oracle, prompt, max_new_tokens=40)
    assert generation.tokens == text
    assert 1 + sum(generation.accepted) + len(generation.accepted) == 40
    with torch.no_grad():
        whole = target.model(torch.tensor([[*prompt, *text]]), output_hidden_states=True).hidden_states
    expected = torch.cat([whole[layer + 1] for layer in LAYERS], dim=-1)
    seen = torch.cat(oracle.hidden[0]).unsqueeze(0)
    torch.testing.assert_close(seen, expected[:, : seen.shape[1]], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("stop_place", [0, 1, 5, 6, 7, 12])
def test_a_stop_token_ends_the_text(target: DecodingTarget, stop_place: int) -> None:
    prompt = prompt_of(3)
    text = alone(target, prompt)
    stop = text[stop_place]
    stop_ids = frozenset({stop})
    expected = text[: text.index(stop) + 1]
    assert alone(target, prompt, stop_ids=stop_ids) == expected
    generation = one(target, Oracle([[*prompt, *text]], 7), prompt, max_new_tokens=40, stop_ids=stop_ids)
    assert generation.tokens == expected
    assert 1 + sum(generation.accepted) + len(generation.accepted) == len(expected)
    assert all(a <= d for a, d in zip(generation.accepted, generation.drafted, strict=True))


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 10, 17])
def test_never_more_tokens_than_asked(target: DecodingTarget, limit: int) -> None:
    prompt = prompt_of(4)
    text = alone(target, prompt)
    for wrong in (0.0, 0.4):
        oracle = Oracle([[*prompt, *text]], 7, wrong=wrong)
        assert one(target, oracle, prompt, max_new_tokens=limit).tokens == text[:limit]


def test_a_perfect_proposer_commits_whole_blocks(target: DecodingTarget) -> None:
    prompt = prompt_of(5)
    text = alone(target, prompt)
    generation = one(target, Oracle([[*prompt, *text]], 7), prompt, max_new_tokens=40)
    assert generation.accepted == (7, 7, 7, 7, 6)  # 1 of the prompt's pass + 4 x 8 + 7
    assert generation.drafted == (7, 7, 7, 7, 6)


@pytest.mark.parametrize("block_size", [2, 8])
def test_a_random_drafter_is_lossless_and_worth_nothing(target: DecodingTarget, model: Any, block_size: int) -> None:
    draft = DraftCache(make_drafter(block_size=block_size), TargetEnds(model))
    rounds = tokens = 0
    for seed in range(4):
        prompt = prompt_of(seed)
        generation = one(target, draft, prompt, max_new_tokens=20)
        assert generation.tokens == alone(target, prompt, 20)
        rounds += len(generation.accepted)
        tokens += sum(generation.accepted) + len(generation.accepted)
    assert 1.0 <= tokens / rounds < 1.2


# ---- caches ----------------------------------------------------------------------------------------------------------


def test_the_cache_after_a_rejection_equals_a_fresh_one(target: DecodingTarget) -> None:
    prompt, block, rest = prompt_of(6, 12), prompt_of(7, 8), prompt_of(8, 5)
    for kept in range(1, 9):
        target.start(1)
        target.forward([prompt])
        target.keep([12])
        target.forward([block])
        target.keep([kept])
        logits, hidden = target.forward([rest])
        target.start(1)
        fresh_logits, fresh_hidden = target.forward([[*prompt, *block[:kept], *rest]])
        torch.testing.assert_close(logits, fresh_logits[:, -5:], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(hidden, fresh_hidden[:, -5:], atol=2e-4, rtol=1e-4)


def test_requests_that_keep_different_numbers_do_not_disturb_each_other(target: DecodingTarget) -> None:
    """Prompts of 12, 3 and 7 tokens, of whose blocks 2, 8 and 1 tokens are kept; then the second request leaves."""
    prompts = [prompt_of(1, 12), prompt_of(2, 3), prompt_of(3, 7)]
    blocks, rests = [prompt_of(seed, 8) for seed in (4, 5, 6)], [prompt_of(7, 5), prompt_of(8, 4)]
    target.start(3)
    target.forward(prompts)
    target.keep([12, 3, 7])
    target.forward(blocks)
    target.keep([2, 8, 1])
    target.select([0, 2])
    logits, hidden = target.forward(rests)
    for row, (prompt, block, kept, rest) in enumerate(
        [(prompts[0], blocks[0], 2, rests[0]), (prompts[2], blocks[2], 1, rests[1])]
    ):
        target.start(1)
        fresh_logits, fresh_hidden = target.forward([[*prompt, *block[:kept], *rest]])
        torch.testing.assert_close(logits[row, : len(rest)], fresh_logits[0, -len(rest) :], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(hidden[row, : len(rest)], fresh_hidden[0, -len(rest) :], atol=2e-4, rtol=1e-4)


def test_a_prompt_leaves_nothing_to_the_next(target: DecodingTarget, model: Any) -> None:
    draft = DraftCache(make_drafter(), TargetEnds(model))
    first = one(target, draft, prompt_of(1), max_new_tokens=12)
    one(target, draft, prompt_of(2, 30), max_new_tokens=12)
    again = one(target, draft, prompt_of(1), max_new_tokens=12)
    assert (again.tokens, again.accepted) == (first.tokens, first.accepted)


def test_margins_are_the_distance_of_the_two_best_logits(target: DecodingTarget) -> None:
    prompt = prompt_of(9)
    generation = one(target, None, prompt, max_new_tokens=6)
    with torch.no_grad():
        logits = target.model(torch.tensor([[*prompt, *generation.tokens]])).logits[0, len(prompt) - 1 : -1]
    best = logits.sort(-1, descending=True).values
    assert generation.margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-3)
    assert logits.argmax(-1).tolist() == list(generation.tokens)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_the_target_alone_equals_transformers(target: DecodingTarget, model: Any) -> None:
    prompts = [prompt_of(seed, 3 + 4 * seed) for seed in range(4)]
    texts = decode(target, prompts, limits=[20] * 4, stop_ids=NEVER)
    for prompt, text in zip(prompts, texts, strict=True):
        own = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert own[0, len(prompt) :].tolist() == list(text.tokens)
        assert (text.accepted, text.drafted, text.draft_seconds) == ((), (), 0.0)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_a_batch_is_its_requests_one_by_one(target: DecodingTarget, wrong: float) -> None:
    """Lengths, limits and ends differ; who has ended leaves, and the others do not notice."""
    prompts, limits = [prompt_of(seed, 2 + 5 * seed) for seed in range(5)], [40, 1, 17, 40, 9]
    texts = [alone(target, prompt, 40) for prompt in prompts]
    stop_ids = frozenset({texts[3][11]})
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    singles = [
        one(target, Oracle([whole], 7, wrong=wrong), prompt, max_new_tokens=limit, stop_ids=stop_ids)
        for whole, prompt, limit in zip(known, prompts, limits, strict=True)
    ]
    batch = decode(target, prompts, limits=limits, stop_ids=stop_ids, proposer=Oracle(known, 7, wrong=wrong))
    assert [each.tokens for each in batch] == [each.tokens for each in singles]
    assert batch[3].tokens == texts[3][: texts[3].index(texts[3][11]) + 1]
    if wrong in (0.0, 1.0):
        assert [(each.accepted, each.drafted) for each in batch] == [(each.accepted, each.drafted) for each in singles]
    assert all(each.seconds > each.draft_seconds > 0 for each in batch)


def test_drafts_of_a_batch_are_those_of_its_requests(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    """The drafter's contexts are of different length, grow at different pace, and rows are taken out."""
    _, _, drafter = overfitted
    draft = DraftCache(drafter, TargetEnds(model))
    prompts = [prompt_of(5), prompt_of(11, 30), prompt_of(12, 2), prompt_of(13)]
    limits = [40, 12, 30, 21]
    singles = [one(target, draft, prompt, max_new_tokens=limit) for prompt, limit in zip(prompts, limits, strict=True)]
    batch = decode(target, prompts, limits=limits, stop_ids=NEVER, proposer=draft)
    assert [(each.tokens, each.accepted, each.drafted) for each in batch] == [
        (each.tokens, each.accepted, each.drafted) for each in singles
    ]
    assert sum(batch[0].accepted) > 20


def test_a_drafter_of_all_variants_commits_a_token_more_than_its_slots(
    target: DecodingTarget, model: Any, overfitted_variant: Any
) -> None:
    """7 slots, 7 drafts and the bonus token; texts stay the target's own, in a batch whose contexts differ, too."""
    prompt, text, drafter = overfitted_variant
    draft = DraftCache(drafter, TargetEnds(model))
    known = one(target, draft, prompt, max_new_tokens=1 + 6 * 8)
    assert known.tokens == text[:49]
    assert (known.accepted, known.drafted) == ((7,) * 6, (7,) * 6)
    prompts, limits = [prompt, prompt_of(11, 30), prompt_of(12, 2)], [40, 12, 30]
    singles = [one(target, draft, each, max_new_tokens=limit) for each, limit in zip(prompts, limits, strict=True)]
    assert [each.tokens for each in singles] == [alone(target, each, limit) for each, limit in zip(prompts, limits, strict=True)]
    batch = decode(target, prompts, limits=limits, stop_ids=NEVER, proposer=draft)
    assert [(each.tokens, each.accepted, each.drafted) for each in batch] == [
        (each.tokens, each.accepted, each.drafted) for each in singles
    ]
    shorter = one(target, DraftCache(drafter, TargetEnds(model), block_size=3), prompt, max_new_tokens=1 + 4 * 4)
    assert set(shorter.drafted) == {3}
    assert shorter.tokens == text[:17]


# ---- the length's definition -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_a_perfect_drafter_commits_block_size_tokens_and_a_wrong_one_exactly_one(target: DecodingTarget, block_size: int) -> None:
    prompt = prompt_of(5)
    text = alone(target, prompt, 40)
    perfect = one(target, Oracle([[*prompt, *text]], block_size - 1), prompt, max_new_tokens=1 + 4 * block_size)
    assert acceptance_length([perfect]) == block_size
    assert perfect.accepted == (block_size - 1,) * 4
    always_wrong = one(target, Oracle([[*prompt, *text]], block_size - 1, wrong=1.0), prompt, max_new_tokens=12)
    assert always_wrong.tokens == text[:12]
    assert acceptance_length([always_wrong]) == 1.0


def test_what_is_right_behind_a_wrong_draft_is_not_accepted(target: DecodingTarget) -> None:
    """The pattern right, wrong, right, right: one is accepted."""
    prompt = prompt_of(5)
    text = alone(target, prompt, 20)
    whole = [*prompt, *text]

    def pattern(committed: Any) -> list[int]:
        right = whole[len(committed) : len(committed) + 4]
        return [4 + (token - 3) % 296 if place == 1 else token for place, token in enumerate(right)]

    generation = one(target, EachRow(pattern), prompt, max_new_tokens=20)
    assert generation.accepted[:-1] == (1,) * 9
    assert generation.tokens == text


# ---- what a drafter or target cannot do ------------------------------------------------------------------------------


def test_a_text_beyond_the_drafters_positions_is_decoded_without_drafts(target: DecodingTarget, model: Any) -> None:
    draft = DraftCache(make_drafter(max_positions=24), TargetEnds(model))
    prompt = prompt_of(2, 15)
    generation = one(target, draft, prompt, max_new_tokens=20)
    assert generation.tokens == alone(target, prompt, 20)
    assert generation.undrafted > 5
    assert generation.undrafted + sum(generation.accepted) + len(generation.accepted) == 19
    long = one(target, draft, prompt_of(2, 40), max_new_tokens=5)
    assert (long.accepted, long.undrafted) == ((), 4)


def test_fewer_drafts_than_trained(target: DecodingTarget, model: Any) -> None:
    draft = DraftCache(make_drafter(block_size=8), TargetEnds(model), block_size=3)
    generation = one(target, draft, prompt_of(1), max_new_tokens=20)
    assert generation.tokens == alone(target, prompt_of(1), 20)
    assert max(generation.drafted) == 2
    with pytest.raises(ValueError, match=r"evaluation\.block_size 9: the drafter was trained with 8"):
        DraftCache(make_drafter(block_size=8), TargetEnds(model), block_size=9)


def test_a_target_whose_state_cannot_be_taken_back_is_refused_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    monkeypatch.setattr(model.config, "layer_types", kinds)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has layers of kind linear_attention"):
        DecodingTarget(model, LAYERS, device="cpu")
    monkeypatch.setattr(model.config, "layer_types", ["sliding_attention", "full_attention"] * 2)
    with pytest.raises(ValueError, match="sliding windows, which gaps would shift; set it to 1"):
        DecodingTarget(model, LAYERS, device="cpu").start(2)
