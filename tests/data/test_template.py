"""Our renders are those of transformers' `apply_chat_template`, with the run's date and tool arguments of the type taken."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dflash_core.data.template import OPEN, Unprovable, normal_messages, open_template, render_chat, render_tagged
from tests.data.assets import FAMILIES, public_conversations
from tests.data.templates import TAGGED, TAGGED_EARLY, TEMPLATES
from tests.fakes import CHATML, make_tokenizer

TODAY = datetime.date.today()
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def opened(text: str, *, date: datetime.date = TODAY, thinking: bool | None = None, tokens: dict[str, str] | None = None) -> Any:
    return open_template(text, special_tokens=tokens or {}, date=date, thinking=thinking)


def outcome(render: Any, *inputs: Any, **options: Any) -> str:
    try:
        return render(*inputs, **options)
    except Exception:  # a template raises what it likes
        return "refused"


@pytest.mark.parametrize("thinking", [None, False, True])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_real_templates_render_as_transformers_does(assets_dir: Path, name: str, thinking: bool | None) -> None:
    tokenizer = make_tokenizer((assets_dir / "templates" / f"{name}.jinja").read_text(encoding="utf-8"))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    template = opened(tokenizer.chat_template, thinking=thinking, tokens=tokenizer.special_tokens_map)
    options = {} if thinking is None else {"enable_thinking": thinking}
    refused = compared = 0
    for row in public_conversations(assets_dir, every=97):
        messages = normal_messages(row.messages, dict)
        for count in {len(messages), len(messages) // 2 or 1}:
            for generation_prompt in (False, True):
                ours = outcome(render_chat, template, messages[:count], tools=row.tools, generation_prompt=generation_prompt)
                theirs = outcome(
                    tokenizer.apply_chat_template,
                    messages[:count],
                    tools=row.tools,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **options,
                )
                assert ours == theirs
                compared += 1
                refused += ours == "refused"
    assert refused < compared / 4


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_small_templates_render_as_transformers_does(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    template = opened(TEMPLATES[name], tokens=tokenizer.special_tokens_map)
    for generation_prompt in (False, True):
        theirs = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=generation_prompt)
        assert render_chat(template, CHAT, tools=None, generation_prompt=generation_prompt) == theirs


def test_the_date_of_a_template_is_the_runs() -> None:
    template = opened("{{- strftime_now('%d %b %Y') -}}", date=datetime.date(2026, 1, 31))
    assert render_chat(template, CHAT, tools=None, generation_prompt=False) == "31 Jan 2026"


def test_tags_give_the_places_that_the_author_marked() -> None:
    text, spans = render_tagged(opened(TAGGED), CHAT, tools=None)
    assert text == render_chat(opened(TAGGED), CHAT, tools=None, generation_prompt=False)
    assert OPEN not in text
    assert [text[start:end] for start, end in spans] == ["Hello<|im_end|>"]
    text, spans = render_tagged(opened(TAGGED_EARLY), CHAT, tools=None)
    assert [text[start:end] for start, end in spans] == ["Hello"]


def test_nulls_render_as_if_absent_and_training_marks_are_not_rendered() -> None:
    given = [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Yo", "tool_calls": None, "loss_mask": 0},
    ]
    assert normal_messages(given, dict) == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    assert given[1]["tool_calls"] is None, "the given messages stay as they are"


def test_text_parts_are_joined_and_a_missing_text_is_empty() -> None:
    parts = [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}]
    assert normal_messages([{"role": "user", "content": parts}, {"role": "assistant"}], dict) == [
        {"role": "user", "content": "part one, part two"},
        {"role": "assistant", "content": ""},
    ]


def test_reasoning_goes_by_all_its_names() -> None:
    (message,) = normal_messages([{"role": "assistant", "content": "42", "reasoning": "6*7"}], dict)
    assert (message["reasoning_content"], message["thinking"]) == ("6*7", "6*7")


@pytest.mark.parametrize(
    ("given", "kind", "taken"),
    [
        ('{"city": "Oslo"}', dict, {"city": "Oslo"}),
        ({"city": "Ås"}, str, '{"city": "Ås"}'),
        ({"city": "Oslo"}, dict, {"city": "Oslo"}),
        ("no JSON", dict, "no JSON"),
        ("[1]", dict, "[1]"),
    ],
)
def test_arguments_become_what_the_template_takes(given: Any, kind: type, taken: Any) -> None:
    call = {"id": "c1", "function": {"name": "weather", "arguments": given}}
    (message,) = normal_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], kind)
    assert message["tool_calls"] == [{"id": "c1", "function": {"name": "weather", "arguments": taken}}]
    assert call["function"]["arguments"] == given


def test_what_a_template_raises_is_a_reason_and_a_broken_one_is_an_error() -> None:
    strict = opened("{{- raise_exception('roles must alternate') -}}")
    with pytest.raises(Unprovable, match=r"^template rejected the row: roles must alternate$"):
        render_chat(strict, CHAT, tools=None, generation_prompt=False)
    with pytest.raises(Unprovable, match="template rejected the row"):
        render_chat(opened(CHATML), [{"role": "user", "content": 42}], tools=None, generation_prompt=False)
    with pytest.raises(ValueError, match="chat template cannot be compiled"):
        opened("{% if %}")


def test_a_template_cannot_reach_the_interpreter() -> None:
    with pytest.raises(Unprovable, match="template rejected the row"):
        render_chat(opened("{{ messages.__class__.__mro__ }}"), CHAT, tools=None, generation_prompt=False)
    with pytest.raises(Unprovable, match="template rejected the row"):
        render_chat(opened("{{ messages.append(1) }}"), CHAT, tools=None, generation_prompt=False)
