"""Conversations from JSONL: what is read, what is dropped by which name, what stops the whole file."""

import hashlib
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.conversations import read_conversations, read_part, write_part
from dflash_core.data_config import DataConfig
from dflash_core.records import Conversation
from tests.fakes import chats, write_jsonl

PAIR = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(path: Path, **data: Any) -> tuple[list[Conversation], dict[str, int]]:
    dropped: Counter[str] = Counter()
    return list(read_conversations(DataConfig(conversations=str(path), **data), dropped)), dict(dropped)


def read_lines(tmp_path: Path, *lines: Any, **data: Any) -> tuple[list[Conversation], dict[str, int]]:
    return read(write_jsonl(tmp_path / "c.jsonl", lines), **data)


def test_rows_come_in_order_with_ids_messages_and_tools(tmp_path: Path) -> None:
    rows = chats(10)
    rows[3]["tools"] = [{"type": "function", "function": {"name": "f"}}]
    found, dropped = read_lines(tmp_path, *rows)
    assert dropped == {}
    assert [(row.id, row.messages, row.tools) for row in found] == [
        (row["id"], row["messages"], row.get("tools")) for row in rows
    ]


def test_ids_are_the_row_s_own_or_made_from_what_it_says(tmp_path: Path) -> None:
    other = [PAIR[0], {"role": "assistant", "content": "c"}]
    rows = [{"messages": PAIR}, {"messages": PAIR, "x": 1}, {"messages": other}, {"id": 0, "messages": PAIR}]
    found, _ = read_lines(tmp_path, *rows, {"id": "dup", "messages": PAIR}, {"id": "dup", "messages": other})
    said = json.dumps({"messages": PAIR, "tools": None}, sort_keys=True, separators=(",", ":"))
    own = hashlib.sha256(said.encode()).hexdigest()
    assert [row.id for row in found] == [own[:16], own[:16], found[2].content_hash[:16], "0", "dup", "dup"], "0 is an id"
    assert [row.content_hash == own for row in found] == [True, True, False, True, True, False]


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
        ("[1, 2]", "message is no object"),
        ("3", "no messages"),
        ({"id": "F12", "conversations": []}, "empty messages"),
        ({"messages": "hello"}, "no messages"),
        ({"messages": []}, "empty messages"),
        ({"messages": ["hello"]}, "message is no object"),
        ({"messages": [{"role": "user", "content": None}, PAIR[1]]}, "content is no text"),
        ({"messages": [{"role": "user"}, PAIR[1]]}, "content is no text"),
        ({"messages": [{"role": "user", "content": 42}, PAIR[1]]}, "content is no text"),
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
def test_a_file_of_unknown_roles_stops_with_the_first_line_and_the_known_ones(tmp_path: Path, role: Any) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": [PAIR[0], {"role": role, "content": "x"}]}] * 3)
    with pytest.raises(ValueError, match=r"line 1: unknown role .*only 0 of 3 conversations can be trained") as error:
        read(path)
    assert repr(role) in str(error.value)
    assert "known are system, user, assistant, tool" in str(error.value)


def test_an_unknown_role_drops_its_row_with_one_warning_or_is_mapped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = {"id": "F11", "messages": [PAIR[0], {"role": "heron_7b", "content": "A bot."}]}
    found, dropped = read_lines(tmp_path, bad, {"id": "1", "messages": PAIR}, bad, bad)
    assert ([row.id for row in found], dropped) == (["1"], {"unknown role 'heron_7b'": 3})
    assert [record.getMessage().count("unknown role 'heron_7b'") for record in caplog.records] == [1]
    found, dropped = read_lines(tmp_path, bad, roles={"heron_7b": "assistant"})
    assert (found[0].messages, dropped) == ([PAIR[0], {"role": "assistant", "content": "A bot."}], {})


def test_a_reason_for_each_row_does_not_fill_the_ledger(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": f"model {i}", "content": "x"}]} for i in range(300)]
    found, dropped = read_lines(tmp_path, {"messages": PAIR}, *rows)
    assert len(found) == 1
    assert len(dropped) == 51
    assert dropped["one of many other reasons"] == 250


def test_a_missing_path_and_an_empty_directory_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"data\.conversations '{tmp_path}/tarin.jsonl': no such path"):
        read(tmp_path / "tarin.jsonl")
    with pytest.raises(ValueError, match=rf"data\.conversations '{tmp_path}': no data files there"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"c\.jsonl' is empty: give at least one conversation"):
        read(tmp_path / "c.jsonl")


def test_a_part_file_gives_the_same_conversations_back(tmp_path: Path) -> None:
    rows = [
        Conversation(id="a", messages=[{"role": "user", "content": "na\u0303 \U0001f642\n"}], tools=[{"name": "f"}], source="s"),
        Conversation(id="b", messages=[], text="as it stands", content_hash="00ff", validation=True),
        Conversation(id="c", messages=[], input_ids=[5, 0, 7], loss_mask=[0, 1, 1], thinking=False),
    ]
    assert write_part(tmp_path / "part.jsonl", iter(rows)) == 3
    assert list(read_part(tmp_path / "part.jsonl")) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["part.jsonl"]
