"""The look at rows: pieces tell exactly which tokens are supervised, and the page shows data as data."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.chat import open_chat
from dflash_core.data.conversations import write_part
from dflash_core.data.preview import Look, Piece, look, page, spread
from dflash_core.data.tokenization import Limits
from dflash_core.records import Conversation
from tests.fakes import IM_END, VOCAB, chats, make_tokenizer

TOKENIZER = make_tokenizer()
CHAT = open_chat(TOKENIZER, stop_ids=frozenset({IM_END}))


def looks(*messages: tuple[str, str], max_length: int = 500) -> list[Look]:
    conversation = Conversation(id="q1", messages=[{"role": role, "content": content} for role, content in messages])
    limits = Limits(max_length=max_length, too_long="cut", vocab_size=VOCAB)
    return look(conversation, chat=CHAT, tokenizer=TOKENIZER, limits=limits)


def test_pieces_are_the_whole_row_and_mark_the_answers_with_their_stop_tokens() -> None:
    (shown,) = looks(("user", "Höher?"), ("assistant", "Já, 👨‍👩‍👧 <b>"), ("user", "So?"), ("assistant", "No."))
    assert "".join(piece.text for piece in shown.pieces) == (
        "<|im_start|>user\nHöher?<|im_end|>\n<|im_start|>assistant\nJá, 👨‍👩‍👧 <b><|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
    )
    assert [piece.text for piece in shown.pieces if piece.supervised] == ["Já, 👨‍👩‍👧 <b>", "<|im_end|>", "No.", "<|im_end|>"]
    assert {piece.text for piece in shown.pieces if piece.special} == {"<|im_start|>", "<|im_end|>"}
    assert shown.supervised == len(TOKENIZER.encode("Já, 👨‍👩‍👧 <b>No.")) + 2
    assert shown.dropped == ""


def test_what_is_cut_or_dropped_says_so() -> None:
    (whole,) = looks(("user", "Hi"), ("assistant", "Ho, and on and on."))
    (cut,) = looks(("user", "Hi"), ("assistant", "Ho, and on and on."), max_length=whole.tokens - 3)
    assert f"cut to {whole.tokens - 3} tokens" in cut.headline
    (gone,) = looks(("user", "Hi"), ("assistant", "Ho, and on and on."), max_length=5)
    assert gone.headline.endswith("DROPPED: fewer than 2 supervised tokens in a row after the cut")
    (unproven,) = looks(("assistant", "I begin."), ("user", "Hi"), ("assistant", "Ho."))
    assert unproven.headline.startswith("q1: ")


@pytest.mark.parametrize(
    ("served", "words"),
    [(None, "nothing to compare"), ({1: True, 3: True}, "as served"), ({1: True, 3: False}, "NOT AS SERVED at message 3")],
)
def test_the_headline_tells_what_a_server_would_have_had(served: dict[int, bool] | None, words: str) -> None:
    shown = Look(id="q", pieces=(Piece(text="x", supervised=True, special=False),), method="tags", served=served)
    assert f"mask proven by tags, {words}" in shown.headline


def test_the_page_escapes_all_that_came_from_the_data() -> None:
    attack = "</pre><script>alert(1)</script>&amp;\"'"
    shown = Look(id=attack, pieces=tuple(Piece(text=attack, supervised=i > 0, special=i == 1) for i in range(3)), notes=(attack,))
    text = page([shown, Look(id="x", dropped=attack)], title=attack)
    assert "<script" not in text
    assert text.count(html.escape(attack)) == 8  # title twice, id, note and reason once each, and three pieces
    tags = {"!doctype", "html", "head", "meta", "title", "style", "body", "h1", "p", "mark", "b", "h2", "pre"}
    assert set(re.findall(r"</?([!a-z0-9]+)", text)) == tags
    assert f"<mark><b>{html.escape(attack)}</b></mark><mark>{html.escape(attack)}</mark>" in text


@pytest.mark.parametrize(
    ("rows", "count", "expected"), [(9, 3, [0, 3, 6]), (4, 9, [0, 1, 2, 3]), (5, 1, [0]), (0, 5, []), (7, 7, list(range(7)))]
)
def test_the_sample_is_spread_over_all_parts(rows: int, count: int, expected: list[int], tmp_path: Path) -> None:
    every: list[Any] = [Conversation(id=str(i), messages=row["messages"]) for i, row in enumerate(chats(rows))]
    parts = [tmp_path / f"part-{number:05d}.jsonl" for number in range(3)]
    for part, start in zip(parts, (0, 2, 4), strict=True):
        write_part(part, every[start:] if part == parts[-1] else every[start : start + 2])
    assert [int(found.id) for found in spread(parts, rows=rows, count=count)] == expected
