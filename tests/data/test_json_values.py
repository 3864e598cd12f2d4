"""JSON a value at a time: the same values as the whole text parsed at once, however it is cut."""

import io
import json
from typing import Any

import pytest

from dflash_core.data import json_values
from dflash_core.data.json_values import array_values, is_array, object_or_lines

ROWS: list[Any] = [
    {"a": "x, ]} [{"},
    [1, 2],
    "text ]",
    12345,
    {},
    None,
    {"n": {"m": [[], {"k": "\u00e9\U0001f642"}]}},
    -1.5e9,
    True,
]


def of_array(text: str | bytes) -> list[tuple[Any, str]]:
    return list(array_values(io.BytesIO(text if isinstance(text, bytes) else text.encode())))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_gives_the_values_of_the_whole_however_it_is_cut(
    chunk: int, indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_values, "CHUNK", chunk)
    text = " \n" + json.dumps(ROWS * 3, indent=indent, ensure_ascii=False)
    assert of_array(text) == [(value, "") for value in ROWS * 3]


def test_an_empty_array_and_a_byte_order_mark() -> None:
    assert of_array(b"[ ]") == []
    assert of_array(b"\xef\xbb\xbf[1, 2 ]") == [(1, ""), (2, "")]
    assert is_array(io.BytesIO(b"\xef\xbb\xbf\n [1]"))
    assert not is_array(io.BytesIO(b'{"a": [1]}'))


@pytest.mark.parametrize("text", ['[1, {"a": 2}, {"b"', '[1, {"a": 2}, oops, 3]', '[1, {"a": 2}', '[1, {"a": 2}, "' + "[" * 10])
def test_what_stands_before_a_break_is_kept_and_the_break_is_one_fault(text: str) -> None:
    assert of_array(text) == [(1, ""), ({"a": 2}, ""), (None, "broken JSON")]


def test_an_array_of_turns_is_one_conversation() -> None:
    turns = [{"role": "user", "content": "a"}, {"from": "gpt", "value": "b"}]
    assert of_array(json.dumps(turns)) == [(turns, "")]
    assert of_array(json.dumps([turns, turns])) == [(turns, ""), (turns, "")], "a list of conversations is none"


def of_lines(text: bytes, *, lines_only: bool = False) -> list[tuple[int, Any, str]]:
    return list(object_or_lines(io.BytesIO(text), lines_only=lines_only))


def test_lines_are_numbered_and_a_broken_one_costs_itself() -> None:
    text = b'\xef\xbb\xbf{"a": 1}\r\n\n{"id": "x", "messages": [\n{"a": 2},\n[3]\n  \n{"a": 4}'
    expected = [
        (1, {"a": 1}, ""), (3, None, "broken JSON"), (4, None, "broken JSON"), (5, [3], ""), (7, {"a": 4}, ""),
    ]  # fmt: skip
    assert of_lines(text, lines_only=True) == of_lines(text) == expected


def test_one_object_over_many_lines_is_one_value() -> None:
    text = json.dumps({"conversations": ROWS}, indent=2).encode()
    assert of_lines(b"\n" + text) == [(2, {"conversations": ROWS}, "")]
    assert {fault for _, _, fault in of_lines(text, lines_only=True)} >= {"broken JSON"}


def test_a_file_whose_first_line_is_broken_is_read_by_lines() -> None:
    assert of_lines(b'oops\n{"a": 1}\n') == [(1, None, "broken JSON"), (2, {"a": 1}, "")]
