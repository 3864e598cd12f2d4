"""One reading of all sources: usable rows go to a spool file, what decides about them is remembered.

for each row 27 bytes in memory; where near-duplicates are sought 512 bytes more in a file that is mapped, and as many for the first
prompts where a validation split goes by them.
"""

from __future__ import annotations  # array[int] is a name for type checkers alone

import hashlib
import json
import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dflash_core.data import duplicates
from dflash_core.data.conversations import Drops, cut_by_length, to_conversation, to_line
from dflash_core.data.duplicates import Hashes
from dflash_core.data.shapes import Unusable
from dflash_core.data.sources import locate, read_rows
from dflash_core.data_config import DataConfig
from dflash_core.records import Conversation

SAID_EVERY = 50_000  # rows
LOG = logging.getLogger(__name__)


@dataclass
class Survey:
    """What is remembered of each usable row, in reading order, and of all others."""

    offsets: array[int] = field(default_factory=lambda: array("Q"))  # in the spool file
    contents: array[int] = field(default_factory=lambda: array("Q"))  # 64 bits of the content hash
    prompts: array[int] = field(default_factory=lambda: array("Q"))  # 64 bits of the hash of the first prompt
    sources: array[int] = field(default_factory=lambda: array("H"))
    truncated: bytearray = field(default_factory=bytearray)
    overlap: bytearray = field(default_factory=bytearray)
    drops: Drops = field(default_factory=Drops)
    seen: list[dict[str, Any]] = field(default_factory=list)  # of each source


class Working:
    """The files of a selection at work in a directory; removed at the end of the context."""

    def __init__(self, directory: Path) -> None:
        self.spool = directory / "spool.jsonl"
        self.minhash = {"contents": directory / "contents.minhash", "prompts": directory / "prompts.minhash"}

    def __enter__(self) -> Working:
        return self

    def __exit__(self, *_: object) -> None:
        for path in (self.spool, *self.minhash.values()):
            path.unlink(missing_ok=True)

    def signatures(self, of: Literal["contents", "prompts"]) -> NDArray[np.uint32]:
        """MinHash signatures [N, P] of all usable rows, mapped."""
        return np.memmap(self.minhash[of], np.uint32, "r").reshape(-1, duplicates.PERMUTATIONS)


def survey_sources(config: DataConfig, prompts: Hashes, working: Working) -> Survey:
    """Reads every source once. `prompts` are duplicates.prompt_grams. Raises ValueError for a source that is missing."""
    survey = Survey()
    minhash = working.minhash
    with (
        open(working.spool, "wb") as spool,
        open(minhash["contents"], "wb") as contents,
        open(minhash["prompts"], "wb") as firsts,
    ):
        for number, source in enumerate(config.conversations):
            location = locate(source)
            seen: dict[str, Any] = {"path": source.path, "rows_in": 0, "usable": 0, "files": len(location.files)}
            seen |= {"ignored": list(location.ignored), "empty": list(location.empty)}
            survey.seen.append(seen)
            for raw in read_rows(source, location):
                seen["rows_in"] += 1
                try:
                    conversation = to_conversation(raw, source=source, roles=config.roles)
                except Unusable as reason:
                    survey.drops.add(str(reason), raw.place)
                    continue
                seen["usable"] += 1
                survey.sources.append(number)
                survey.offsets.append(spool.tell())
                survey.truncated.append(cut_by_length(raw))
                spool.write(to_line(conversation).encode())
                _fingerprint(config, conversation, survey, prompts, contents, firsts)
                if len(survey.offsets) % SAID_EVERY == 0:
                    LOG.info("%d conversations read", len(survey.offsets))
    return survey


def _fingerprint(
    config: DataConfig, conversation: Conversation, survey: Survey, prompts: Hashes, contents: IO[bytes], firsts: IO[bytes]
) -> None:
    """Hashes of the content and of the first prompt, exact and near, and whether an evaluation prompt is in it."""
    prompt = first_prompt(conversation)
    normal = " ".join(duplicates.words(prompt)) or prompt
    survey.contents.append(int(conversation.content_hash[:16], 16))
    survey.prompts.append(int.from_bytes(hashlib.sha256(normal.encode()).digest()[:8], "big"))
    messages: list[Hashes] = []
    if config.prompt_overlap != "off" or config.near_duplicates != "off":
        messages = [duplicates.word_hashes(text) for text in _texts(conversation)]
    survey.overlap.append(config.prompt_overlap != "off" and any(duplicates.overlaps(each, prompts) for each in messages))
    if config.near_duplicates != "off":
        grams = duplicates.grams(np.concatenate(messages), duplicates.WORDS)
        contents.write(duplicates.signature(grams).tobytes())
    if config.validation and config.validation_by == "near_duplicates":
        firsts.write(duplicates.signature(duplicates.character_grams(prompt)).tobytes())


def _texts(conversation: Conversation) -> Iterator[str]:
    """All that a conversation says, a text a message; ids stand as numbers."""
    if conversation.text is not None:
        yield conversation.text
    if conversation.input_ids is not None:
        yield " ".join(map(str, conversation.input_ids))
    for message in conversation.messages:
        yield message["content"]
        yield from (json.dumps(message[key], ensure_ascii=False) for key in ("tool_calls", "reasoning_content") if key in message)


def first_prompt(conversation: Conversation) -> str:
    """What the split goes by: the first user turn; of a row without turns what stands before the answer, or all of it."""
    for message in conversation.messages:
        if message["role"] == "user":
            return str(message["content"])
    if conversation.input_ids is not None and conversation.loss_mask is not None:
        answer = conversation.loss_mask.index(1) if 1 in conversation.loss_mask else None
        return " ".join(map(str, conversation.input_ids[:answer]))
    return conversation.text or (str(conversation.messages[0]["content"]) if conversation.messages else "")
