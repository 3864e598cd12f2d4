"""Complete new lines of a growing JSONL file, read a piece at a time."""

import json
import os
from pathlib import Path
from typing import Any

READ_BYTES = 2**20  # at a time, so a store that is away for days costs no memory


class Tail:
    """What came since the last call; begins again when the file was replaced, as a resumed training does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode, self._offset = -1, 0

    def read(self) -> list[dict[str, Any]]:
        """What came since the last call, a piece at a time; lines of a replaced file come again."""
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            complete = file.read(READ_BYTES).rpartition(b"\n")
        self._offset += len(complete[0]) + len(complete[1])
        return [json.loads(line) for line in complete[0].splitlines()]
