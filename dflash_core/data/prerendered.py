"""Conversations that come as rendered text: cut back into messages, and taken only where these render to the same text.

"<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n"  ->  [user "Hi", assistant "Hello"]  ->  the same text
"""

from itertools import cycle
from typing import Any

from dflash_core.data.renders import SENTINEL, Form
from dflash_core.data.template import Messages, Unprovable, normal_messages, render_chat

NO_RENDER = "text that is no render of the template"


def parse_text(form: Form, text: str) -> Messages:
    """The messages that the template renders to `text`. Raises Unprovable where there are none of user and assistant in turn."""
    for roles in (("system", "user", "assistant"), ("user", "assistant")):
        messages = _cut(form, text, roles)
        if messages and _render(form, messages).rstrip() == text.rstrip():
            return messages
    raise Unprovable(NO_RENDER)


def _cut(form: Form, text: str, roles: tuple[str, ...]) -> Messages:
    """The text between the literals that a probe shows before and after each role; empty where they are not there."""
    order = [*roles, "user", "assistant"]
    probe = [{"role": role, "content": f"{SENTINEL}{number}."} for number, role in enumerate(order)]
    try:
        rest = _render(form, probe)
    except Unprovable:
        return []
    literals = []
    for message in probe:
        literal, found, rest = rest.partition(message["content"])
        if not found:
            return []
        literals.append(literal)
    if not all(literals) or not text.startswith(literals[0]):
        return []
    following = dict(zip(order[: len(roles)], literals[1:], strict=False))  # what stands between a role's content and the next
    messages: Messages = []
    place = len(literals[0])
    for role in _in_order(roles):
        end = text.find(following[role], place)
        if end < 0:
            content = text[place:].rstrip().removesuffix(rest.rstrip())
            return [*messages, {"role": role, "content": content}] if role == "assistant" else []
        messages.append({"role": role, "content": text[place:end]})
        place = end + len(following[role])
    return messages


def _in_order(roles: tuple[str, ...]) -> Any:
    yield from roles
    yield from cycle(("user", "assistant"))


def _render(form: Form, messages: Messages) -> str:
    normal = normal_messages(messages, form.template.arguments)
    return render_chat(form.template, normal, tools=None, generation_prompt=False)
