"""A chat template as serving renders it: a sandboxed Jinja template with a frozen date.

    messages --normal_messages--> plain dicts --render_chat--> text
                                              --render_tagged--> text + characters inside {% generation %}

The render equals transformers' `apply_chat_template(tokenize=False)`. It is compiled here for two reasons: there the date is today's,
and every call copies its input, which costs as much as the render itself.
"""

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # Unicode's noncharacters: no text holds them
OURS = ("token_ids", "loss_mask")  # keys of a message that say how to train it and are not rendered
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names a message's reasoning goes by

Messages = list[dict[str, Any]]


class Unprovable(ValueError):
    """A row whose mask cannot be proven; the message is the reason it is dropped by."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """A compiled template and the variables that every render of a run gets."""

    text: str
    plain: jinja2.Template
    tagged: jinja2.Template | None  # the same with its generation blocks between OPEN and CLOSE; None where it has none
    variables: dict[str, Any]  # special tokens, options, strftime_now
    arguments: type  # dict or str: what it takes for the arguments of a tool call


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the author of a template says that the model writes."""

    tags = {"generation"}  # noqa: RUF012 (an instance variable of the base class)
    marks = ("", "")

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Callable[[], str]) -> str:
        return self.marks[0] + caller() + self.marks[1]


class _MarkedGeneration(_Generation):
    marks = (OPEN, CLOSE)


def open_template(
    text: str, *, special_tokens: dict[str, str], date: datetime.date, thinking: bool | None, arguments: type = dict
) -> Template:
    """Compiles a template. Raises ValueError where it is no valid Jinja."""
    midnight = datetime.datetime.combine(date, datetime.time())
    options = {} if thinking is None else {"enable_thinking": thinking}
    try:
        plain = _environment(_Generation).from_string(text)
        tagged = _environment(_MarkedGeneration).from_string(text) if "endgeneration" in text else None
    except jinja2.TemplateError as error:
        raise ValueError(f"the target's chat template cannot be compiled: {error}") from error
    return Template(
        text=text,
        plain=plain,
        tagged=tagged,
        variables={**special_tokens, **options, "strftime_now": midnight.strftime, "documents": None},
        arguments=arguments,
    )


def with_thinking(template: Template, thinking: bool) -> Template:
    """The same template with another `enable_thinking`."""
    return replace(template, variables={**template.variables, "enable_thinking": thinking})


def render_chat(template: Template, messages: Messages, *, tools: Any, generation_prompt: bool) -> str:
    """The text that a server feeds to the target. Raises Unprovable where the template refuses the messages."""
    return _rendered(template.plain, template, messages, tools, generation_prompt)


def render_tagged(template: Template, messages: Messages, *, tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """The render, and the start and end of each generation block in it, in characters."""
    assert template.tagged is not None
    pieces = _rendered(template.tagged, template, messages, tools, False).split(OPEN)
    text, spans = pieces[0], []
    for piece in pieces[1:]:
        inside, _, after = piece.partition(CLOSE)
        spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def normal_messages(messages: Messages, arguments: type) -> Messages:
    """Messages as templates take them, copied: no nulls, reasoning under all its names, tool arguments of the type taken."""
    return [_normal(message, arguments) for message in messages]


def _normal(message: dict[str, Any], arguments: type) -> dict[str, Any]:
    normal = {key: value for key, value in message.items() if value is not None and key not in OURS}
    content = normal.get("content", "")
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        content = "".join(part["text"] for part in content)
    normal["content"] = content
    reasoning = next((normal[name] for name in REASONING if name in normal), None)
    if reasoning is not None:
        normal = {"thinking": reasoning, **normal, "reasoning_content": reasoning}
    if normal.get("tool_calls"):
        normal["tool_calls"] = [_normal_call(call, arguments) for call in normal["tool_calls"]]
    return normal


def _normal_call(call: Any, arguments: type) -> Any:
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        return {**call, "function": _normal_call(call["function"], arguments)}
    given = call.get("arguments")
    if arguments is str and isinstance(given, dict):
        call["arguments"] = json.dumps(given, ensure_ascii=False)
    elif arguments is dict and isinstance(given, str):
        try:
            parsed = json.loads(given)
        except ValueError:
            return call  # the template says whether it takes the text
        call["arguments"] = parsed if isinstance(parsed, dict) else given
    return call


def _environment(generation: type[Extension]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _rendered(compiled: jinja2.Template, template: Template, messages: Messages, tools: Any, generation_prompt: bool) -> str:
    try:
        return compiled.render(messages=messages, tools=tools, add_generation_prompt=generation_prompt, **template.variables)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise Unprovable(f"template rejected the row: {str(error)[:80]}") from error  # a template is foreign code


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """As transformers has it; Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
