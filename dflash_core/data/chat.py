"""The chat template, and which tokens of its render the target generated.

    messages --render--> text --tokenize--> input_ids
                          |
        for every assistant turn i:   [ prompt i, as a server renders it | answer ... stop ]  rest
                                        loss_mask 0                        loss_mask 1        0

A turn is marked only with a proof, in characters and tokens. Its prompt, the render of the messages before it with the generation
prompt, opens the whole render; and its answer is how the render that ends with this turn ends, so nothing of a later message is
in it. A row without that proof is dropped by name.
"""

from typing import Any, Protocol

import jinja2

from dflash_core.records import Conversation, TokenRow


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class Unprovable(ValueError):
    """A row whose mask cannot be proven; the message is the reason it is dropped by."""


def render(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], *, tools: Any, generation_prompt: bool) -> str:
    """The text a server would feed to the target. Raises Unprovable where the template refuses the messages."""
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:  # a template is foreign code
        raise Unprovable(f"template rejected the row: {str(error)[:80]}") from error
    return str(text)


def token_row(tokenizer: ChatTokenizer, conversation: Conversation, stop_ids: frozenset[int]) -> TokenRow:
    """Ids and mask of a conversation; the mask covers each answer up to and with its stop token.

    Raises Unprovable (the reason to drop the row by) where the template does not allow the proof.
    """
    text = render(tokenizer, conversation.messages, tools=conversation.tools, generation_prompt=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    mask = [0] * len(ids)
    for turn, message in enumerate(conversation.messages):
        if message["role"] == "assistant":
            start, end = _answer(tokenizer, conversation, turn, text, ids, stop_ids)
            mask[start:end] = [1] * (end - start)
    return TokenRow(id=conversation.id, input_ids=ids, loss_mask=mask)


def _answer(
    tokenizer: ChatTokenizer, conversation: Conversation, turn: int, text: str, ids: list[int], stop_ids: frozenset[int]
) -> tuple[int, int]:
    """First token of an assistant turn's answer and the one after its stop token."""
    messages, tools = conversation.messages, conversation.tools
    if turn == 0:
        raise Unprovable("the assistant speaks first")
    prompt = render(tokenizer, messages[:turn], tools=tools, generation_prompt=True)
    last = turn == len(messages) - 1
    own = text if last else render(tokenizer, messages[: turn + 1], tools=tools, generation_prompt=False)
    if not (text.startswith(prompt) and own.startswith(prompt)):
        raise Unprovable("the served prompt is no prefix of the render")
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    own_ids = ids if last else tokenizer.encode(own, add_special_tokens=False)
    start = len(prompt_ids)
    if not prompt_ids == ids[:start] == own_ids[:start]:
        raise Unprovable("the served prompt's tokens are no prefix of the row's")
    own_stops = _stops(own_ids, start, stop_ids)
    if not own_stops:
        raise Unprovable("an assistant turn without a stop token")
    if len(own_stops) > 1:
        raise Unprovable("a stop token inside an answer")
    end = (_stops(ids, start, stop_ids) or [start])[0] + 1
    if own_ids[start : own_stops[0] + 1][start - end :] != ids[start:end]:
        raise Unprovable("an answer that the template renders otherwise in a longer conversation")
    return start, end


def _stops(ids: list[int], start: int, stop_ids: frozenset[int]) -> list[int]:
    return [place for place in range(start, len(ids)) if ids[place] in stop_ids]
