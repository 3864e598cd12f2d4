"""One part of the conversations to token rows, and the ledger of what was left out.

part-00000.jsonl --read_part--> batches --token_rows_batch--> cut, or dropped by name --> rows-00000.arrow  [+ .validation.arrow]

Parts are independent of each other: rows keep the order of the part, and the parts' ledgers add up.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dflash_core.data.chat import Chat, Rendered, Unprovable, token_rows_batch
from dflash_core.data.conversations import read_part
from dflash_core.data.shards import ROWS
from dflash_core.data.statistics import Rows, statistics
from dflash_core.files import beside
from dflash_core.records import Conversation, TokenRow

BATCH_ROWS = 64  # conversations tokenized in one call; a stop request waits for no more
WRITE_TOKENS = 2**20  # a record batch of a part's file
SUPERVISED_PAIR = b"\x01\x01"  # an anchor is a supervised token followed by a supervised one
FEW = "fewer than 2 supervised tokens in a row"
LONG = "longer than max_length"
OUTSIDE = "token id outside the target's vocabulary"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row ready to be written."""

    input_ids: np.ndarray  # [T] int32
    loss_mask: bytes  # [T] of 0 and 1
    cut: bool  # it lost its tail


class Interrupted(Exception):
    """Tokenization ended between two batches because it was asked to."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a row must keep to."""

    max_length: int  # tokens
    too_long: Literal["cut", "drop"]
    vocab_size: int  # every id is below


@dataclass
class Ledger:
    """Conversations in = kept + dropped, the dropped by reason. A kept conversation gave at least one row."""

    kept: int = 0
    rows: int = 0  # written, on both sides of the split
    validation_rows: int = 0  # of them
    cut: int = 0  # of them, those that lost their tail
    dropped: Counter[str] = field(default_factory=Counter)
    rows_dropped: Counter[str] = field(default_factory=Counter)  # single rows of kept conversations
    methods: Counter[str] = field(default_factory=Counter)  # kept conversations by how their mask was proven
    notes: Counter[str] = field(default_factory=Counter)  # what the proof remarked about kept conversations
    statistics: Rows = field(default_factory=Rows)  # of the rows written

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def rows_in(self) -> int:
        """Conversations."""
        return self.kept + self.dropped.total()

    def as_dict(self) -> dict[str, Any]:
        """For the manifest: `{"rows_in": 3, "kept": 2, "dropped": {"empty messages": 1}, "rows": 2, ...}`."""
        counts = {name: _ordered(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
        return {"rows_in": self.rows_in, **counts, "statistics": statistics(self.statistics)}


def _ordered(counter: Counter[str]) -> dict[str, int]:
    """Most frequent first, equal counts by name: the same whatever order the parts came in."""
    return dict(sorted(counter.items(), key=lambda entry: (-entry[1], entry[0])))


def check_kept(ledger: Ledger, min_kept: float, *, by_choice: Collection[str] = ()) -> None:
    """Raises ValueError with the main reasons when too few conversations can be trained.

    What was left out by choice, a policy or limit of the config, does not count; `by_choice` are those reasons.
    """
    unusable = Counter({reason: count for reason, count in ledger.dropped.items() if reason not in by_choice})
    rows = ledger.kept + unusable.total()
    share = ledger.kept / max(1, rows)
    if ledger.kept == 0 or share < min_kept:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in (unusable or ledger.dropped).most_common(5))
        raise ValueError(
            f"only {ledger.kept} of {rows} conversations can be trained ({share:.0%}, "
            f"data.min_kept is {min_kept:.0%}). Dropped: {reasons}"
        )


def load_tokenizer(path: str) -> Any:
    """The target's tokenizer. Raises ValueError where it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise ValueError(f"target.path {path!r}: its tokenizer has no chat template, so conversations cannot be rendered")
    return tokenizer


def tokenizer_files(path: str) -> list[Path]:
    """The local files that decide how text becomes ids (none for a hub id, whose commit is its version)."""
    names = ("token*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
    return sorted(file for name in names for file in Path(path).glob(name) if file.is_file())


def prints_date(path: str) -> bool:
    """Whether the chat template in the tokenizer's files asks for the current date."""
    return any(b"strftime_now" in file.read_bytes() for file in tokenizer_files(path) if file.suffix in (".jinja", ".json"))


# ---- a part ----------------------------------------------------------------------------------------------------------


def row_files(part: Path) -> tuple[Path, Path]:
    """(training, validation): where the rows of a part are written, beside it."""
    name = part.stem.replace("part", "rows", 1)
    return part.with_name(f"{name}.arrow"), part.with_name(f"{name}.validation.arrow")


def tokenize_part(part: Path, *, chat: Chat, limits: Limits, tick: Callable[[int], None]) -> Ledger:
    """The conversations of a part into its `row_files`; a side without rows has no file.

    `tick(conversations)` is called after every batch, and with 0 before the first; what it raises ends the part, which then
    leaves no file.
    """
    ledger = Ledger()
    training, validation = (RowFile(path) for path in row_files(part))
    tick(0)
    with training, validation:
        for conversations in _batches(read_part(part)):
            rendered = token_rows_batch(chat, conversations)
            for conversation, result in zip(conversations, rendered, strict=True):
                rows = _fitting(result, limits, ledger)
                ledger.validation_rows += len(rows) if conversation.validation else 0
                (validation if conversation.validation else training).add(rows)
            tick(len(conversations))
    return ledger


def _batches(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    conversations = iter(conversations)
    while batch := list(itertools.islice(conversations, BATCH_ROWS)):
        yield batch


def _fitting(result: Rendered | Unprovable, limits: Limits, ledger: Ledger) -> list[Row]:
    """The rows of a conversation that can be trained, counted."""
    if isinstance(result, Unprovable):
        ledger.dropped[str(result)] += 1
        return []
    fitted = [fit(row, limits) for row in result.rows]
    rows = [row for row in fitted if isinstance(row, Row)]
    reasons = [reason for reason in fitted if isinstance(reason, str)]
    if not rows:
        ledger.dropped[reasons[0]] += 1
        return []
    ledger.kept += 1
    ledger.rows += len(rows)
    ledger.cut += sum(row.cut for row in rows)
    for row in rows:
        ledger.statistics.count(len(row.input_ids), row.loss_mask.count(1))
    ledger.rows_dropped.update(reasons)
    ledger.methods[result.method] += 1
    ledger.notes.update(result.notes)
    return rows


def fit(row: TokenRow, limits: Limits) -> Row | str:
    """The row within the limits, or the reason to drop it by."""
    too_long = len(row.input_ids) > limits.max_length
    if too_long and limits.too_long == "drop":
        return LONG
    mask = bytes(row.loss_mask[: limits.max_length])
    if SUPERVISED_PAIR not in mask:
        return FEW + (" after the cut" if too_long else "")
    ids = np.array(row.input_ids[: limits.max_length], np.int64)
    if ids.max() >= limits.vocab_size or ids.min() < 0:
        return OUTSIDE
    return Row(input_ids=ids.astype(np.int32), loss_mask=mask, cut=too_long)


class RowFile:
    """Token rows into one Arrow stream: written beside its name and renamed; without rows, or after an error, no file."""

    def __init__(self, path: Path) -> None:
        self._path, self._beside = path, beside(path)
        self._waiting: list[Row] = []
        self._tokens = 0
        self._sink: Any = None
        self._writer: Any = None

    def __enter__(self) -> "RowFile":
        return self

    def add(self, rows: Iterable[Row]) -> None:
        """Keeps the order; writes when WRITE_TOKENS are waiting."""
        for row in rows:
            self._waiting.append(row)
            self._tokens += len(row.input_ids)
        if self._tokens >= WRITE_TOKENS:
            self._write()

    def _write(self) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._beside), "wb")
            self._writer = pa.ipc.new_stream(self._sink, ROWS)
        self._writer.write_batch(record_batch(self._waiting))
        self._waiting, self._tokens = [], 0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._waiting:
            self._write()
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            if kind is None:
                self._beside.rename(self._path)
            else:
                self._beside.unlink()


def record_batch(rows: list[Row]) -> pa.RecordBatch:
    """Rows as one Arrow record batch of the schema ROWS."""
    offsets = np.cumsum([0, *(len(row.input_ids) for row in rows)], dtype=np.int32)
    ids = np.concatenate([row.input_ids for row in rows])
    mask = np.frombuffer(b"".join(row.loss_mask for row in rows), np.int8)
    return pa.RecordBatch.from_arrays(
        [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (ids, mask)], schema=ROWS
    )
