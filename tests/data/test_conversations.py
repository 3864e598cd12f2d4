"""Conversations from JSONL: what is read, what is dropped by which name, what stops the whole file."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.conversations import read_conversations
from dflash_core.records import Conversation
from tests.fakes import chats, write_jsonl

PAIR = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(path: Path) -> tuple[list[Conversation], dict[str, int]]:
    dropped: Counter[str] = Counter()
    return list(read_conversations(str(path), dropped)), dict(dropped)


def read_lines(tmp_path: Path, *lines: Any) -> tuple[list[Conversation], dict[str, int]]:
    return read(write_jsonl(tmp_path / "c.jsonl", lines))


def test_rows_come_in_order_with_ids_messages_and_tools(tmp_path: Path) -> None:
    rows = chats(10)
    rows[3]["tools"] = [{"type": "function", "function": {"name": "f"}}]
    found, dropped = read_lines(tmp_path, *rows)
    assert dropped == {}
    assert [(row.id, row.messages, row.tools) for row in found] == [
        (row["id"], row["messages"], row.get("tools")) for row in rows
    ]


def test_a_row_without_an_id_gets_one_from_its_content(tmp_path: Path) -> None:
    found, _ = read_lines(
        tmp_path, {"messages": PAIR}, {"messages": PAIR}, {"messages": PAIR, "x": 1}, {"id": 0, "messages": PAIR}
    )
    ids = [row.id for row in found]
    assert ids[0] == ids[1] != ids[2]
    assert len(ids[0]) == 16
    assert ids[3] == "0", "0 is an id"


def test_null_fields_are_as_if_absent(tmp_path: Path) -> None:
    null = [{**message, "tool_calls": None, "name": None} for message in PAIR]
    found, _ = read_lines(tmp_path, {"id": "x", "messages": null, "tools": None}, {"id": "x", "messages": PAIR})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"id":"x","messages":[', "broken JSON"),
        ('{"id":"x"},', "broken JSON"),
        ("not json", "broken JSON"),
        ("[" * 200_000, "broken JSON"),
        ("[1, 2]", "no messages"),
        ("3", "no messages"),
        ({"id": "F12", "conversations": []}, "no messages"),
        ({"messages": "hello"}, "no messages"),
        ({"messages": []}, "empty messages"),
        ({"messages": ["hello"]}, "message is no object"),
        ({"messages": [{"role": "user", "content": None}, PAIR[1]]}, "content is no text"),
        ({"messages": [{"role": "user"}, PAIR[1]]}, "content is no text"),
        ({"messages": [{"role": "user", "content": 42}, PAIR[1]]}, "content is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, PAIR[1]]}, "content is no text"),
        ('{"messages":[{"role":"user","content":"bad \\ud83d"},{"role":"assistant","content":"b"}]}', "text is no valid Unicode"),
        (
            '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"\\ud83d"}]}',
            "text is no valid Unicode",
        ),
        (
            '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"tools":[{"name":"\\udc00"}]}',
            "text is no valid Unicode",
        ),
        ({"messages": PAIR[:1]}, "no assistant turn"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no assistant turn"),
    ],
)
def test_an_unusable_row_is_dropped_by_name_and_the_others_stay(tmp_path: Path, line: Any, reason: str) -> None:
    found, dropped = read_lines(tmp_path, {"id": "1", "messages": PAIR}, line, {"id": "2", "messages": PAIR}, line)
    assert [row.id for row in found] == ["1", "2"]
    assert dropped == {reason: 2}


def test_blank_lines_a_byte_order_mark_and_a_missing_last_newline_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    row = b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\n  \n" + row)
    found, dropped = read(path)
    assert (len(found), dropped) == (2, {})


def test_bytes_that_are_no_text_are_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(bytes(range(11, 256)) + b"\n" + b'{"messages":[{"role":"\xff"}]}\n')
    assert read(path) == ([], {"broken JSON": 2})


def test_each_reason_is_logged_once_with_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_lines(tmp_path, {"messages": PAIR}, "oops", "oops", {"messages": []})
    places = [record.getMessage() for record in caplog.records]
    assert len(places) == 2
    assert "line 2: dropped, broken JSON" in places[0]
    assert "line 4: dropped, empty messages" in places[1]


@pytest.mark.parametrize("role", ["heron_7b", "Assistant", "", None, 3, ["user"]])
def test_an_unknown_role_stops_with_the_line_and_the_known_ones(tmp_path: Path, role: Any) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": PAIR}, {"messages": [PAIR[0], {"role": role, "content": "x"}]}])
    with pytest.raises(ValueError, match="line 2: unknown role") as error:
        read(path)
    assert repr(role) in str(error.value)
    assert "known are system, user, assistant, tool" in str(error.value)


def test_a_missing_file_or_a_directory_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "tarin.jsonl", tmp_path):
        with pytest.raises(ValueError, match=rf"data\.conversations '{path}': no such file"):
            read(path)


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.jsonl' is empty: give at least one conversation"):
        read(tmp_path / "c.jsonl")
