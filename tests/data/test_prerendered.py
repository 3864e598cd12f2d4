"""Rows that come as rendered text get the mask that their messages get, or are dropped by name."""

from typing import Any

import pytest

from dflash_core.data.chat import Unprovable, open_chat, token_rows
from dflash_core.data.prerendered import parse_text
from dflash_core.records import Conversation
from tests.data.templates import TEMPLATES
from tests.data.test_chat import STOP, TWO_TURNS
from tests.fakes import make_tokenizer

SYSTEM = [{"role": "system", "content": "Be kind."}]
NAMES = ["T1 chatml", "T2 tagged", "T3 strict", "T4 reasoning", "T5 begins", "T8 default system", "other prompt"]


@pytest.mark.parametrize("messages", [TWO_TURNS, TWO_TURNS[:2], SYSTEM + TWO_TURNS], ids=["two", "one", "system"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rendered_text_gives_the_rows_of_its_messages(name: str, messages: list[dict[str, Any]]) -> None:
    if name == "T3 strict" and messages[0]["role"] == "system":
        pytest.skip("this template takes no system message")
    tokenizer = make_tokenizer(TEMPLATES[name])
    chat = open_chat(tokenizer, stop_ids=STOP)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    from_text = token_rows(chat, Conversation(id="x", messages=[], text=text))
    assert from_text == token_rows(chat, Conversation(id="x", messages=messages))
    assert token_rows(chat, Conversation(id="x", messages=[], text=text.rstrip())) == from_text


@pytest.mark.parametrize(
    "text",
    [
        "no messages at all",
        "",
        "<|im_start|>user\nHi<|im_end|>\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nno stop token",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n extra blank <|im_end|>\n<|im_start|>tool\nx<|im_end|>\n",
        "[INST] Hi [/INST] Hello</s>",
    ],
)
def test_other_text_is_dropped_by_name(text: str) -> None:
    chat = open_chat(make_tokenizer(), stop_ids=STOP)
    with pytest.raises(Unprovable):
        token_rows(chat, Conversation(id="F29", messages=[], text=text))


def test_the_messages_are_cut_out_with_their_blanks() -> None:
    chat = open_chat(make_tokenizer(), stop_ids=STOP)
    text = "<|im_start|>user\n Hi \n<|im_end|>\n<|im_start|>assistant\n Hello \n<|im_end|>\n"
    assert parse_text(chat.form, text) == [{"role": "user", "content": " Hi \n"}, {"role": "assistant", "content": " Hello \n"}]
