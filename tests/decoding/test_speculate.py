"""The decoding loop: lossless for any proposer, whole blocks for a perfect one, caches that never remember too much."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.decoding.ngram import NgramDraft
from dflash_core.decoding.speculate import DecodingTarget, DraftCache, accept, greedy, offered, replay, speculate
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, TargetEnds, load_model
from dflash_core.records import Generation
from dflash_core.training.trainer import Trainer
from tests.fakes import VOCAB, make_batch, make_config, make_drafter, make_shape, save_target

NEVER: frozenset[int] = frozenset()
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with so large weights that its greedy text varies."""
    return save_target(tmp_path_factory.mktemp("varied"), initializer_range=0.3, seed=2)


@pytest.fixture(scope="module")
def model(target_path: Path) -> Any:
    return load_model(str(target_path), dtype="float32", device="cpu", attention="auto")


@pytest.fixture(scope="module")
def target(model: Any) -> DecodingTarget:
    return DecodingTarget(model, LAYERS, device="cpu")


def prompt_of(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, VOCAB) for _ in range(length)]


def alone(target: DecodingTarget, prompt: Sequence[int], count: int = 40, stop_ids: frozenset[int] = NEVER) -> tuple[int, ...]:
    return greedy(target, prompt, max_new_tokens=count, stop_ids=stop_ids)[0].tokens


class Oracle:
    """Drafts the given continuation, each draft token wrong with probability `wrong`."""

    def __init__(self, text: Sequence[int], drafts: int, *, wrong: float = 0.0, seed: int = 0) -> None:
        self.text, self.drafts, self.wrong = list(text), drafts, wrong
        self.seed = seed
        self.hidden: list[Tensor] = []
        self.start()

    def start(self) -> None:
        self.rng = random.Random(self.seed)
        self.hidden = []

    def extend(self, target_hidden: Tensor) -> None:
        self.hidden.append(target_hidden)

    def propose(self, committed: Sequence[int]) -> list[int]:
        assert list(committed) == self.text[: len(committed)]
        assert sum(part.shape[1] for part in self.hidden) == len(committed) - 1, "all hidden states before the anchor, no other"
        place = len(committed)
        right = (self.text[place : place + self.drafts] + [4] * self.drafts)[: self.drafts]
        return [4 + (token - 3) % (VOCAB - 4) if self.rng.random() < self.wrong else token for token in right]


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
    oracle = Oracle([*prompt, *text], 1 + seed, wrong=0.3, seed=seed)
    generation = speculate(target, oracle, prompt, max_new_tokens=40, stop_ids=NEVER)
    assert generation.tokens == text
    assert 1 + sum(generation.accepted) + len(generation.accepted) == 40
    with torch.no_grad():
        whole = target.model(torch.tensor([[*prompt, *text]]), output_hidden_states=True).hidden_states
    expected = torch.cat([whole[layer + 1] for layer in LAYERS], dim=-1)
    seen = torch.cat(oracle.hidden, dim=1)
    torch.testing.assert_close(seen, expected[:, : seen.shape[1]], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("stop_place", [0, 1, 5, 6, 7, 12])
def test_a_stop_token_ends_the_text(target: DecodingTarget, stop_place: int) -> None:
    prompt = prompt_of(3)
    text = alone(target, prompt)
    stop = text[stop_place]
    stop_ids = frozenset({stop})
    expected = text[: text.index(stop) + 1]
    assert alone(target, prompt, stop_ids=stop_ids) == expected
    generation = speculate(target, Oracle([*prompt, *text], 7), prompt, max_new_tokens=40, stop_ids=stop_ids)
    assert generation.tokens == expected
    assert 1 + sum(generation.accepted) + len(generation.accepted) == len(expected)
    assert all(a <= d for a, d in zip(generation.accepted, generation.drafted, strict=True))


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 10, 17])
def test_never_more_tokens_than_asked(target: DecodingTarget, limit: int) -> None:
    prompt = prompt_of(4)
    text = alone(target, prompt)
    for wrong in (0.0, 0.4):
        oracle = Oracle([*prompt, *text], 7, wrong=wrong)
        assert speculate(target, oracle, prompt, max_new_tokens=limit, stop_ids=NEVER).tokens == text[:limit]


def test_a_perfect_proposer_commits_whole_blocks(target: DecodingTarget) -> None:
    prompt = prompt_of(5)
    text = alone(target, prompt)
    generation = speculate(target, Oracle([*prompt, *text], 7), prompt, max_new_tokens=40, stop_ids=NEVER)
    assert generation.accepted == (7, 7, 7, 7, 6)  # 1 of the prompt's pass + 4 x 8 + 7
    assert generation.drafted == (7, 7, 7, 7, 6)


@pytest.mark.parametrize("block_size", [2, 8])
def test_a_random_drafter_is_lossless_and_worth_nothing(target: DecodingTarget, model: Any, block_size: int) -> None:
    draft = DraftCache(make_drafter(block_size=block_size), TargetEnds(model))
    rounds = tokens = 0
    for seed in range(4):
        prompt = prompt_of(seed)
        generation = speculate(target, draft, prompt, max_new_tokens=20, stop_ids=NEVER)
        assert generation.tokens == alone(target, prompt, 20)
        rounds += len(generation.accepted)
        tokens += sum(generation.accepted) + len(generation.accepted)
    assert 1.0 <= tokens / rounds < 1.2


# ---- caches ----------------------------------------------------------------------------------------------------------


def test_the_cache_after_a_rejection_equals_a_fresh_one(target: DecodingTarget) -> None:
    prompt, block, rest = prompt_of(6, 12), prompt_of(7, 8), prompt_of(8, 5)
    for kept in range(1, 9):
        target.start()
        target.forward(prompt)
        target.forward(block)
        target.forget(8 - kept)
        logits, hidden = target.forward(rest)
        target.start()
        fresh_logits, fresh_hidden = target.forward([*prompt, *block[:kept], *rest])
        torch.testing.assert_close(logits, fresh_logits[-5:], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(hidden, fresh_hidden[:, -5:], atol=2e-4, rtol=1e-4)


def test_a_prompt_leaves_nothing_to_the_next(target: DecodingTarget, model: Any) -> None:
    draft = DraftCache(make_drafter(), TargetEnds(model))
    first = speculate(target, draft, prompt_of(1), max_new_tokens=12, stop_ids=NEVER)
    speculate(target, draft, prompt_of(2, 30), max_new_tokens=12, stop_ids=NEVER)
    again = speculate(target, draft, prompt_of(1), max_new_tokens=12, stop_ids=NEVER)
    assert (again.tokens, again.accepted) == (first.tokens, first.accepted)


def test_margins_are_the_distance_of_the_two_best_logits(target: DecodingTarget) -> None:
    prompt = prompt_of(9)
    generation, margins = greedy(target, prompt, max_new_tokens=6, stop_ids=NEVER)
    with torch.no_grad():
        logits = target.model(torch.tensor([[*prompt, *generation.tokens]])).logits[0, len(prompt) - 1 : -1]
    best = logits.sort(-1, descending=True).values
    assert margins == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-3)
    assert logits.argmax(-1).tolist() == list(generation.tokens)


# ---- replay ----------------------------------------------------------------------------------------------------------


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
        real = speculate(target, ngram, prompt, max_new_tokens=30, stop_ids=NEVER)
        nothing = torch.zeros(1, len(prompt) + len(text), 3 * 32)
        same_acceptance(replay(ngram, prompt, text, nothing, 6), real)
        accepted += sum(real.accepted)
    assert accepted > 30


def test_replay_ends_at_the_stop_token_like_decoding(target: DecodingTarget) -> None:
    prompt = prompt_of(3)
    text = alone(target, prompt)
    for place in range(1, 12):
        stop_ids = frozenset({text[place]})
        cut = text[: text.index(text[place]) + 1]
        oracle = Oracle([*prompt, *text], 7)
        real = speculate(target, oracle, prompt, max_new_tokens=40, stop_ids=stop_ids)
        same_acceptance(replay(oracle, prompt, cut, torch.zeros(1, 60, 3 * 32), 8), real)


# ---- overfitting one sequence ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overfitted(target_path: Path, target: DecodingTarget, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A drafter of block size 8 trained on one text of the target's own, through taps and trainer as in a run."""
    root = tmp_path_factory.mktemp("overfit")
    prompt = prompt_of(5)
    text = alone(target, prompt, 56)
    assert len(set(text)) > 20  # no loop of few tokens
    steps = 260
    training = {"learning_rate": 5e-3, "anchors_per_row": 64, "anchors_per_batch": 64, "loss_decay_gamma": 50.0}
    config = make_config(root, target_path, training=training)
    model = load_model(str(target_path), dtype="float32", device="cpu", attention="auto")
    trainer = Trainer(new_drafter(make_shape(block_size=8), 0), TargetEnds(model), config, total_steps=steps, device="cpu")
    replica = TapReplica(str(target_path), layer_ids=LAYERS, dtype="float32", device="cpu", attention="auto")
    for number in range(steps):
        batch = make_batch([([*prompt, *text], [0] * len(prompt) + [1] * len(text))], number=number)
        metrics = trainer.train(replica.tap(batch))
        assert metrics is not None
    assert metrics.correct == metrics.counted
    return prompt, text, trainer.drafter.eval()


def test_an_overfitted_drafter_commits_whole_blocks(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    prompt, text, drafter = overfitted
    draft = DraftCache(drafter, TargetEnds(model))
    generation = speculate(target, draft, prompt, max_new_tokens=56, stop_ids=NEVER)
    assert generation.tokens == text
    assert generation.accepted == (7, 7, 7, 7, 7, 7, 6)  # 1 + 6 x 8 + 7
    stopped = speculate(target, draft, prompt, max_new_tokens=56, stop_ids=frozenset({text[-1]}))
    assert stopped.tokens == text[: text.index(text[-1]) + 1]
    assert all(count == 7 for count in stopped.accepted[:-1])


def test_replay_on_the_true_hidden_states_equals_decoding(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    _, _, drafter = overfitted
    draft = DraftCache(drafter, TargetEnds(model))
    total = 0
    for seed in (5, 11, 12, 13):
        prompt = prompt_of(seed)
        text = alone(target, prompt, 30)
        real = speculate(target, draft, prompt, max_new_tokens=30, stop_ids=NEVER)
        target.start()
        _, hidden = target.forward([*prompt, *text])
        same_acceptance(replay(draft, prompt, text, hidden, 8), real)
        total += sum(real.accepted)
    assert total >= 25


def test_without_features_the_overfitted_drafter_is_lost(target: DecodingTarget, model: Any, overfitted: Any) -> None:
    """The text cannot be had from the anchor token alone: acceptance comes from the target's hidden states."""
    prompt, text, drafter = overfitted
    blind = speculate(
        target, DraftCache(drafter, TargetEnds(model), zero_features=True), prompt, max_new_tokens=56, stop_ids=NEVER
    )
    assert blind.tokens == text
    assert len(blind.accepted) > 20
