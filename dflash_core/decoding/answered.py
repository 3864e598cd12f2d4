"""Finished conversations on disk: a crash loses none of them, and none is asked again.

    OUTPUT.work/  settings.json        what decides the answers: others do not mix
                  answers-00000.jsonl  one file a process, one row a line in the order of finishing
    OUTPUT                             all rows in the order of the source, once every conversation is through

A row's `source_hash` names the conversation that it answers, by id and content. The index holds one entry of about 300 bytes a
conversation. A last line that a kill tore is not counted as there; the files are removed when the output has their rows.
"""

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dflash_core.config import differences
from dflash_core.files import written_beside
from dflash_core.records import Conversation
from dflash_core.rundir import RunDirectory, hold

LOG = logging.getLogger(__name__)
SYNC_ROWS, SYNC_S = 64, 5.0  # a power failure costs at most so much; a killed process nothing


def key_of(conversation: Conversation) -> bytes:
    """16 bytes of (id, content)."""
    content = conversation.content_hash or [conversation.messages, conversation.tools]
    return hashlib.sha256(json.dumps([conversation.id, content], sort_keys=True).encode()).digest()[:16]


class Tally:
    """Counts over finished rows."""

    def __init__(self) -> None:
        self.rows = self.turns = self.with_token_ids = 0
        self.finish_reasons: Counter[str] = Counter()  # by turn
        self.ended: Counter[str] = Counter()  # rows that end early, by reason

    def add(self, row: dict[str, Any]) -> None:
        """Takes one row in."""
        answers = [message for message in row["messages"] if message["role"] == "assistant"]
        self.rows += 1
        self.turns += len(answers)
        self.with_token_ids += sum("token_ids" in answer for answer in answers)
        self.finish_reasons.update(answer["finish_reason"] for answer in answers)
        self.ended.update([row["ended"]] if "ended" in row else [])


class AnsweredRows:
    """The rows of one output, found again after any end; one process at a time."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.work = output.with_name(output.name + ".work")
        self.tally = Tally()
        self._files: list[Path] = []
        self._place: dict[bytes, tuple[int, int]] = {}  # key -> number of the file, offset of the line
        self._others = 0  # rows of conversations that are not wanted
        self._file: Any = None
        self._unsynced, self._synced_at = 0, 0.0

    def __contains__(self, key: bytes) -> bool:
        return key in self._place

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other processes out. Raises ValueError where one is already at it."""
        self.work.mkdir(parents=True, exist_ok=True)
        with hold(RunDirectory(root=self.work, state="resume")):
            yield

    def begin(self, settings: dict[str, Any]) -> None:
        """Raises ValueError where what is there was made with other settings."""
        record = self.work / "settings.json"
        if record.is_file():
            changed = differences(json.loads(record.read_text(encoding="utf-8")), settings)
            if changed:
                raise ValueError(
                    f"{self.output} has answers that were made otherwise; name another regeneration.output, or --fresh to set "
                    f"them aside. Different (old -> new): {'; '.join(changed)}"
                )
        elif self.output.exists():
            raise ValueError(f"{self.output} is there and was not made by regeneration; name another regeneration.output")
        else:
            _write_beside(record, [json.dumps(settings, indent=2).encode() + b"\n"])

    def load(self, wanted: Container[bytes]) -> None:
        """Finds the rows that are there, of the `wanted` keys."""
        for path in [self.output, *sorted(self.work.glob("answers-*.jsonl"))]:
            if path.is_file():
                self._load(path, wanted)
        if self._others:
            LOG.warning("%s: %d answers belong to no conversation of the source, as it is now", self.output, self._others)

    def _load(self, path: Path, wanted: Container[bytes]) -> None:
        self._files.append(path)
        offset = 0
        with path.open("rb") as file:
            for line in file:
                row = _parsed(line)
                if row is None:
                    LOG.warning("%s: %d bytes at %d are no finished row (torn when written); left out", path, len(line), offset)
                elif (key := bytes.fromhex(row["source_hash"])) not in wanted:
                    self._others += 1
                elif key not in self._place:
                    self._place[key] = (len(self._files) - 1, offset)
                    self.tally.add(row)
                offset += len(line)

    def append(self, key: bytes, row: dict[str, Any]) -> None:
        """Adds a finished row; it is safe from a kill when this returns, and soon after from a power failure."""
        if self._file is None:
            numbers = [int(path.stem.removeprefix("answers-")) for path in self.work.glob("answers-*.jsonl")]
            path = self.work / f"answers-{max(numbers, default=-1) + 1:05d}.jsonl"
            self._file, self._synced_at = path.open("ab", buffering=0), time.monotonic()
            self._files.append(path)
        line = json.dumps({"source_hash": key.hex(), **row}, ensure_ascii=False).encode() + b"\n"
        place = (len(self._files) - 1, self._file.tell())
        written = self._file.write(line)
        if written != len(line):
            raise OSError(f"{self._files[-1]}: only {written} of {len(line)} bytes were written; is the disk full?")
        self._place[key] = place
        self.tally.add(row)
        self._unsynced += 1
        if self._unsynced >= SYNC_ROWS or time.monotonic() - self._synced_at >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Waits until what was appended is on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        self._unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Ends appending."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None

    def write_output(self, order: Iterable[bytes]) -> None:
        """The output file: the rows of `order` that are there, in that order; nothing is written where it is so already."""
        self.close()
        places = [self._place[key] for key in order if key in self._place]
        if self._others or self._files != [self.output] or places != sorted(places):
            with ExitStack() as stack:
                files = [stack.enter_context(path.open("rb")) for path in self._files]

                def line(number: int, offset: int) -> bytes:
                    files[number].seek(offset)
                    return files[number].readline()

                _write_beside(self.output, (line(*place) for place in places))
        for path in self.work.glob("answers-*.jsonl"):
            path.unlink()

    def set_aside(self) -> None:
        """Renames what is there, so that everything is answered anew. Raises ValueError where it is in use."""
        if not self.work.exists():
            return
        number = 1
        while any(self._aside(path, number).exists() for path in (self.output, self.work)):
            number += 1
        with self.held():
            for path in (self.output, self.work):
                if path.exists():
                    path.rename(self._aside(path, number))

    @staticmethod
    def _aside(path: Path, number: int) -> Path:
        return path.with_name(f"{path.name}.old-{number}")


def _parsed(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return None


def _write_beside(path: Path, lines: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(path, durable=True) as place, place.open("wb") as file:
        file.writelines(lines)
