"""The chat format of a run, and conversations as token rows: ids, and which of them the target generated.

    messages --render--> text --tokenize--> input_ids
                          |
        for every assistant turn i:   [ prompt i, as a server renders it | answer ... stop ]  rest
                                        loss_mask 0                        loss_mask 1        0

A turn is marked only with a proof, in characters (proof.py) and in tokens (alignment.py): the ids before it are those of the prompt
that a server would build. A turn whose tokens cannot be proven in the row of its conversation gets a row of its own, prompt ids and
then answer ids, as the target has them when it generates. What has no proof is dropped by name.
"""

import datetime
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from dflash_core.data.alignment import Alignment, Encoder, encode_all, encode_one, open_encoder
from dflash_core.data.prerendered import parse_text
from dflash_core.data.probes import inspect
from dflash_core.data.proof import Draft, Proof, prove
from dflash_core.data.renders import Form
from dflash_core.data.template import Messages, Unprovable, normal_messages, render_chat, with_thinking
from dflash_core.records import Conversation, TokenRow

__all__ = ["Chat", "Rendered", "Unprovable", "check_as_served", "longest_run", "open_chat", "render", "served_ids", "token_rows"]
__all__ += ["token_rows_batch"]
LOG = logging.getLogger(__name__)
MERGED = "tokens merge at the end of a served prompt"
OTHER_IDS = "token_ids differ from the tokenization of their text"


@dataclass(frozen=True, kw_only=True)
class Chat:
    """The chat format of a run, the same for every row. Made by `open_chat`; a worker process opens its own."""

    form: Form
    encoder: Encoder
    stop_ids: frozenset[int]
    mask_token_id: int | None  # an answer that holds it cannot be trained
    date: str  # what a template that prints the date says, "2026-01-31"; "" where it prints none
    warnings: tuple[str, ...]  # about the template, for the user


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The rows of one conversation: mostly one, or several with ids "id/turn-3" (the last turn in each)."""

    rows: tuple[TokenRow, ...]
    method: str  # "tags", "prefix", "turns", "sentinel"; "tokens" for a row that came as tokens
    notes: tuple[str, ...] = ()  # to be counted in the ledger


def open_chat(
    tokenizer: Any,
    *,
    stop_ids: frozenset[int],
    mask_token_id: int | None = None,
    date: str | None = None,
    thinking: bool | None = None,
    one_row: bool = False,
) -> Chat:
    """Inspects the tokenizer's template once.

    date: "2026-01-31", None for today. thinking: the template's `enable_thinking`, None leaves it out, as a server does by default.
    one_row: where a template shows earlier answers otherwise than they were served, mark them there, and do not make a row for each.
    Raises ValueError where there is no template, it is broken, or there is no stop token.
    """
    name = tokenizer.name_or_path or "the target"
    if not tokenizer.chat_template:
        raise ValueError(f"{name}: its tokenizer has no chat template, so conversations cannot be rendered")
    added = {token: text for text, token in tokenizer.get_added_vocab().items()}
    stops = sorted({text for token in stop_ids if (text := added.get(token) or tokenizer.decode([token]))})
    if not stops:
        raise ValueError(f"{name}: no stop token; its generation config must name eos_token_id")
    template = tokenizer.get_chat_template()
    day = datetime.date.fromisoformat(date) if date else datetime.date.today()
    form, warnings = inspect(
        template, special_tokens=tokenizer.special_tokens_map, stops=stops, date=day, thinking=thinking, one_row=one_row
    )
    for warning in warnings:
        LOG.warning("%s: %s", name, warning)
    return Chat(
        form=form,
        encoder=open_encoder(tokenizer),
        stop_ids=stop_ids,
        mask_token_id=mask_token_id,
        date=day.isoformat() if "strftime_now" in template else "",
        warnings=warnings,
    )


def render(chat: Chat, messages: Messages, *, tools: Any = None, generation_prompt: bool) -> str:
    """The text that a server feeds to the target. Raises Unprovable where the template refuses the messages."""
    template = chat.form.template
    normal = normal_messages(messages, template.arguments)
    return render_chat(template, normal, tools=tools, generation_prompt=generation_prompt)


def token_rows(chat: Chat, conversation: Conversation) -> Rendered:
    """Ids and mask of a conversation. Raises Unprovable: its message is the reason to drop it by."""
    (rendered,) = token_rows_batch(chat, [conversation])
    if isinstance(rendered, Unprovable):
        raise rendered
    return rendered


def token_rows_batch(chat: Chat, conversations: Iterable[Conversation]) -> list[Rendered | Unprovable]:
    """`token_rows` of many conversations, in order, tokenized in one call; a reason stands where one is dropped."""
    conversations = list(conversations)
    proofs: list[Proof | Rendered | Unprovable] = []
    for conversation in conversations:
        try:
            proofs.append(_proven(chat, conversation))
        except Unprovable as reason:
            proofs.append(reason)
    texts = [draft.text for proof in proofs if isinstance(proof, Proof) for draft in proof.drafts]
    ids = iter(encode_all(chat.encoder, texts))
    done: list[Rendered | Unprovable] = []
    for conversation, proof in zip(conversations, proofs, strict=True):
        if not isinstance(proof, Proof):
            done.append(proof)
            continue
        encoded = [next(ids) for _ in proof.drafts]
        try:
            done.append(_rendered(chat, conversation, proof, encoded))
        except Unprovable as reason:
            done.append(reason)
    return done


def longest_run(mask: list[int]) -> int:
    """How many supervised tokens stand in a row at most: [0, 1, 1, 0, 1] -> 2."""
    return max(map(len, bytes(mask).split(b"\0")))


def served_ids(chat: Chat, messages: Messages, *, tools: Any = None) -> list[int]:
    """The prompt's ids for the next assistant turn, as a server builds them."""
    return encode_one(chat.encoder, render(chat, messages, tools=tools, generation_prompt=True))


def check_as_served(chat: Chat, conversation: Conversation, rendered: Rendered) -> dict[int, bool]:
    """For each supervised turn (message number) whether its row holds, up to the answer's end, what a server would have had.

    That is the served prompt's ids and then only supervised ones up to the stop token. Turns proven by a sentinel are not.
    """
    done: dict[int, bool] = {}
    chat = _for_row(chat, conversation)
    rows = [(row, _answers(row.loss_mask, row.input_ids, chat.stop_ids)) for row in rendered.rows]
    for turn, message in enumerate(conversation.messages):
        if message["role"] == "assistant" and turn > 0 and message.get("loss_mask") in (None, 1):
            prompt = served_ids(chat, conversation.messages[:turn], tools=conversation.tools)
            done[turn] = any(len(prompt) in starts and row.input_ids[: len(prompt)] == prompt for row, starts in rows)
    return done


def _answers(mask: list[int], ids: list[int], stop_ids: frozenset[int]) -> set[int]:
    """Where supervised answers start: two that touch are parted by the stop token."""
    return {i for i, marked in enumerate(mask) if marked and (i == 0 or not mask[i - 1] or ids[i - 1] in stop_ids)}


def _for_row(chat: Chat, conversation: Conversation) -> Chat:
    """The format as this row was generated: it may say itself whether with thinking."""
    if conversation.thinking is None:
        return chat
    template = with_thinking(chat.form.template, conversation.thinking)
    return replace(chat, form=replace(chat.form, template=template))


def _proven(chat: Chat, conversation: Conversation) -> Proof | Rendered:
    if conversation.input_ids is not None:
        return _given(conversation)
    chat = _for_row(chat, conversation)
    if conversation.text is not None:
        return prove(chat.form, replace(conversation, messages=parse_text(chat.form, conversation.text)))
    return prove(chat.form, conversation)


def _given(conversation: Conversation) -> Rendered:
    ids, mask = conversation.input_ids or [], conversation.loss_mask
    if mask is None or len(mask) != len(ids):
        raise Unprovable("loss_mask has another length than input_ids")
    if not {0, 1}.issuperset(mask):
        raise Unprovable("loss_mask holds other values than 0 and 1")
    return Rendered(rows=(TokenRow(id=conversation.id, input_ids=ids, loss_mask=mask),), method="tokens")


def _rendered(chat: Chat, conversation: Conversation, proof: Proof, encoded: list[list[int]]) -> Rendered:
    notes = list(proof.notes)
    made: list[tuple[int, TokenRow]] = []
    for draft, ids in zip(proof.drafts, encoded, strict=True):
        made += _rows(chat, conversation, draft, ids, notes)
    made.sort(key=lambda item: item[0])
    rows = tuple(row if len(made) == 1 else replace(row, id=f"{row.id}/turn-{turn}") for turn, row in made)
    method = "turns" if len(rows) > 1 and proof.method != "sentinel" else proof.method
    return Rendered(rows=rows, method=method, notes=tuple(notes))


def _rows(chat: Chat, conversation: Conversation, draft: Draft, ids: list[int], notes: list[str]) -> list[tuple[int, TokenRow]]:
    """The draft's row, and rows of their own for turns whose tokens are not proven in it, each with its last turn."""
    aligned, rows, spans = Alignment(chat.encoder, draft.text, ids), [], []
    for span in draft.spans:
        generated = conversation.messages[span.turn].get("token_ids") if conversation.text is None else None
        start, end = aligned.place(span.start), aligned.place(span.end)
        if start is not None and end is not None and generated in (None, ids[start:end]):
            spans.append((start, end))
            continue
        notes.append(MERGED if generated is None else OTHER_IDS)
        prompt = aligned.before(span.start)
        if generated is None and span is draft.spans[-1]:  # nothing after it was served: the row can hold its ids
            ids = prompt + aligned.after(span.start)
            _check_text(chat, ids[len(prompt) :], draft.text[span.start :])
            tail = len(aligned.after(span.end)) if span.end < len(draft.text) else 0
            spans.append((len(prompt), len(ids) - tail))
            continue
        answer = generated
        if answer is None:
            answer = encode_one(chat.encoder, draft.text[span.start : span.end])
            _check_text(chat, answer, draft.text[span.start : span.end])
        rows.append((span.turn, _row(chat, conversation.id, prompt + answer, [(len(prompt), len(prompt) + len(answer))])))
    if spans:
        rows.append((draft.spans[-1].turn, _row(chat, conversation.id, ids, spans)))
    return rows


def _row(chat: Chat, name: str, ids: list[int], spans: list[tuple[int, int]]) -> TokenRow:
    mask = [0] * len(ids)
    for start, end in spans:
        if not chat.stop_ids.isdisjoint(ids[start : end - 1]):
            raise Unprovable("a stop token inside an answer")
        if chat.mask_token_id is not None and chat.mask_token_id in ids[start:end]:
            raise Unprovable("the drafter's mask token inside an answer")
        mask[start:end] = [1] * (end - start)
    return TokenRow(id=name, input_ids=ids, loss_mask=mask)


def _check_text(chat: Chat, ids: list[int], text: str) -> None:
    if chat.encoder.tokenizer.decode(ids) != text:
        raise Unprovable("an answer whose tokens do not give its text back")
