"""Long conversations are proven in linear time and get what turn-by-turn proof gives; GLM's next role is the stop token."""

from itertools import pairwise
from typing import Any

import pytest

from dflash_core.data.chat import Chat, check_as_served, open_chat, token_rows
from dflash_core.data.proof import LONG, prove
from dflash_core.data.renders import shared_header
from dflash_core.records import Conversation
from tests.data.templates import TEMPLATES
from tests.data.test_chat import STOP, supervised
from tests.fakes import CHATML, IM_START, make_tokenizer

# no end of turn: the next role's token is the stop; the render of an answer ends with its text
BY_ROLE = (
    "{%- for message in messages -%}"
    "{{- ('<|im_start|>' if message['role'] == 'user' else '<|MASK|>') + '\\n' + message['content'] -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|MASK|>\\n' -}}{%- endif -%}"
)


def conversation(turns: int, system: bool = False) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}] if system else []
    for i in range(turns):
        messages += [{"role": "user", "content": f"say {i % 7}"}, {"role": "assistant", "content": f" said {i % 5}\n"}]
    return Conversation(id="long", messages=messages)


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("turns", [LONG - 1, LONG, LONG + 1, 60])
@pytest.mark.parametrize("name", ["T1 chatml", "T2 tagged", "T4 reasoning", "T7 trims", "T8 default system", "other prompt"])
def test_a_long_conversation_supervises_every_answer(name: str, turns: int, system: bool) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    (row,) = token_rows(open_chat(tokenizer, stop_ids=STOP), conversation(turns, system)).rows
    texts = supervised(tokenizer, row)
    said = [f" said {i % 5}\n" if name != "T7 trims" else f"said {i % 5}" for i in range(turns)]
    if name == "T4 reasoning":
        said[-1] = "<think>\n\n</think>\n\n" + said[-1].lstrip("\n")
    assert texts == [text + "<|im_end|>" for text in said]


def test_a_long_conversation_needs_renders_in_proportion_to_its_length() -> None:
    """Counted in messages rendered: eight times the turns may not need more than ten times as many."""
    counts = CHATML.replace("{%- for message in messages -%}", "{%- for message in messages -%}{{- strftime_now('') -}}")
    chat = open_chat(make_tokenizer(counts), stop_ids=STOP)
    rendered: list[str] = []
    chat.form.template.variables["strftime_now"] = lambda form: rendered.append(form) or ""
    costs = []
    for turns in (25, 200):
        rendered.clear()
        prove(chat.form, conversation(turns))
        costs.append(len(rendered))
    assert costs[1] < 10 * costs[0]


def test_a_long_conversation_with_one_turn_out_of_frame_is_proven_turn_by_turn() -> None:
    """One message carries reasoning, which the template drops from earlier turns: its row is its own."""
    tokenizer = make_tokenizer(TEMPLATES["T4 reasoning"])
    chat, long = open_chat(tokenizer, stop_ids=STOP), conversation(LONG + 4)
    long.messages[9] = {**long.messages[9], "reasoning_content": "because"}
    rendered = token_rows(chat, long)
    assert [row.id for row in rendered.rows] == ["long/turn-9", f"long/turn-{2 * (LONG + 4) - 1}"]
    assert supervised(tokenizer, rendered.rows[0]) == ["<think>\nbecause\n</think>\n\n said 4\n<|im_end|>"]
    assert len(supervised(tokenizer, rendered.rows[1])) == LONG + 3
    assert all(check_as_served(chat, long, rendered).values())


def by_role() -> tuple[Any, Chat]:
    tokenizer = make_tokenizer(BY_ROLE)
    return tokenizer, open_chat(tokenizer, stop_ids=frozenset({IM_START}))


def test_the_next_role_is_the_stop_token_and_the_last_answer_has_none() -> None:
    tokenizer, chat = by_role()
    assert chat.form.role_stops
    rendered = token_rows(chat, conversation(3))
    (row,) = rendered.rows
    assert supervised(tokenizer, row) == [" said 0\n<|im_start|>", " said 1\n<|im_start|>", " said 2\n"]
    assert rendered.notes == ("an answer without its stop token",)


def test_a_long_conversation_by_roles() -> None:
    tokenizer, chat = by_role()
    (row,) = token_rows(chat, conversation(LONG + 5)).rows
    assert supervised(tokenizer, row) == [f" said {i % 5}\n<|im_start|>" for i in range(LONG + 4)] + [" said 0\n"]


def test_a_role_token_inside_an_answer_is_dropped() -> None:
    _, chat = by_role()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a<|im_start|>\nb"}]
    with pytest.raises(ValueError, match="a stop token inside an answer"):
        token_rows(chat, Conversation(id="x", messages=messages))


@pytest.mark.parametrize("name", ["T1 chatml", "T2 tagged", "T6 tagged early"])
def test_the_method_is_named(name: str) -> None:
    assert token_rows(open_chat(make_tokenizer(TEMPLATES[name]), stop_ids=STOP), conversation(2)).method == (
        "prefix" if name == "T1 chatml" else "tags"
    )


def test_tags_that_begin_elsewhere_than_the_served_prompt_ends_are_no_proof() -> None:
    """The mark takes in the header."""
    wide = TEMPLATES["T2 tagged"].replace(
        "{{- '<|im_start|>' + message['role'] + '\\n' -}}{%- if message['role'] == 'assistant' -%}{%- generation -%}",
        "{%- if message['role'] != 'assistant' -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}{%- endif -%}"
        "{%- if message['role'] == 'assistant' -%}{%- generation -%}{{- '<|im_start|>assistant\\n' -}}",
    )
    assert wide != TEMPLATES["T2 tagged"]
    rendered = token_rows(open_chat(make_tokenizer(wide), stop_ids=STOP), conversation(2))
    assert rendered == token_rows(open_chat(make_tokenizer(CHATML), stop_ids=STOP), conversation(2))
    assert rendered.method == "prefix"


def test_early_tags_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    chat = open_chat(make_tokenizer(TEMPLATES["T6 tagged early"]), stop_ids=STOP)
    assert chat.warnings == ("stop token never supervised by the template's generation tags; it is added",)
    assert "stop token never supervised" in caplog.text
    assert open_chat(make_tokenizer(TEMPLATES["T2 tagged"]), stop_ids=STOP).warnings == ()


@pytest.mark.parametrize(
    ("ending", "rendered", "header"),
    [
        ("<|assistant|><think>", "<|assistant|></think>", "<|assistant|>"),
        ("]~b]ai\n<think>\n", "]~b]ai\n", "]~b]ai\n"),
        ("\n\n<think></think>", "\n\n</think>", "\n\n"),
        ("A: ", "B: ", ""),
    ],
)
def test_a_header_is_what_prompt_and_render_share_in_whole_tags(ending: str, rendered: str, header: str) -> None:
    assert shared_header(ending, rendered) == header


def test_spans_are_in_order_and_apart() -> None:
    proof = prove(open_chat(make_tokenizer(), stop_ids=STOP).form, conversation(30))
    (draft,) = proof.drafts
    assert all(a.end <= b.start for a, b in pairwise(draft.spans))
    assert [draft.text[span.start : span.end] for span in draft.spans] == [f" said {i % 5}\n<|im_end|>" for i in range(30)]
