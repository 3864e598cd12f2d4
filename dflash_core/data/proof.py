"""Which characters of a conversation's render the target generated, proven turn by turn.

    served prompt of turn i:  render of the messages before it, with the generation prompt      "...<|im_start|>assistant\\n"
    own render of turn i:     render of the messages up to and with it                           "...assistant\\n42<|im_end|>\\n"

A turn is proven in a text when the served prompt opens the text and the answer of its own render follows. As many turns as can be
are proven in the render of the whole conversation; what is left gets rows of its own, as the server saw it at that turn. So the
methods, in the order they are tried, differ in what they need:

tags      the template marks answers itself; its marks begin where the served prompts end
prefix    every served prompt opens the render of the whole conversation
turns     some do not (earlier reasoning dropped, another ending for the last turn): several rows, each opening with the served prompt
sentinel  the served prompt opens no render at all, as where it opens a think block that the data has not: a sentinel in the place of
          the answer shows the header that prompt and render share, and the header stands for the prompt
"""

from dataclasses import dataclass
from typing import Any

from dflash_core.data.renders import Form, Renders, Span, holds, reasons
from dflash_core.data.template import Unprovable, normal_messages, render_tagged
from dflash_core.records import Conversation

LONG = 16  # assistant turns; a longer conversation is proven at some of them, where its frames repeat
SPREAD = 6
OPEN_END = "an answer without its stop token"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A row before it is tokenized."""

    text: str
    spans: tuple[Span, ...]  # in order


@dataclass(frozen=True, kw_only=True)
class Proof:
    drafts: tuple[Draft, ...]
    method: str
    notes: tuple[str, ...]


def prove(form: Form, conversation: Conversation) -> Proof:
    """The drafts of a conversation's rows. Raises Unprovable: its message is the reason to drop it by."""
    messages, notes = normal_messages(conversation.messages, form.template.arguments), []
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise Unprovable("no assistant turn")
    marks = {turn: conversation.messages[turn].get("loss_mask") for turn in turns}
    if not {None, 0, 1}.issuperset(marks.values()):
        raise Unprovable("a message's loss_mask is neither 0 nor 1")
    wanted = [turn for turn in turns if marks[turn] != 0]
    if not wanted:
        raise Unprovable("every assistant turn has loss_mask 0")
    if wanted[0] == 0:  # nothing was served before it, so the target did not generate it
        wanted = wanted[1:]
        notes.append("the assistant speaks first")
        if not wanted:
            raise Unprovable("the assistant speaks first")
    renders = Renders(form, messages, conversation.tools)
    tagged = tagged_draft(renders, turns, wanted)
    if tagged is not None:
        return Proof(drafts=(tagged,), method="tags", notes=(*notes, *open_ends([tagged])))
    drafts: list[Draft] = []
    while wanted:
        draft = _draft(renders, wanted)
        drafts.append(draft)
        proven = {span.turn for span in draft.spans}
        wanted = [turn for turn in wanted if turn not in proven]
    several = "turns" in renders.ways or len(drafts) > 1
    method = "sentinel" if "sentinel" in renders.ways else "turns" if several else "prefix"
    return Proof(drafts=tuple(reversed(drafts)), method=method, notes=(*notes, *open_ends(drafts)))


def open_ends(drafts: list[Draft]) -> list[str]:
    return [OPEN_END for draft in drafts for span in draft.spans if not span.closed]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a template writes around the content of a plain message."""

    before: str
    after: str
    stripped: bool

    def around(self, message: dict[str, Any]) -> str | None:
        """Another message's content in this frame; None where the message is not plain."""
        if not _plain(message):
            return None
        content = message["content"].strip() if self.stripped else message["content"]
        return self.before + content + self.after


def _plain(message: dict[str, Any]) -> bool:
    content = message["content"]
    return isinstance(content, str) and bool(content.strip()) and not message.get("tool_calls") and not reasons(message)


def _frame(message: dict[str, Any], answer: str) -> Frame | None:
    if not _plain(message):
        return None
    for stripped in (False, True):
        before, content, after = answer.partition(message["content"].strip() if stripped else message["content"])
        if content:
            return Frame(before=before, after=after, stripped=stripped)
    return None


def tagged_draft(renders: Renders, turns: list[int], wanted: list[int]) -> Draft | None:
    """The whole conversation by the template's own generation tags; None where they are no proof.

    Tags that close before the stop token are taken on to its end.
    """
    form, last = renders.form, wanted[-1]
    if form.template.tagged is None:
        return None
    text, blocks = render_tagged(form.template, renders.messages[: last + 1], tools=renders.tools)
    shown = [turn for turn in turns if turn <= last]
    if len(blocks) != len(shown):
        return None
    spans = []
    for turn, (start, end) in zip(shown, blocks, strict=True):
        stop = form.stops.search(text, start)
        if turn not in wanted:
            continue
        if stop is None or stop.start() > end or stop.end() < end or not holds(renders.messages[turn], text[start:end]):
            return None
        spans.append(Span(turn=turn, start=start, end=stop.end(), closed=True))
    for turn in spread_out(wanted):
        span = spans[wanted.index(turn)]
        if renders.render(span.turn, generation_prompt=True) != text[: span.start]:
            return None
    return Draft(text=text, spans=tuple(spans))


def spread_out(wanted: list[int]) -> list[int]:
    """All of a few turns; of many the first two, the last and some between."""
    if len(wanted) <= LONG:
        return wanted
    return sorted({*wanted[:2], *(wanted[k * (len(wanted) - 1) // SPREAD] for k in range(SPREAD + 1))})


def _draft(renders: Renders, wanted: list[int]) -> Draft:
    """The row that ends with the last wanted turn, with every wanted turn that can be proven in it."""
    last = wanted[-1]
    text, _ = renders.served(last)
    final = renders.span(last, text)
    assert final is not None, "the text holds what it was put together from"
    spans = _repeating(renders, wanted, text, final) or _each(renders, wanted, text, final)
    return Draft(text=text, spans=tuple(spans))


def _each(renders: Renders, wanted: list[int], text: str, final: Span) -> list[Span]:
    """Every turn by its own prompt; its own render is needed only where its frame is another than the last turn's."""
    frame = _frame(renders.messages[final.turn], text[final.start : final.end])
    spans = []
    for turn in wanted[:-1]:
        span = _framed(renders, turn, text, frame, final.closed) or renders.span(turn, text)
        if span is None and renders.form.one_row:
            span = renders.historic_span(turn, text)
        if span is not None:
            spans.append(span)
    return [*spans, final]


def _framed(renders: Renders, turn: int, text: str, frame: Frame | None, closed: bool) -> Span | None:
    """A turn's place where its answer stands in the same frame as the last turn's, whose own render `text` is."""
    answer = frame.around(renders.messages[turn]) if frame else None
    prompt = renders.render(turn, generation_prompt=True)
    start = len(prompt)
    if answer is None or not text.startswith(prompt) or not text.startswith(answer, start):
        return None
    stop, end = renders.form.stops.search(text, start), start + len(answer)
    if stop is None or (stop.end() if closed else stop.start()) != end:
        return None
    return Span(turn=turn, start=start, end=stop.end(), closed=True)


def _repeating(renders: Renders, wanted: list[int], text: str, final: Span) -> list[Span]:
    """The turns of a long conversation in time linear in its length; empty where that is no proof.

    The text between the first answer and the last prompt must be the messages in frames that repeat, character for character, and
    turns spread over it must be proven each by its own prompt.
    """
    messages = renders.messages
    if len(wanted) <= LONG or wanted != list(range(wanted[0], final.turn + 1, 2)):
        return []
    if not all(_plain(message) for message in messages[wanted[0] : final.turn]):
        return []
    proven = {turn: renders.span(turn, text) for turn in spread_out(wanted)[:-1]}
    first, second = proven[wanted[0]], proven[wanted[1]]
    if first is None or second is None:
        return []
    answer = _frame(messages[first.turn], text[first.start : first.end])
    link = _frame(messages[first.turn + 1], text[first.end : second.start])
    if answer is None or link is None:
        return []
    spans, place = [], first.start
    for turn in wanted[:-1]:
        said, asked = answer.around(messages[turn]), link.around(messages[turn + 1])
        if said is None or asked is None or not text.startswith(said + asked, place):
            return []
        stop, end = renders.form.stops.search(text, place), place + len(said)
        if stop is None or stop.end() != end:
            return []
        spans.append(Span(turn=turn, start=place, end=end, closed=True))
        place = end + len(asked)
    agree = all(span == proven[span.turn] for span in spans if span.turn in proven)
    return [*spans, final] if agree and place == final.start else []
