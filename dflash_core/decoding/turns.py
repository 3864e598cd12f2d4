"""One conversation as requests to the target and its answers, in order; who answers is somebody else's matter.

    user "Hi"        given                          Request(messages so far) --> Answer
    assistant "Yo"   replaced by the answer         the next request sees the answers, never what they replaced
    user "Why?"      given

A conversation that ends with the user or a tool gets one answer more. It ends early, with what is finished, where its rest no
longer follows: behind an answer that was cut, or that calls other tools than the turn it replaces.
"""

import hashlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from dflash_core.records import Conversation

CUT = "an answer cut by length"
OTHER_CALLS = "a tool call that differs"
SERVED = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # of a message, what a server is sent
Turns = Generator["Request", "Answer", dict[str, Any]]


class Unanswered(Exception):
    """A conversation that gets no row; the message is the reason it is counted by."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One turn asked of the target."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinking: bool | None  # the template's enable_thinking; None leaves it out
    seed: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target generated for a request."""

    content: str
    finish_reason: str  # stop, length or tool_calls
    tokens: int
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None  # stop token included, unless cut by length


def thinks(conversation: Conversation, *, share: float | None, seed: int) -> bool | None:
    """Whether a conversation is answered with thinking; decided by (seed, id), so that a restart decides the same.

    Without a share it is as the row says.
    """
    return conversation.thinking if share is None else _number(seed, "thinking", conversation.id) / 2**32 < share


def turns(conversation: Conversation, *, thinking: bool | None, seed: int) -> Turns:
    """Yields a Request for every assistant turn, takes its Answer, and returns the finished row.

    The row is {"id", "messages", "tools"?, "chat_template_kwargs"?, "finish_reason", "ended"?}; its assistant messages carry
    `finish_reason`, and `token_ids` where they are known. Raises Unanswered where there is nothing that could be answered.
    """
    given = conversation.messages
    if not given:
        raise Unanswered("no messages: what comes as text or tokens cannot be regenerated")
    if given[-1]["role"] in ("user", "tool"):
        given = [*given, {"role": "assistant"}]
    messages: list[dict[str, Any]] = []
    call_ids: dict[str, str] = {}
    reasons: list[str] = []
    ended = ""
    for place, old in enumerate(given):
        if old["role"] != "assistant":
            linked = call_ids.get(old.get("tool_call_id", ""))
            messages.append({**old, "tool_call_id": linked} if linked else old)
            continue
        if not any(message["role"] == "user" for message in messages):
            raise Unanswered("the assistant speaks first")
        answer = yield Request(
            messages=[{key: message[key] for key in SERVED if key in message} for message in messages],
            tools=conversation.tools,
            thinking=thinking,
            seed=_number(seed, conversation.id, place),
        )
        messages.append(_message(answer))
        reasons.append(answer.finish_reason)
        ended = _end(old, answer) if place < len(given) - 1 else ""
        if ended:
            break
        call_ids |= _call_ids(old, answer)
    if not reasons:
        raise Unanswered("nothing to answer: no user turn")
    return _row(conversation, messages, reasons, thinking=thinking, ended=ended)


def _message(answer: Answer) -> dict[str, Any]:
    optional = {"reasoning_content": answer.reasoning, "tool_calls": answer.tool_calls, "token_ids": answer.token_ids}
    kept = {key: value for key, value in optional.items() if value}
    return {"role": "assistant", "content": answer.content, **kept, "finish_reason": answer.finish_reason}


def _end(old: dict[str, Any], answer: Answer) -> str:
    """Why the rest of the conversation does not follow this answer; "" where it does."""
    if answer.finish_reason == "length":
        return CUT
    return OTHER_CALLS if _called(old.get("tool_calls")) != _called(answer.tool_calls) else ""


def _called(tool_calls: list[dict[str, Any]] | None) -> list[Any]:
    return [call.get("function", {}).get("name") for call in tool_calls or ()]


def _call_ids(old: dict[str, Any], answer: Answer) -> dict[str, str]:
    """Ids of the replaced calls -> those of the answer, so that given tool results name the calls that are there."""
    pairs = zip(old.get("tool_calls") or (), answer.tool_calls or (), strict=True)
    return {was["id"]: now["id"] for was, now in pairs if was.get("id") and now.get("id")}


def _row(
    conversation: Conversation, messages: list[dict[str, Any]], reasons: list[str], *, thinking: bool | None, ended: str
) -> dict[str, Any]:
    optional = {
        "tools": conversation.tools,
        "chat_template_kwargs": None if thinking is None else {"enable_thinking": thinking},
        "ended": ended,
    }
    return {
        "id": conversation.id,
        "messages": messages,
        "finish_reason": "length" if "length" in reasons else reasons[-1],
        **{key: value for key, value in optional.items() if value},
    }


def _number(*parts: Any) -> int:
    """32 bits that depend on nothing but the parts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:4], "big")
