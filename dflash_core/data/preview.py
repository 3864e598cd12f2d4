"""Conversations as they will be trained, to look at: which tokens are supervised, and whether a server builds the same prompt.

Conversation --look--> Look(pieces of text, served?) --page--> preview.html      (the terminal view is made of the same pieces)
"""

import html
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.data.chat import Chat, Unprovable, check_as_served, token_rows
from dflash_core.data.conversations import read_part
from dflash_core.data.tokenization import Limits, Row, fit
from dflash_core.records import Conversation, TokenRow

LEGEND = "Supervised tokens, which the drafter learns to predict, are <mark>marked</mark>; special tokens stand in <b>boxes</b>."


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of tokens of one kind as text."""

    text: str
    supervised: bool
    special: bool  # a single token of the tokenizer's added ones, such as <|im_end|>


@dataclass(frozen=True, kw_only=True)
class Look:
    """One row, or a conversation that gives none."""

    id: str
    pieces: tuple[Piece, ...] = ()
    tokens: int = 0
    supervised: int = 0
    method: str = ""  # how its mask was proven
    notes: tuple[str, ...] = ()
    served: dict[int, bool] | None = None  # turn -> a server's ids of prompt and answer are the row's; None: nothing to compare
    dropped: str = ""  # the reason, where it is not trained

    @property
    def headline(self) -> str:
        """`q7: 81 tokens, 40 supervised, mask proven by prefix, as served`."""
        if not self.pieces:
            return f"{self.id}: dropped, {self.dropped}"
        counts = (f"{self.tokens:,} tokens", f"{self.supervised:,} supervised", f"mask proven by {self.method}")
        dropped = (f"DROPPED: {self.dropped}",) if self.dropped else ()
        return f"{self.id}: " + ", ".join((*counts, self.as_served, *self.notes, *dropped))

    @property
    def as_served(self) -> str:
        """What a comparison with a server's ids says."""
        if not self.served:
            return "nothing to compare with a server"
        wrong = [str(turn) for turn, same in self.served.items() if not same]
        return f"NOT AS SERVED at message {', '.join(wrong)}" if wrong else "as served"


def spread(parts: Sequence[Path], *, rows: int, count: int) -> list[Conversation]:
    """`count` of the parts' `rows` conversations, evenly over all of them."""
    count = min(count, rows)
    chosen = iter([*(number * rows // count for number in range(count)), -1])
    nearest, found = next(chosen), []
    for place, conversation in enumerate(itertools.chain.from_iterable(map(read_part, parts))):
        if place == nearest:
            found.append(conversation)
            nearest = next(chosen)
            if nearest < 0:
                break
    return found


def look(conversation: Conversation, *, chat: Chat, tokenizer: Any, limits: Limits) -> list[Look]:
    """The rows of a conversation, those that are dropped with the reason."""
    try:
        rendered = token_rows(chat, conversation)
    except Unprovable as reason:
        return [Look(id=conversation.id, dropped=str(reason))]
    served = check_as_served(chat, conversation, rendered) if conversation.messages else None
    looks = []
    for row in rendered.rows:
        fitted = fit(row, limits)
        cut = (f"cut to {limits.max_length:,} tokens",) if isinstance(fitted, Row) and fitted.cut else ()
        looks.append(
            Look(
                id=row.id,
                pieces=tuple(_pieces(row, tokenizer)),
                tokens=len(row.input_ids),
                supervised=sum(row.loss_mask),
                method=rendered.method,
                notes=(*rendered.notes, *cut),
                served=served,
                dropped="" if isinstance(fitted, Row) else fitted,
            )
        )
    return looks


def _pieces(row: TokenRow, tokenizer: Any) -> Iterator[Piece]:
    """Neighbouring tokens of one kind together, so that characters of several tokens come out whole."""
    added = tokenizer.added_tokens_decoder
    kinds = [(bool(mask), token in added) for token, mask in zip(row.input_ids, row.loss_mask, strict=True)]
    place = 0
    for (supervised, special), run in itertools.groupby(kinds):
        ids = row.input_ids[place : (place := place + len(list(run)))]
        if special:
            yield from (Piece(text=added[token].content, supervised=supervised, special=True) for token in ids)
        else:
            text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield Piece(text=text, supervised=supervised, special=False)


# ---- the page --------------------------------------------------------------------------------------------------------

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
h2 { font-size: 1rem; margin: 2rem 0 .4rem } h2.bad { color: #a33 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: .8rem 1rem; border-radius: 6px; margin: 0 }
mark { background: #bfe3c4; color: inherit }
b { font-weight: 400; font-size: .85em; border: 1px solid #999; border-radius: 4px; padding: 0 .25em; color: #555 }
mark b { border-color: #2c7a3b; color: #1d5a2a }
"""


def page(looks: Sequence[Look], *, title: str) -> str:
    """A page of its own, with no script and nothing to load; all that came from the data is escaped."""
    body = "".join(_section(shown) for shown in looks)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{html.escape(title)}</h1><p>{LEGEND}</p>{body}</body></html>\n"


def _section(shown: Look) -> str:
    bad = bool(shown.dropped) or not all((shown.served or {}).values())
    pieces = "".join(_marked(piece) for piece in shown.pieces)
    return f"<h2{' class=bad' if bad else ''}>{html.escape(shown.headline)}</h2>" + (f"<pre>\n{pieces}</pre>" if pieces else "")


def _marked(piece: Piece) -> str:
    text = html.escape(piece.text)
    text = f"<b>{text}</b>" if piece.special else text
    return f"<mark>{text}</mark>" if piece.supervised else text
