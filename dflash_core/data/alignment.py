"""From characters to tokens: where a place in a text stands in its ids, proven without offsets.

    text  ...<|im_end|>\\n<|im_start|>assistant\\n | 42<|im_end|>\\n...      the place: one character
    ids   ...  151645  198   151644     77091  198 |  19 17 ...            the place: one token

A tokenizer cuts a text at its added tokens before anything else. So the k-th added token of the text is the k-th of the ids, and
what stands between the last one and the place has the ids that it has alone. Where those are in the row, the ids before the place
are exactly those of the text before it: what a server feeds to the target as its prompt. Offsets say less (they differ by the
tokenizer's family) and cost a fifth of the time.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SHORT = 200  # characters whose ids are remembered: headers repeat


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A tokenizer and its added tokens. Made by `open_encoder`."""

    tokenizer: Any
    added: dict[str, int]
    pattern: re.Pattern[str]
    ids_of_added: frozenset[int]
    remembered: dict[str, list[int]] = field(default_factory=dict)


def open_encoder(tokenizer: Any) -> Encoder:
    """The encoder of a transformers tokenizer."""
    added = dict(tokenizer.get_added_vocab())
    longest_first = sorted(added, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    return Encoder(tokenizer=tokenizer, added=added, pattern=pattern, ids_of_added=frozenset(added.values()))


def encode_all(encoder: Encoder, texts: Sequence[str]) -> list[list[int]]:
    """Ids of many texts in one call, special tokens as they stand in the text and no others."""
    if not texts:
        return []
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [list(encoder.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    backend.no_truncation()
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def encode_one(encoder: Encoder, text: str) -> list[int]:
    """Ids of one text; short ones are remembered."""
    if text in encoder.remembered:
        return encoder.remembered[text]
    (ids,) = encode_all(encoder, [text])
    if len(text) <= SHORT:
        encoder.remembered[text] = ids
    return ids


class Alignment:
    """A text and its ids, matched at their added tokens."""

    def __init__(self, encoder: Encoder, text: str, ids: list[int]) -> None:
        self.encoder, self.text, self.ids = encoder, text, ids
        found = list(encoder.pattern.finditer(text))
        marks = [number for number, token in enumerate(ids) if token in encoder.ids_of_added]
        if [encoder.added[match.group()] for match in found] != [ids[mark] for mark in marks]:
            found, marks = [], []  # an added token that takes only whole words, say: then all from the text's start
        self.starts, self.marks = [match.start() for match in found], marks

    def place(self, place: int) -> int | None:
        """How many ids stand before a place in the text (characters); None where a token may lie across it."""
        if place == len(self.text):
            return len(self.ids)
        first, between = self._since_added(place)
        end = first + len(between)
        return end if self.ids[first:end] == between else None

    def before(self, place: int) -> list[int]:
        """The ids of the text before a place as they are where the text ends there."""
        first, between = self._since_added(place)
        return self.ids[:first] + between

    def after(self, place: int) -> list[int]:
        """The ids of the text from a place on as they are where the text begins there."""
        following = bisect_left(self.starts, place)
        if following == len(self.starts):
            return encode_one(self.encoder, self.text[place:])
        return encode_one(self.encoder, self.text[place : self.starts[following]]) + self.ids[self.marks[following] :]

    def _since_added(self, place: int) -> tuple[int, list[int]]:
        """Which of the ids is the last added token before a place, and the ids of the text from it to the place."""
        last = bisect_left(self.starts, place) - 1
        since, first = (self.starts[last], self.marks[last]) if last >= 0 else (0, 0)
        return first, encode_one(self.encoder, self.text[since:place])
