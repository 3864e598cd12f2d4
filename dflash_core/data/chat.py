"""The chat template, and which tokens of its render the target generated.

    messages --render--> text --tokenize--> input_ids
                          |
        for every assistant turn i:   [ prompt i, as a server renders it | answer ... stop ]  rest
                                        loss_mask 0                        loss_mask 1        0

The prompt of turn i is the render of the messages before it with the generation prompt. It marks the turn only if it is
proven to be a prefix of the whole render, in characters and in tokens; a row without that proof is dropped by name.
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
    except jinja2.TemplateError as error:
        raise Unprovable(f"template rejected the row: {error}") from error
    return str(text)


def token_row(tokenizer: ChatTokenizer, conversation: Conversation, stop_ids: frozenset[int]) -> TokenRow:
    """Ids and mask of a conversation; the mask covers each answer up to and with its stop token.

    Raises Unprovable (the reason to drop the row by) where the template does not allow the proof.
    """
    messages, tools = conversation.messages, conversation.tools
    text = render(tokenizer, messages, tools=tools, generation_prompt=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:turn], tools=tools, generation_prompt=True)
        if not text.startswith(prompt):
            raise Unprovable("the served prompt is no prefix of the render")
        start = len(tokenizer.encode(prompt, add_special_tokens=False))
        if tokenizer.encode(prompt, add_special_tokens=False) != ids[:start]:
            raise Unprovable("the served prompt's tokens are no prefix of the row's")
        stop = next((place for place in range(start, len(ids)) if ids[place] in stop_ids), None)
        if stop is None:
            raise Unprovable("an assistant turn without a stop token")
        mask[start : stop + 1] = [1] * (stop + 1 - start)
    return TokenRow(id=conversation.id, input_ids=ids, loss_mask=mask)
