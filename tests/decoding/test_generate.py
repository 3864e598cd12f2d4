"""Answers in process: equal to transformers' own, one request at a time, whatever else is in the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_core.decoding.generate import Draw, LocalTarget
from dflash_core.decoding.turns import Answer, Request, Unanswered
from tests import fakes

STOPS = list(range(2, fakes.VOCAB, 9))  # a random target never says <|im_end|>


@pytest.fixture(scope="module")
def stopping_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that stops after a few tokens: many of its tokens are stop tokens."""
    return fakes.save_target(
        tmp_path_factory.mktemp("stopping"), eos_token_id=STOPS, max_position_embeddings=160, tie_word_embeddings=False
    )


def local(tmp_path: Path, target: Path, **settings: Any) -> LocalTarget:
    return LocalTarget(fakes.make_config(tmp_path, target, regeneration={"max_tokens": 24, **settings}))


def request(text: str, *, seed: int = 0, thinking: bool | None = None) -> Request:
    return Request(messages=[{"role": "user", "content": text}], tools=None, thinking=thinking, seed=seed)


REQUESTS = [request(row["messages"][0]["content"] * (1 + number % 3), seed=number) for number, row in enumerate(fakes.chats(16))]


def never() -> bool:
    return False


def ids(answer: Answer | Unanswered) -> list[int]:
    assert isinstance(answer, Answer)
    assert answer.token_ids is not None
    return answer.token_ids


def test_a_batch_equals_transformers_one_by_one(tmp_path: Path, stopping_target: Path) -> None:
    answers = local(tmp_path, stopping_target, temperature=0).answers(REQUESTS, never)
    tokenizer = AutoTokenizer.from_pretrained(stopping_target)
    model = AutoModelForCausalLM.from_pretrained(stopping_target, dtype=torch.float32).eval()
    for asked, answer in zip(REQUESTS, answers, strict=True):
        text = tokenizer.apply_chat_template(asked.messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=24, do_sample=False, eos_token_id=STOPS, pad_token_id=0)
        alone = out[0, prompt["input_ids"].shape[1] :].tolist()
        assert isinstance(answer, Answer)
        assert answer.token_ids == alone
        stopped = alone[-1] in STOPS
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert answer.content == tokenizer.decode(alone[:-1] if stopped else alone)
        assert answer.tokens == len(alone)
    assert {answer.finish_reason for answer in answers if isinstance(answer, Answer)} == {"stop", "length"}


def test_a_drawn_answer_depends_on_its_seed_and_not_on_its_batch(tmp_path: Path, stopping_target: Path) -> None:
    target = local(tmp_path, stopping_target, top_p=0.95, top_k=50)
    together = [ids(answer) for answer in target.answers(REQUESTS, never)]
    alone = [ids(target.answers([asked], never)[0]) for asked in REQUESTS]
    assert together == alone
    text = REQUESTS[0].messages[0]["content"]
    drawn = [ids(answer) for answer in target.answers([request(text, seed=seed) for seed in range(8)], never)]
    assert len({tuple(row) for row in drawn}) > 4


def test_the_only_token_left_is_the_greedy_one(tmp_path: Path, stopping_target: Path) -> None:
    greedy = local(tmp_path, stopping_target, temperature=0).answers(REQUESTS, never)
    assert local(tmp_path, stopping_target, top_k=1).answers(REQUESTS, never) == greedy
    assert local(tmp_path, stopping_target, temperature=1e-6).answers(REQUESTS, never) == greedy


def test_draws_follow_the_softmax() -> None:
    scores = torch.tensor([[1.0, 0.0, -1.0, float("-inf")]])
    draw = Draw([3], device="cpu")
    drawn = torch.stack([draw(torch.empty(0), scores)[0].argmax() for _ in range(10_000)])
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(shares, scores[0].softmax(-1), atol=0.015, rtol=0)
    assert shares[3] == 0


def test_a_prompt_without_room_and_a_rejected_one_are_named_and_the_others_answered(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = "{%- if messages[0]['content'] == 'no' -%}{{ raise_exception('not this') }}{%- endif -%}" + fakes.CHATML
    target = fakes.save_target(tmp_path_factory.mktemp("picky"), template=template, max_position_embeddings=64)
    answers = local(tmp_path, target, temperature=0).answers([request("no"), request("word " * 200), request("Hi")], never)
    assert str(answers[0]) == "template rejected the row: not this"
    assert str(answers[1]) == "a prompt that fills the target's positions"
    assert len(ids(answers[2])) == 24


def test_the_last_positions_are_used_and_no_more(tmp_path: Path, stopping_target: Path) -> None:
    target = local(tmp_path, stopping_target, temperature=0, max_tokens=1000)
    tokenizer = AutoTokenizer.from_pretrained(stopping_target)
    for asked, answer in zip(REQUESTS, target.answers(REQUESTS, never), strict=True):
        text = tokenizer.apply_chat_template(asked.messages, tokenize=False, add_generation_prompt=True)
        used = len(tokenizer.encode(text, add_special_tokens=False)) + len(ids(answer))
        assert used == 160 if ids(answer)[-1] not in STOPS else used <= 160


def test_thinking_reaches_the_template(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    template = fakes.CHATML + "{%- if enable_thinking is defined -%}{{- 'think' if enable_thinking else 'do not' -}}{%- endif -%}"
    target = local(tmp_path, fakes.save_target(tmp_path_factory.mktemp("thinker"), template=template), temperature=0)
    prompts = [target._prompt(request("Hi", thinking=thinking)) for thinking in (None, True, False)]
    texts = [target._tokenizer.decode(prompt) for prompt in prompts]
    assert texts[0].endswith("assistant\n")
    assert texts[1].endswith("assistant\nthink")
    assert texts[2].endswith("assistant\ndo not")


def test_a_stop_request_ends_a_batch_within_a_token(tmp_path: Path, target_dir: Path) -> None:
    asked = {"count": 0}

    def stopped() -> bool:
        asked["count"] += 1
        return asked["count"] > 3

    answers = local(tmp_path, target_dir, temperature=0, max_tokens=200).answers(REQUESTS, stopped)
    assert max(len(ids(answer)) for answer in answers) <= 6
