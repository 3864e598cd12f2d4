"""Replaying a known text: the same rounds as decoding it, for any proposer and for the drafter's masked passes."""

from typing import Any

import pytest
import torch

from dflash_core.decoding import replay as replay_module
from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.drafts import DraftCache
from dflash_core.decoding.ngram import NgramDraft
from dflash_core.decoding.replay import draft_everywhere, replay, replay_drafter, simulate
from dflash_core.modeling.target import TargetEnds
from dflash_core.records import Generation
from tests.decoding.texts import EachRow, Oracle, alone, one, prompt_of


def same_acceptance(replayed: Generation, real: Generation) -> None:
    assert replayed.tokens == real.tokens
    assert replayed.accepted == real.accepted
    assert replayed.drafted == real.drafted


def test_replay_of_an_ngram_drafter_equals_decoding(target: DecodingTarget) -> None:
    texts = {seed: alone(target, prompt_of(seed), 30) for seed in range(6)}
    rows = []
    for seed in (0, 1, 2):  # fitted on half of the texts
        ids = torch.tensor([*prompt_of(seed), *texts[seed]]).numpy()
        mask = torch.tensor([0] * 9 + [1] * 30).numpy()
        rows.append((ids, mask))
    ngram = NgramDraft(rows, order=3, draft_tokens=5)
    accepted = 0
    for seed, text in texts.items():
        prompt = prompt_of(seed)
        real = one(target, EachRow(ngram.propose), prompt, max_new_tokens=30)
        same_acceptance(replay(ngram.propose, prompt, text, draft_tokens=5), real)
        accepted += sum(real.accepted)
    assert accepted > 30


def test_replay_ends_at_the_stop_token_like_decoding(target: DecodingTarget) -> None:
    prompt = prompt_of(3)
    text = alone(target, prompt)
    whole = [*prompt, *text]
    for place in range(1, 12):
        stop_ids = frozenset({text[place]})
        cut = text[: text.index(text[place]) + 1]
        oracle = Oracle([[*prompt, *text]], 7)
        real = one(target, oracle, prompt, max_new_tokens=40, stop_ids=stop_ids)
        same_acceptance(replay(lambda seen: whole[len(seen) : len(seen) + 7], prompt, cut, draft_tokens=7), real)


def test_replay_on_the_true_hidden_states_equals_decoding(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    _, _, drafter = overfitted
    draft = DraftCache(drafter, TargetEnds(model))
    total = 0
    for seed in (5, 11, 12, 13):
        prompt = prompt_of(seed)
        text = alone(target, prompt, 30)
        real = one(target, draft, prompt, max_new_tokens=30)
        target.start(1)
        _, hidden = target.forward([[*prompt, *text]])
        same_acceptance(replay_drafter(drafter, TargetEnds(model), prompt, text, hidden, block_size=8), real)
        total += sum(real.accepted)
    assert total >= 25


def test_drafts_after_every_token_equal_drafts_one_by_one(
    target: DecodingTarget, model: Any, overfitted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoding loop's own cache, fed up to each anchor, drafts what the masked passes draft; passes may be of any size."""
    _, _, drafter = overfitted
    prompt = prompt_of(21)
    text = [*prompt, *alone(target, prompt, 20)]
    target.start(1)
    _, hidden = target.forward([text])
    for states in (hidden, torch.zeros_like(hidden)):
        single = []
        for anchor in range(4, len(text)):
            cache = DraftCache(drafter, TargetEnds(model))
            cache.start(1)
            cache.extend(states, [anchor])
            single += cache.propose([text[: anchor + 1]])
        for at_once in (64, 7):
            monkeypatch.setattr(replay_module, "BLOCKS_AT_ONCE", at_once)
            assert draft_everywhere(drafter, TargetEnds(model), text, states, first=4, block_size=8).tolist() == single


def test_a_drafter_of_all_variants_is_replayed_as_it_decodes(target: DecodingTarget, model: Any, overfitted_variant: Any) -> None:
    prompt, text, drafter = overfitted_variant
    ends = TargetEnds(model)
    for seed in (5, 11, 12):
        own = alone(target, prompt_of(seed), 30)
        real = one(target, DraftCache(drafter, ends), prompt_of(seed), max_new_tokens=30)
        target.start(1)
        _, hidden = target.forward([[*prompt_of(seed), *own]])
        same_acceptance(replay_drafter(drafter, ends, prompt_of(seed), own, hidden, block_size=7), real)
    target.start(1)
    _, hidden = target.forward([[*prompt, *text]])
    simulated = simulate(drafter, ends, prompt, text, hidden, block_size=7)
    assert simulated.accepted == simulated.drafted == (7,) * (len(text) - 8) + tuple(range(7, 0, -1))


def test_without_features_the_overfitted_drafter_is_lost(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    """The text cannot be had from the anchor token alone: acceptance comes from the target's hidden states."""
    prompt, text, drafter = overfitted
    nothing = torch.zeros(1, len(prompt) + len(text), 3 * 32)
    blind = replay_drafter(drafter, TargetEnds(model), prompt, text, nothing, block_size=8)
    assert blind.tokens == text
    assert len(blind.accepted) > 20


def test_simulated_rounds_begin_after_every_token(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    """Each is the prefix that the drafter's own block there shares with the text, cut where the text ends."""
    prompt, text, drafter = overfitted
    target.start(1)
    _, hidden = target.forward([[*prompt, *text]])
    simulated = simulate(drafter, TargetEnds(model), prompt, text, hidden, block_size=8)
    assert simulated.accepted == (7,) * (len(text) - 8) + tuple(range(7, 0, -1))  # the drafter knows the text by heart
    assert simulated.drafted == simulated.accepted
    other = alone(target, prompt_of(11), 30)
    target.start(1)
    _, hidden = target.forward([[*prompt_of(11), *other]])
    simulated = simulate(drafter, TargetEnds(model), prompt_of(11), other, hidden, block_size=8)
    real = replay_drafter(drafter, TargetEnds(model), prompt_of(11), other, hidden, block_size=8)
    assert len(simulated.accepted) == 29
    places = [0]
    for count in real.accepted[:-1]:
        places.append(places[-1] + count + 1)
    assert [simulated.accepted[place] for place in places[:-1]] == list(real.accepted[:-1])
