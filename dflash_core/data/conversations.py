"""Conversations from files: JSON lines -> `Conversation`, everything left out counted by name.

conversations.jsonl --read_conversations--> Conversation, Conversation, ...   +   dropped {reason: count}
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.records import Conversation

ROLES = ("system", "user", "assistant", "tool")
LOG = logging.getLogger(__name__)


def read_conversations(path: str, dropped: Counter[str]) -> Iterator[Conversation]:
    """Conversations of a JSONL file, one object a line: {"id"?, "messages": [{"role", "content", ...}], "tools"?}.

    What is left out is counted in `dropped` by reason, the first of a kind logged with its line. Raises ValueError for a
    missing or empty file and for an unknown role, which is a mistake of the whole file and not of one row.
    """
    if not Path(path).is_file():
        raise ValueError(f"data.conversations {path!r}: no such file")
    seen = False
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            seen = True
            where = f"{path}, line {number}"
            row, reason = _parse(line, where)
            if row is not None:
                yield row
            else:
                if reason not in dropped:
                    LOG.warning("%s: dropped, %s (further ones are only counted)", where, reason)
                dropped[reason] += 1
    if not seen:
        raise ValueError(f"data.conversations {path!r} is empty: give at least one conversation")


def _parse(line: bytes, where: str) -> tuple[Conversation | None, str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None, "broken JSON"
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        return None, "no messages"
    if not row["messages"]:
        return None, "empty messages"
    messages = []
    for message in row["messages"]:
        if not isinstance(message, dict):
            return None, "message is no object"
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"{where}: unknown role {role!r}; known are {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            return None, "content is no text"
        messages.append({key: value for key, value in message.items() if value is not None})
    if not any(message["role"] == "assistant" for message in messages):
        return None, "no assistant turn"
    if not _encodable([messages, row.get("tools")]):
        return None, "text is no valid Unicode"
    return Conversation(id=_identity(row, line), messages=messages, tools=row.get("tools") or None), ""


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a lone surrogate from a \ud83d escape
        return False
    return True


def _identity(row: dict[str, Any], line: bytes) -> str:
    return str(row["id"]) if row.get("id") is not None else hashlib.sha256(line).hexdigest()[:16]
