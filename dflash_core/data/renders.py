"""The renders of a conversation that its proof needs, and where its answers stand in them.

prompt of turn i   render of the messages before it, with the generation prompt   "...<|im_start|>assistant\\n"
own render         render of the messages up to and with it                       "...<|im_start|>assistant\\n42<|im_end|>\\n"
served text        the prompt and then the answer: mostly the own render
"""

import re
from dataclasses import dataclass
from typing import Any

from dflash_core.data.template import Messages, Template, Unprovable, render_chat

SENTINEL = "Sentinel7f3a"
NO_PREFIX = "the served prompt is no prefix of the render"
NO_STOP = "an assistant turn without a stop token"


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the proofs need of a chat format."""

    template: Template
    stops: re.Pattern[str]  # the texts of the target's stop tokens
    role_stops: bool  # no end-of-turn token: the next role's token is the stop
    one_row: bool  # a conversation stays one row where its answers can be located, though not all as they were served


@dataclass(frozen=True, kw_only=True)
class Span:
    """An answer in a text, stop token included."""

    turn: int  # message number
    start: int  # characters
    end: int
    closed: bool  # ends with a stop token


class Renders:
    """The renders of one conversation, each made once, and the places of its answers in them."""

    def __init__(self, form: Form, messages: Messages, tools: Any) -> None:
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise Unprovable("template rejected the row: tools are no list of objects")
        self.form, self.messages, self.tools = form, messages, tools
        self.ways: set[str] = set()  # "turns": a prompt was put before an answer; "sentinel": a header stands for a prompt
        self._texts: dict[tuple[int, bool], str] = {}
        self._served: dict[int, tuple[str, int]] = {}

    def render(self, count: int, *, generation_prompt: bool) -> str:
        """The first `count` messages."""
        key = (count, generation_prompt)
        if key not in self._texts:
            self._texts[key] = self._render(self.messages[:count], generation_prompt)
        return self._texts[key]

    def _render(self, messages: Messages, generation_prompt: bool = False) -> str:
        return render_chat(self.form.template, messages, tools=self.tools, generation_prompt=generation_prompt)

    def served(self, turn: int) -> tuple[str, int]:
        """The text that ends with this turn's answer, as it was served, and where in it the answer starts (characters)."""
        if turn not in self._served:
            prompt, own = self.render(turn, generation_prompt=True), self.render(turn + 1, generation_prompt=False)
            served = (own, len(prompt)) if own.startswith(prompt) else self._joined(turn, prompt, own)
            self._served[turn] = served
        return self._served[turn]

    def _joined(self, turn: int, prompt: str, own: str) -> tuple[str, int]:
        """Where the own render opens with something else: its answer behind the prompt, or a header in the prompt's place."""
        before = self.render(turn, generation_prompt=False)
        ending = prompt.removeprefix(before)
        probe = self._render([*self.messages[:turn], {"role": "assistant", "content": SENTINEL}]).partition(SENTINEL)[0]
        start = probe.rfind(ending) + len(ending)
        if ending and ending in probe and own.startswith(probe[:start]):
            self.ways.add("turns")
            return prompt + own[start:], len(prompt)
        header = shared_header(ending, probe.removeprefix(before))
        if not header or not (prompt.startswith(before) and own.startswith(before + header)):
            raise Unprovable(NO_PREFIX)
        self.ways.add("sentinel")
        return own, len(before) + len(header)

    def answer(self, turn: int) -> tuple[str, bool]:
        """The turn's answer as it was served, and whether a stop token ends it."""
        text, start = self.served(turn)
        stop = self.form.stops.search(text, start)
        if stop is None and not self.form.role_stops:
            raise Unprovable(NO_STOP)
        if stop is not None and (self.form.role_stops or self.form.stops.search(text, stop.end())):
            raise Unprovable("a stop token inside an answer")
        answer = text[start : stop.end() if stop else None]
        if not all(name in answer for name in called(self.messages[turn])):
            raise Unprovable("a tool call that the template leaves out")
        return answer, stop is not None

    def span(self, turn: int, text: str) -> Span | None:
        """The place of a turn's answer in `text`, None where the text is not as it was served."""
        served, start = self.served(turn)
        if not text.startswith(served[:start]):
            return None
        answer, closed = self.answer(turn)
        if not text.startswith(answer, start):
            answer = self._without_empty_reasoning(turn, answer, text, start) if closed else ""
            if not answer:
                return None
        end = start + len(answer)
        stop = None if closed else self.form.stops.match(text, end)
        return Span(turn=turn, start=start, end=stop.end() if stop else end, closed=closed or stop is not None)

    def _without_empty_reasoning(self, turn: int, answer: str, text: str, start: int) -> str:
        """A longer render may leave out the empty think block that the template puts into the last turn."""
        stop, message = self.form.stops.search(text, start), self.messages[turn]
        shorter = text[start : stop.end()] if stop else ""
        return shorter if not reasons(message) and answer.endswith(shorter) and holds(message, shorter) else ""

    def historic_span(self, turn: int, text: str) -> Span | None:
        """Where the answer stands in a longer render that has it in another form than it was served in, earlier reasoning left out."""
        before, prompt = (self.render(turn, generation_prompt=served) for served in (False, True))
        answered = [*self.messages[:turn], {"role": "assistant", "content": SENTINEL}, {"role": "user", "content": SENTINEL}]
        probe = self._render(answered).partition(SENTINEL)[0]
        opening = before + shared_header(prompt.removeprefix(before), probe.removeprefix(before))
        stop = self.form.stops.search(text, len(opening)) if text.startswith(opening) else None
        found = text[len(opening) : stop.end()] if stop else ""
        said = str(self.messages[turn]["content"]).split("</think>")[-1].strip()
        if not found or not self.answer(turn)[0].endswith(found) or said not in found:
            return None
        self.ways.add("sentinel")
        return Span(turn=turn, start=len(opening), end=len(opening) + len(found), closed=True)


def shared_header(ending: str, rendered: str) -> str:
    """The common start of a generation prompt and of what renders write before an answer, cut back to whole tags.

    `"<|assistant|><think>", "<|assistant|></think>"` -> `"<|assistant|>"`
    """
    length = next((i for i, (a, b) in enumerate(zip(ending, rendered, strict=False)) if a != b), min(len(ending), len(rendered)))
    shared = ending[:length]
    if shared in (ending, rendered):
        return shared
    return shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared


def reasons(message: dict[str, Any]) -> bool:
    return bool(message.get("reasoning_content")) or "</think>" in str(message["content"])


def holds(message: dict[str, Any], answer: str) -> bool:
    """Whether an answer's text has all that its message says."""
    pieces = [*re.split("</?think>", str(message["content"])), str(message.get("reasoning_content", "")), *called(message)]
    return all(piece.strip() in answer for piece in pieces)


def called(message: dict[str, Any]) -> list[str]:
    """The names of the tools that a message calls."""
    return [str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or ()]
