"""Conversations from raw rows, everything left out counted by name; part files between the steps.

    RawRow --to_conversation--> Conversation | Unusable(reason) --> Drops: {reason: count}, first places

shapes.py knows the shapes. A row keeps its own id beside a hash of what it says, so equal ids with other content are other rows.
"""

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.data import shapes
from dflash_core.data.shapes import KNOWN_ROLES, Unusable
from dflash_core.data.sources import RawRow, locate, read_rows
from dflash_core.data_config import DataConfig, SourceConfig
from dflash_core.files import written_beside
from dflash_core.records import Conversation

IDS = ("id", "conversation_id")
PLACES = 5  # kept of each reason
REASONS = 50  # told apart; a file of garbage has a role for each row
LOG = logging.getLogger(__name__)
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Conversation)}


@dataclass
class Drops:
    """Rows left out, by reason, and where the first ones of each stand."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Counts a row; the first of a reason is logged with its place."""
        if reason not in self.counts and len(self.counts) >= REASONS:
            reason = "one of many other reasons"
        if reason not in self.counts:
            LOG.warning("%s: dropped, %s (further ones are only counted)", place, reason)
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES:
            places.append(place)


def read_conversations(config: DataConfig, dropped: Counter[str], *, answers: bool = True) -> Iterator[Conversation]:
    """Conversations of all sources in order, nothing selected. What is left out is counted in `dropped` by reason.

    `answers`: a row needs an assistant turn; without, a user turn. Raises ValueError for a path that is missing or holds no
    rows, and where every row has an unknown role, which is a mistake of the source and not of a row.
    """
    drops, kept = Drops(counts=dropped), 0
    for source in config.conversations:
        for raw in read_rows(source, locate(source)):
            try:
                conversation = to_conversation(raw, source=source, roles=config.roles, answers=answers)
            except Unusable as reason:
                drops.add(str(reason), raw.place)
                continue
            kept += 1
            yield conversation
    if not kept and all(reason.startswith("unknown role") for reason in drops.counts):
        check_usable(config, drops, kept)


def check_usable(config: DataConfig, drops: Drops, usable: int) -> None:
    """Raises ValueError with the main reasons, the first with its place, when too few rows can be used."""
    rows = usable + drops.counts.total()
    if not rows:
        paths = ", ".join(repr(source.path) for source in config.conversations)
        raise ValueError(f"data.conversations {paths} is empty: give at least one conversation")
    if usable and usable / rows >= config.min_kept:
        return
    reason, _ = drops.counts.most_common(1)[0]
    known = f"; known are {', '.join(KNOWN_ROLES)}, data.roles names others" if reason.startswith("unknown role") else ""
    reasons = "; ".join(f"{count} x {name}" for name, count in drops.counts.most_common(5))
    raise ValueError(
        f"{drops.places[reason][0]}: {reason}{known}; only {usable} of {rows} conversations can be trained "
        f"({usable / rows:.0%}, data.min_kept is {config.min_kept:.0%}). Dropped: {reasons}"
    )


def to_conversation(raw: RawRow, *, source: SourceConfig, roles: Mapping[str, str], answers: bool = True) -> Conversation:
    """The conversation of a row, with an id and the hash of its content. Raises Unusable with the reason to drop it by."""
    if raw.fault:
        raise Unusable(raw.fault)
    try:
        row = shapes.without_nulls(raw.value, columnar=raw.columnar)
        if source.columns and isinstance(row, dict):
            named = {column: row[own] for column, own in source.columns.items() if own in row}
            row = {key: value for key, value in row.items() if key not in source.columns.values()} | named
        said = shapes.fields(row, source.shape, roles)
        content_hash = _content_hash(said)
    except RecursionError as error:
        raise Unusable("nested too deeply") from error
    needed = "assistant" if answers else "user"
    if said["messages"] and not any(message["role"] == needed for message in said["messages"]):
        raise Unusable(f"no {needed} turn")
    return Conversation(id=_own_id(row) or content_hash[:16], source=source.path, content_hash=content_hash, **said)


def _content_hash(said: dict[str, Any]) -> str:
    """sha256 of what a row says, in canonical form: neither its id nor where it stands."""
    try:
        text = json.dumps(said, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:  # a lone surrogate from a \ud83d escape
        raise Unusable("text is no valid Unicode") from error
    except TypeError as error:  # a date or bytes in a column
        raise Unusable("a field that is no JSON value") from error
    return hashlib.sha256(text).hexdigest()


def _own_id(row: Any) -> str:
    found = next((row[name] for name in IDS if name in row), "") if isinstance(row, dict) else ""
    return str(found) if isinstance(found, str | int) else ""


def cut_by_length(raw: RawRow) -> bool:
    """Whether generation cut an answer of this row: `finish_reason` is `length` on the row or on a message."""
    row = raw.value
    if not isinstance(row, dict):
        return False
    turns = row.get("messages") or row.get("conversations") or []
    marked = [row, *(turns if isinstance(turns, list) else [])]
    return any(isinstance(each, dict) and each.get("finish_reason") == "length" for each in marked)


def to_line(conversation: Conversation) -> str:
    """A conversation as one line of a part file."""
    fields = {name: value for name, value in vars(conversation).items() if value != DEFAULTS[name]}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def from_line(line: str | bytes) -> Conversation:
    """The conversation of a line that `to_line` made."""
    return Conversation(**json.loads(line))


def write_part(path: Path, conversations: Iterable[Conversation]) -> int:
    """Conversations into one JSONL file of normal form, written beside and renamed; returns how many."""
    count = 0
    with written_beside(path) as place, open(place, "w", encoding="utf-8") as file:
        for conversation in conversations:
            file.write(to_line(conversation))
            count += 1
    return count


def read_part(path: Path) -> Iterator[Conversation]:
    """The conversations of a file that `write_part` made, in order."""
    with open(path, encoding="utf-8") as file:
        yield from map(from_line, file)
