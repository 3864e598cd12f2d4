"""The parts of the client that need no server; the rest is in test_regenerate.py."""

import time
from email.utils import formatdate
from typing import Any

import pytest

from dflash_core.decoding.endpoints import backoff, read_answer, retry_after

STOP = frozenset({2, 9})


def reply(message: Any = None, **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "Hi"} if message is None else message
    return {"choices": [{"message": message, "finish_reason": "stop", **choice}], "usage": {"completion_tokens": 4}}


def test_waits_double_up_to_the_longest_and_are_spread() -> None:
    assert [backoff(n, first=1, longest=10, draw=0.999_999_9) for n in (1, 2, 3, 4, 5, 5000)] == pytest.approx(
        [1, 2, 4, 8, 10, 10], rel=1e-6
    )
    assert backoff(3, first=1, longest=10, draw=0.0) == 2.0


def test_retry_after_holds_seconds_or_a_date() -> None:
    assert retry_after("2.5") == 2.5
    assert retry_after("-3") == 0
    assert retry_after(None) is None
    assert retry_after("soon") is None
    assert retry_after(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=3)
    assert retry_after(formatdate(time.time() - 100, usegmt=True)) == 0


def test_an_answer_keeps_what_the_server_says() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}]
    answer = read_answer(reply({"content": None, "tool_calls": calls}, finish_reason="tool_calls"), STOP)
    assert (answer.content, answer.tool_calls, answer.finish_reason, answer.tokens) == ("", calls, "tool_calls", 4)
    assert read_answer(reply({"content": "42", "reasoning_content": "6*7"}), STOP).reasoning == "6*7"  # SGLang
    assert read_answer(reply({"content": "42", "reasoning": "6*7"}), STOP).reasoning == "6*7"  # vLLM
    assert read_answer(reply({"content": "42", "tool_calls": []}), STOP).tool_calls is None
    assert read_answer({**reply(token_ids=[7, 2]), "usage": None}, STOP).tokens == 2


@pytest.mark.parametrize(
    "choice, kept",
    [
        ({"token_ids": [7, 8, 2]}, [7, 8, 2]),
        ({"token_ids": [7, 8, 9]}, [7, 8, 9]),
        ({"response_token_ids": [7, 2]}, [7, 2]),
        ({"token_ids": [7, 8]}, None),  # without its stop token it could not be trained as it is
        ({"token_ids": [7, 8], "finish_reason": "length"}, [7, 8]),
        ({"token_ids": []}, None),
        ({"token_ids": None}, None),
        ({"token_ids": [7, "2"]}, None),
        ({"token_ids": [-1, 2]}, None),
        ({}, None),
    ],
)
def test_token_ids_are_kept_if_they_can_be_trained(choice: dict[str, Any], kept: list[int] | None) -> None:
    assert read_answer(reply(**choice), STOP).token_ids == kept


@pytest.mark.parametrize(
    "payload",
    [
        None,
        [],
        {},
        {"choices": []},
        {"choices": [{"finish_reason": "stop"}]},
        {"choices": ["text"]},
        reply("text"),
        reply({"content": 42}),
        reply({"content": "x", "tool_calls": "none"}),
        reply({"content": "lone \ud83d surrogate"}),
        {**reply(), "usage": {"completion_tokens": "many"}},
        reply(finish_reason=None),
        reply(finish_reason="abort"),
        reply(finish_reason="content_filter"),
    ],
)
def test_what_is_no_answer_is_refused(payload: Any) -> None:
    with pytest.raises(ValueError, match=r"no chat completion|finish_reason|no valid Unicode"):
        read_answer(payload, STOP)
