"""What a chat template does, found out once by rendering small conversations with it."""

import datetime
import re
from typing import Any

from dflash_core.data.renders import SENTINEL, Form
from dflash_core.data.template import Messages, Template, Unprovable, normal_messages, open_template, render_chat, render_tagged

USER: dict[str, Any] = {"role": "user", "content": "Weather in Oslo?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def inspect(
    text: str,
    *,
    special_tokens: dict[str, str],
    stops: list[str],
    date: datetime.date,
    thinking: bool | None,
    one_row: bool,
) -> tuple[Form, tuple[str, ...]]:
    """The form of a template, and warnings about it. Raises ValueError where it cannot be compiled."""
    pattern = re.compile("|".join(map(re.escape, sorted(stops, key=len, reverse=True))))
    templates = [
        open_template(text, special_tokens=special_tokens, date=date, thinking=thinking, arguments=kind) for kind in (dict, str)
    ]
    template = next((template for template in templates if _takes_arguments(template)), templates[0])
    form = Form(template=template, stops=pattern, role_stops=_stops_by_role(template, pattern), one_row=one_row)
    return form, ("stop token never supervised by the template's generation tags; it is added",) if _ends_early(form) else ()


def _takes_arguments(template: Template) -> bool:
    """Whether a call is rendered, and its arguments not as Python's text of a mapping nor as a quoted quotation."""
    try:
        text = _text(template, CALLED)
    except Unprovable:
        return False
    return "Oslo" in text and "'city'" not in text and '\\"' not in text.partition("weather")[2]


def _stops_by_role(template: Template, stops: re.Pattern[str]) -> bool:
    """Whether an answer ends without a stop token, and the next role's token, right behind it, is one."""
    try:
        own, longer = _text(template, [USER, ANSWER]), _text(template, [USER, ANSWER, USER])
    except Unprovable:
        return False
    after, place = own.partition(SENTINEL)[2], longer.find(SENTINEL) + len(SENTINEL)
    return not stops.search(after) and longer.startswith(after, place) and bool(stops.match(longer, place + len(after)))


def _ends_early(form: Form) -> bool:
    if form.template.tagged is None:
        return False
    try:
        text, blocks = render_tagged(form.template, [USER, ANSWER], tools=None)
    except Unprovable:
        return False
    return bool(blocks) and not form.stops.search(text, *blocks[-1])


def _text(template: Template, messages: Messages) -> str:
    return render_chat(template, normal_messages(messages, template.arguments), tools=None, generation_prompt=False)
