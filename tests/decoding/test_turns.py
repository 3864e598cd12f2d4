"""A conversation as requests and answers: what each request sees, where a conversation ends, what its row says."""

from typing import Any

import pytest

from dflash_core.decoding.turns import Answer, Request, Unanswered, thinks, turns
from dflash_core.records import Conversation

USER, AGAIN = {"role": "user", "content": "Weather?"}, {"role": "user", "content": "And then?"}
SYSTEM = {"role": "system", "content": "Be brief."}
OLD = {"role": "assistant", "content": "old", "loss_mask": 0}


def answer(text: str = "new", **fields: Any) -> Answer:
    return Answer(**{"content": text, "finish_reason": "stop", "tokens": 3, **fields})


def calls(*names: str, prefix: str) -> list[dict[str, Any]]:
    return [
        {"id": f"{prefix}{number}", "type": "function", "function": {"name": name, "arguments": f'{{"from": "{prefix}"}}'}}
        for number, name in enumerate(names)
    ]


def play(messages: list[dict[str, Any]], answers: list[Answer], **fields: Any) -> tuple[list[Request], dict[str, Any]]:
    """Every request, and the finished row; all answers must be used."""
    dialogue = turns(Conversation(id="q", messages=messages, **fields), thinking=None, seed=7)
    requests = [next(dialogue)]
    for number, given in enumerate(answers):
        try:
            requests.append(dialogue.send(given))
        except StopIteration as end:
            assert number == len(answers) - 1, "an answer too many"
            return requests, end.value
    raise AssertionError("an answer too few")


def test_later_turns_see_the_answers_and_never_what_they_replaced() -> None:
    requests, row = play([SYSTEM, USER, OLD, AGAIN, OLD], [answer("one", token_ids=[5, 2]), answer("two")])
    first, second = requests
    assert first.messages == [SYSTEM, USER]
    assert second.messages == [SYSTEM, USER, {"role": "assistant", "content": "one"}, AGAIN]
    assert row == {
        "id": "q",
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "one", "token_ids": [5, 2], "finish_reason": "stop"},
            AGAIN,
            {"role": "assistant", "content": "two", "finish_reason": "stop"},
        ],
        "finish_reason": "stop",
    }


def test_two_assistant_turns_in_a_row_are_both_answered() -> None:
    requests, row = play([USER, OLD, OLD], [answer("one"), answer("two")])
    assert [message["content"] for message in requests[1].messages] == ["Weather?", "one"]
    assert [message["content"] for message in row["messages"]] == ["Weather?", "one", "two"]


@pytest.mark.parametrize("messages", [[USER], [USER, OLD, AGAIN]])
def test_a_conversation_that_ends_with_the_user_gets_an_answer(messages: list[dict[str, Any]]) -> None:
    requests, row = play(messages, [answer()] * (len(messages) // 2 + 1))
    assert requests[-1].messages[-1] == messages[-1]
    assert row["messages"][-1]["content"] == "new"


def test_the_same_calls_keep_the_tool_results_and_name_the_new_calls() -> None:
    old, new = calls("weather", "time", prefix="old"), calls("weather", "time", prefix="new")
    results = [{"role": "tool", "tool_call_id": f"old{number}", "content": f"result {number}"} for number in (1, 0)]
    messages = [USER, {**OLD, "tool_calls": old}, *results, OLD]
    requests, row = play(
        messages, [answer("", finish_reason="tool_calls", tool_calls=new, reasoning="hm"), answer("rain")], tools=[{"type": "x"}]
    )
    sent = requests[1].messages
    assert sent[1] == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": new}
    assert [(message["tool_call_id"], message["content"]) for message in sent[2:]] == [("new1", "result 1"), ("new0", "result 0")]
    assert row["messages"][1]["tool_calls"] == new
    assert row["finish_reason"] == "stop"
    assert row["tools"] == [{"type": "x"}]
    assert "ended" not in row


@pytest.mark.parametrize(
    "old, new",
    [
        (calls("weather", prefix="old"), None),
        (None, calls("weather", prefix="new")),
        (calls("weather", prefix="old"), calls("time", prefix="new")),
        (calls("weather", prefix="old"), calls("weather", "weather", prefix="new")),
    ],
)
def test_other_calls_end_the_conversation_with_what_is_finished(old: Any, new: Any) -> None:
    messages = [USER, {**OLD, "tool_calls": old}, {"role": "tool", "tool_call_id": "old0", "content": "3 C"}, OLD]
    _, row = play(messages, [answer("", tool_calls=new)])
    assert len(row["messages"]) == 2
    assert row["ended"] == "a tool call that differs"


def test_an_answer_cut_by_length_ends_the_conversation_and_marks_the_row() -> None:
    _, row = play([USER, OLD, AGAIN, OLD], [answer("one"), answer("tw", finish_reason="length")])
    assert row["finish_reason"] == row["messages"][-1]["finish_reason"] == "length"
    assert "ended" not in row, "nothing was left out"
    _, row = play([USER, OLD, AGAIN, OLD], [answer("on", finish_reason="length")])
    assert [message["content"] for message in row["messages"]] == ["Weather?", "on"]
    assert row["ended"] == "an answer cut by length"


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([OLD, USER, OLD], "the assistant speaks first"),
        ([SYSTEM, OLD], "the assistant speaks first"),
        ([SYSTEM], "nothing to answer"),
        ([], "no messages"),
    ],
)
def test_what_cannot_be_answered_is_named(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(Unanswered, match=reason):
        play(messages, [])


def test_seeds_differ_by_turn_conversation_and_seed_and_nothing_else() -> None:
    def seeds(name: str, seed: int) -> list[int]:
        dialogue = turns(Conversation(id=name, messages=[USER, OLD, AGAIN, OLD]), thinking=None, seed=seed)
        return [next(dialogue).seed, dialogue.send(answer()).seed]

    every = [*seeds("a", 0), *seeds("b", 0), *seeds("a", 1)]
    assert len(set(every)) == 6
    assert seeds("a", 0) == every[:2]
    assert all(0 <= seed < 2**32 for seed in every)


def test_thinking_is_a_stable_share() -> None:
    conversations = [Conversation(id=f"c{number}", messages=[USER]) for number in range(4000)]
    on = [thinks(conversation, share=0.3, seed=1) for conversation in conversations]
    assert abs(sum(map(bool, on)) / len(on) - 0.3) < 0.03
    more = [thinks(conversation, share=0.5, seed=1) for conversation in conversations]
    assert all(later for earlier, later in zip(on, more, strict=True) if earlier), "a larger share only adds"
    assert on != [thinks(conversation, share=0.3, seed=2) for conversation in conversations]
    assert {thinks(conversation, share=None, seed=1) for conversation in conversations} == {None}
    assert all(thinks(conversation, share=1.0, seed=1) for conversation in conversations)
    assert not any(thinks(conversation, share=0.0, seed=1) for conversation in conversations)
