"""The fixture rows with every kind of template: each is kept with every answer supervised and nothing else, or dropped by name."""

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.chat import Chat, Rendered, Unprovable, check_as_served, longest_run, open_chat, token_rows_batch
from dflash_core.records import Conversation
from tests.data.templates import TEMPLATES
from tests.data.test_chat import QWEN, QWEN_STOP, STOP, supervised
from tests.fakes import make_tokenizer

ANSWERED = ("F00", "F01", "F05", "F06", "F07", "F08", "F10", "F13", "F14", "F15", "F16", "F17", "F18", "F19", "F21", "F25", "F32")
FIRST = "the assistant speaks first"
ALTERNATE = "template rejected the row: Conversation roles must alternate user/assistant"
REFUSED: dict[str, dict[str, str]] = {  # beside FEW; all other rows are kept
    "T3 strict": {"F01": ALTERNATE, "F07": ALTERNATE, "F08": ALTERNATE, "F10": ALTERNATE},
    "counting, other prompt": dict.fromkeys(ANSWERED, "the served prompt is no prefix of the render"),
    "unstopped": dict.fromkeys(ANSWERED, "an assistant turn without a stop token"),
}
WITH_CALLS = {"T9 tool mapping", "unstopped", "T3 strict", "counting, other prompt"}  # the others write no tool calls
FEW = {"F05", "F06"}  # no text but the stop token, where the template writes nothing else
MORE = [
    {"id": "F25", "messages": [{"role": "user", "content": "One token."}, {"role": "assistant", "content": "5"}]},
    {
        "id": "F32",
        "messages": [
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "ignore me", "loss_mask": 0},
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": "train me"},
        ],
    },
]


def fixtures() -> list[Conversation]:
    """The rows that reach the template: those with messages and an assistant turn that says something as text."""
    lines = (Path(__file__).parent / "fixtures.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["id"]: row for row in [*map(json.loads, lines), *MORE]}
    return [Conversation(id=name, messages=rows[name]["messages"]) for name in ANSWERED]


def outcomes(chat: Chat) -> list[tuple[Conversation, Rendered | Unprovable]]:
    rows = fixtures()
    return list(zip(rows, token_rows_batch(chat, rows), strict=True))


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_fixture_with_every_kind_of_template(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    chat = open_chat(tokenizer, stop_ids=STOP)
    for conversation, outcome in outcomes(chat):
        reason = REFUSED.get(name, {}).get(conversation.id)
        if conversation.id in ("F07", "F08") and name not in WITH_CALLS:
            reason = "a tool call that the template leaves out"
        if reason is None:
            assert isinstance(outcome, Rendered), (conversation.id, outcome)
            assert_only_the_assistant_speaks(tokenizer, conversation, outcome)
            if outcome.method != "sentinel":
                assert all(check_as_served(chat, conversation, outcome).values())
        else:
            assert str(outcome) == reason, conversation.id


@pytest.mark.parametrize("name", QWEN)
def test_every_fixture_with_real_templates(name: str, qwen: Any) -> None:
    tokenizer = qwen(name)
    chat = open_chat(tokenizer, stop_ids=QWEN_STOP)
    for conversation, outcome in outcomes(chat):
        assert isinstance(outcome, Rendered), (conversation.id, outcome)
        assert_only_the_assistant_speaks(tokenizer, conversation, outcome)
        assert all(check_as_served(chat, conversation, outcome).values())


def assert_only_the_assistant_speaks(tokenizer: Any, conversation: Conversation, rendered: Rendered) -> None:
    """Each run of supervised text ends one wanted assistant turn, in order, and holds nothing that another role said."""
    texts = [text for row in rendered.rows for text in supervised(tokenizer, row)]
    wanted = [m for turn, m in enumerate(conversation.messages) if m["role"] == "assistant" and turn and m.get("loss_mask") != 0]
    assert len(texts) == len(wanted)
    for text, message in zip(texts, wanted, strict=True):
        assert text.count("<|im_end|>") == 1
        answer = unicodedata.normalize("NFC", text.removesuffix("<|im_end|>")).strip()
        content = message.get("content") or ""
        said = unicodedata.normalize("NFC", content.split("</think>")[-1].strip())
        extra = answer.removesuffix(said)
        assert answer.endswith(said) or message.get("tool_calls")
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] in extra
            assert "Oslo" in extra
        if not message.get("tool_calls"):
            thought = message.get("reasoning_content", content.split("</think>")[0].replace("<think>", ""))
            assert re.sub(r"</?think>", "", extra).strip() in ("", thought.strip())
        others = [m["content"] for m in conversation.messages if m["role"] != "assistant" and isinstance(m["content"], str)]
        assert not any(other in text for other in others if len(other) > 3)
    few = conversation.id in FEW and not any("<think>" in text or text.strip() != text for text in texts)
    assert few == (max(longest_run(row.loss_mask) for row in rendered.rows) < 2)
