"""Every real template with two real tokenizers over public conversations, each kept row checked by a slow and independent method.

The slow method renders with transformers, tokenizes with transformers, and looks for the served prompt of each turn in the row.
"""

import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.chat import Rendered, open_chat, token_rows_batch
from dflash_core.data.template import normal_messages
from dflash_core.records import Conversation, TokenRow
from tests.data.assets import FAMILIES, public_conversations, tokenizer_bytes, with_template

FRAME = r"(\s|</?think>|<\|channel\|>final<\|message\|>)*"  # what templates write into an answer beside what it says
SENTINEL_TEMPLATES = {"GLM-4.7-Flash", "MiniMax-M2", "deepseek-ai-DeepSeek-V3.2"}  # their prompt opens what plain rows lack


@pytest.fixture(scope="session")
def serialized(assets_dir: Path) -> dict[str, str]:
    return {kind: tokenizer_bytes(assets_dir, kind) for kind in ("qwen", "mistral")}


@pytest.mark.parametrize("kind", ["qwen", "mistral"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_some_rows_of_every_template(name: str, kind: str, serialized: dict[str, str], assets_dir: Path) -> None:
    rows = [row for row in public_conversations(assets_dir, every=131) if len(row.messages) < 30]
    counts = sweep(assets_dir, name, serialized[kind], rows)
    assert counts["kept"] >= 0.95 * counts["rendered"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "mistral"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_all_rows_of_every_template(name: str, kind: str, serialized: dict[str, str], assets_dir: Path) -> None:
    counts = sweep(assets_dir, name, serialized[kind], list(public_conversations(assets_dir)))
    print(name, kind, json.dumps(counts))
    assert counts["kept"] >= 0.95 * counts["rendered"] > 1000


def sweep(assets: Path, name: str, serialized: str, conversations: list[Conversation]) -> dict[str, Any]:
    """Counts of a template; raises where a kept row is not what the slow method says."""
    tokenizer, stops = with_template(serialized, assets, name)
    chat = open_chat(tokenizer, stop_ids=stops, date="2026-01-31")
    results = token_rows_batch(chat, conversations)
    slow = Slow(tokenizer, stops, chat.form.template.arguments, chat.date)
    methods: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    rows = rendered = 0
    for conversation, result in zip(conversations, results, strict=True):
        rendered += slow.renders(conversation)
        if isinstance(result, Rendered):
            slow.check(conversation, result)
            methods[result.method] += 1
            rows += len(result.rows)
        else:
            dropped[str(result)] += 1
            assert str(result).startswith("template rejected") is not slow.renders(conversation)
    assert ("sentinel" in methods) == (name in SENTINEL_TEMPLATES)
    return {"kept": methods.total(), "rendered": rendered, "rows": rows, "methods": dict(methods), "dropped": dict(dropped)}


class Slow:
    """What transformers renders and tokenizes, with the date that the run has."""

    def __init__(self, tokenizer: Any, stops: frozenset[int], arguments: type, date: str) -> None:
        self.tokenizer, self.stops, self.arguments = tokenizer, stops, arguments
        self.template = re.sub(r'strftime_now\("[^"]*"\)', repr(date), tokenizer.chat_template)

    def text(self, conversation: Conversation, count: int, generation_prompt: bool) -> str:
        messages = normal_messages(conversation.messages[:count], self.arguments)
        return self.tokenizer.apply_chat_template(
            messages,
            tools=conversation.tools,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )

    def renders(self, conversation: Conversation) -> bool:
        try:
            self.text(conversation, len(conversation.messages), False)
        except Exception:  # whatever a template raises
            return False
        return True

    def check(self, conversation: Conversation, result: Rendered) -> None:
        """Every assistant turn stands once in the rows, behind what was served, with its text and nobody else's."""
        messages = conversation.messages
        wanted = {turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn > 0}
        found = []
        for row in result.rows:
            assert len(row.input_ids) == len(row.loss_mask)
            for start, end in self.answers(row):
                turn = self.turn_at(conversation, row, start, result.method, sorted(wanted - set(found)))
                closed = row.input_ids[end - 1] in self.stops
                assert closed or end == len(row.input_ids) or "GLM" in self.tokenizer.name_or_path
                answer = self.tokenizer.decode(row.input_ids[start : end - closed])
                self.check_answer(messages, turn, answer)
                found.append(turn)
        assert sorted(found) == sorted(wanted)
        assert [row.id for row in result.rows] in ([conversation.id], [f"{conversation.id}/turn-{t}" for t in sorted(found)]) or (
            len(result.rows) < len(found)
        )

    def answers(self, row: TokenRow) -> list[tuple[int, int]]:
        spans, start = [], None
        for place, marked in enumerate([*row.loss_mask, 0]):
            if start is not None and (not marked or row.input_ids[place - 1] in self.stops):
                spans.append((start, place))
                start = None
            if marked and start is None:
                start = place
        return spans

    def turn_at(self, conversation: Conversation, row: TokenRow, start: int, method: str, likely: list[int]) -> int:
        """The turn that a server asks for with exactly the ids before `start`; with a sentinel, up to the header."""
        before = row.input_ids[:start]
        stands = squeezed(self.tokenizer.decode(before)) if method == "sentinel" else ""
        for turn in likely:
            prompt = self.text(conversation, turn, True)
            if self.tokenizer(prompt, add_special_tokens=False)["input_ids"] == before:
                return turn
            if method == "sentinel":
                context, served = squeezed(self.text(conversation, turn, False)), squeezed(prompt)
                if stands.startswith(context) and served[len(context) :].startswith(stands[len(context) :]):
                    return turn
        raise AssertionError(f"{conversation.id}: no turn is served behind {self.tokenizer.decode(before)[-80:]!r}")

    def check_answer(self, messages: list[dict[str, Any]], turn: int, answer: str) -> None:
        message = messages[turn]
        content = message.get("content", "").strip()
        assert squeezed(content) in squeezed(answer)
        if message.get("tool_calls"):
            call = message["tool_calls"][0]["function"]
            assert call["name"] in answer
            arguments = json.loads(call["arguments"]) if isinstance(call["arguments"], str) else call["arguments"]
            for value in arguments.values():
                forms = (str(value), json.dumps(value, ensure_ascii=False))  # some templates write JSON, some the text itself
                assert any(squeezed(form) in squeezed(answer) for form in forms)
        else:
            assert re.fullmatch(FRAME, unicodedata.normalize("NFC", answer).replace(unicodedata.normalize("NFC", content), "", 1))
        own = squeezed(json.dumps(message, ensure_ascii=False))
        for other in messages:
            said = squeezed(other.get("content", ""))
            if other["role"] != "assistant" and len(said) > 30 and said not in own:
                assert said not in squeezed(answer)


def squeezed(text: str) -> str:
    """Without blanks (as which Mistral's decoder also writes ▁) and escapes, in composed letters."""
    return re.sub(r'[\s\\"▁]+', "", unicodedata.normalize("NFC", text))
