"""JSON text to values, a value at a time: lines, arrays, and a single object over many lines.

Every value comes with a fault, "" where there is none; a broken line costs that line, a broken array what follows it.
"""

import codecs
import json
from collections.abc import Iterator
from io import TextIOWrapper
from typing import IO, Any

CHUNK = 2**18  # characters read at once
LONGEST = 2**28  # characters of one value of an array
BROKEN = "broken JSON"
SPACE = b" \t\r\n"


def is_array(stream: IO[bytes]) -> bool:
    """Whether the text begins with `[`; the stream is put back to its start."""
    head = stream.read(CHUNK).removeprefix(codecs.BOM_UTF8).lstrip(SPACE)
    stream.seek(0)
    return head.startswith(b"[")


def object_or_lines(stream: IO[bytes], *, lines_only: bool) -> Iterator[tuple[int, Any, str]]:
    """(line number, value, fault) of each line that is not blank; of a single object over many lines, once.

    A file is a single object where its first line alone is no JSON but the whole is (`lines_only`: never).
    """
    first = not lines_only
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        value, fault = _parsed(line)
        first, alone = False, first
        if fault and alone:
            whole = line + stream.read(LONGEST)
            value, broken = _parsed(whole)
            if broken:
                for place, part in enumerate(whole.splitlines(), number):
                    if part.strip():
                        yield place, *_parsed(part)
            else:
                yield number, value, ""
            return
        yield number, value, fault


def _parsed(text: bytes) -> tuple[Any, str]:
    try:
        return json.loads(text), ""
    except (ValueError, RecursionError):
        return None, BROKEN


def array_values(stream: IO[bytes]) -> Iterator[tuple[Any, str]]:
    """(value, fault) of each value of a JSON array; an array of turns is one value, the bare conversation."""
    with TextIOWrapper(stream, encoding="utf-8-sig") as text:
        values = _array(text)
        first = next(values, None)
        if first is not None and is_turn(first[0]):
            turns = [first, *values]
            yield [value for value, _ in turns], next((fault for _, fault in turns if fault), "")
        elif first is not None:
            yield first
            yield from values


def is_turn(value: Any) -> bool:
    """Whether a value is one turn of a chat, in OpenAI's or ShareGPT's words."""
    return isinstance(value, dict) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


def _array(text: TextIOWrapper) -> Iterator[tuple[Any, str]]:
    """The text grows until a value in it is complete, by its own length each time, so that all stays linear."""
    decoder = json.JSONDecoder()
    buffer = text.read(CHUNK)
    while buffer.isspace():
        buffer = text.read(CHUNK)
    place = buffer.index("[") + 1
    first = True
    while True:
        start = _skip(buffer, place, comma=not first)
        if buffer[start : start + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, start)
        except (ValueError, RecursionError):
            value, end = None, len(buffer)
        if end < len(buffer) or isinstance(value, dict | list | str):  # the rest of a number may still come
            yield value, ""
            place, first = end, False
            continue
        more = text.read(max(CHUNK, len(buffer) - place)) if len(buffer) - place < LONGEST else ""
        if not more:
            yield None, BROKEN
            return
        buffer, place = buffer[place:] + more, 0


def _skip(text: str, place: int, *, comma: bool) -> int:
    """The next place that is no blank, behind one comma where one is due."""
    while place < len(text) and (text[place].isspace() or (comma and text[place] == ",")):
        comma = comma and text[place] != ","
        place += 1
    return place
