"""Conversations to token rows, and the ledger of what was left out.

read_conversations -> token_row (chat template, mask) -> cut or drop what is too long -> TokenRow
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.config import DataConfig
from dflash_core.data.chat import ChatTokenizer, Unprovable, token_row
from dflash_core.data.conversations import read_conversations
from dflash_core.records import TokenRow

MIN_SUPERVISED = 2  # an anchor is a supervised token followed by a supervised one


@dataclass
class Ledger:
    """rows in = kept + dropped, the dropped by reason; `cut` counts kept rows that lost their tail."""

    kept: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        """For the manifest: `{"rows_in": 3, "kept": 2, "cut": 0, "dropped": {"empty messages": 1}}`."""
        rows_in = self.kept + sum(self.dropped.values())
        return {"rows_in": rows_in, "kept": self.kept, "cut": self.cut, "dropped": dict(self.dropped.most_common())}


def load_tokenizer(path: str) -> Any:
    """The target's tokenizer. Raises ValueError where it has no chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if not tokenizer.chat_template:
        raise ValueError(f"target.path {path!r}: its tokenizer has no chat template, so conversations cannot be rendered")
    return tokenizer


def tokenize(
    config: DataConfig, tokenizer: ChatTokenizer, stop_ids: frozenset[int], vocab_size: int, ledger: Ledger
) -> Iterator[TokenRow]:
    """Token rows of all conversations that can be trained; `ledger` is complete when the iterator ends."""
    for conversation in read_conversations(config.conversations, ledger.dropped):
        try:
            row = token_row(tokenizer, conversation, stop_ids)
        except Unprovable as reason:
            ledger.dropped[str(reason)] += 1
            continue
        too_long = len(row.input_ids) > config.max_length
        if too_long and config.too_long == "drop":
            ledger.dropped["longer than max_length"] += 1
            continue
        ids, mask = row.input_ids[: config.max_length], row.loss_mask[: config.max_length]
        if sum(mask) < MIN_SUPERVISED:
            ledger.dropped[f"fewer than {MIN_SUPERVISED} supervised tokens" + (" after the cut" if too_long else "")] += 1
            continue
        if max(ids) >= vocab_size:
            ledger.dropped["token id outside the target's vocabulary"] += 1
            continue
        ledger.kept += 1
        ledger.cut += too_long
        yield TokenRow(id=row.id, input_ids=ids, loss_mask=mask)


def check_kept(ledger: Ledger, min_kept: float) -> None:
    """Raises ValueError with the main reasons when too few conversations can be trained."""
    counts = ledger.as_dict()
    share = counts["kept"] / max(1, counts["rows_in"])
    if counts["kept"] == 0 or share < min_kept:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in ledger.dropped.most_common(5))
        raise ValueError(
            f"only {counts['kept']} of {counts['rows_in']} conversations can be trained ({share:.0%}, "
            f"data.min_kept is {min_kept:.0%}). Dropped: {reasons}"
        )


def tokenizer_files(path: str) -> list[Path]:
    """The local files that decide how text becomes ids (none for a hub id, whose commit is its version)."""
    names = ("token*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
    return sorted(file for name in names for file in Path(path).glob(name) if file.is_file())
