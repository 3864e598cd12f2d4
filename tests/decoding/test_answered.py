"""Rows on disk: found again after any end, torn lines left out, the output in the order of the source."""

from pathlib import Path
from typing import Any

import pytest

from dflash_core.decoding.answered import AnsweredRows, key_of
from dflash_core.records import Conversation


def row(name: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": name}, {"role": "assistant", "content": "ä" * 5, "finish_reason": "stop"}]
    return {"id": name, "messages": messages, **fields}


KEYS = {name: key_of(Conversation(id=name, messages=[])) for name in "abcdef"}


def opened(tmp_path: Path, wanted: str = "abcdef", settings: dict[str, Any] | None = None) -> AnsweredRows:
    rows = AnsweredRows(tmp_path / "out.jsonl")
    with rows.held():
        rows.begin(settings or {"seed": 0})
        rows.load({KEYS[name] for name in wanted})
    return rows


def add(rows: AnsweredRows, names: str) -> None:
    for name in names:
        rows.append(KEYS[name], row(name))


def ids(path: Path) -> str:
    import json

    return "".join(json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines())


def test_a_key_is_id_and_content() -> None:
    messages = [{"role": "user", "content": "x"}]
    base = key_of(Conversation(id="a", messages=messages))
    assert len(base) == 16
    assert key_of(Conversation(id="a", messages=[dict(messages[0])], source="elsewhere", validation=True)) == base
    assert key_of(Conversation(id="b", messages=messages)) != base
    assert key_of(Conversation(id="a", messages=[{"role": "user", "content": "y"}])) != base
    assert key_of(Conversation(id="a", messages=messages, tools=[{}])) != base


def test_rows_are_found_again_and_come_out_in_the_order_asked_for(tmp_path: Path) -> None:
    first = opened(tmp_path)
    add(first, "db")  # never closed: killed
    second = opened(tmp_path)
    assert [name for name in KEYS if KEYS[name] in second] == ["b", "d"]
    add(second, "a")
    second.close()
    third = opened(tmp_path)
    assert third.tally.rows == third.tally.turns == 3
    third.write_output([KEYS[name] for name in "abcd"])
    assert ids(tmp_path / "out.jsonl") == "abd"
    assert sorted(path.name for path in (tmp_path / "out.jsonl.work").iterdir()) == [".lock", "settings.json"]
    fourth = opened(tmp_path)
    assert fourth.tally.rows == 3
    add(fourth, "c")
    fourth.write_output([KEYS[name] for name in "abcd"])
    assert ids(tmp_path / "out.jsonl") == "abcd"


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_last_line_is_not_there(cut: int, tmp_path: Path, caplog) -> None:
    rows = opened(tmp_path)
    add(rows, "abc")
    (path,) = (tmp_path / "out.jsonl.work").glob("answers-*")
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened(tmp_path)
    assert KEYS["b"] in again
    assert KEYS["c"] not in again
    assert "torn when written" in caplog.text
    add(again, "c")
    again.write_output(KEYS.values())
    assert ids(tmp_path / "out.jsonl") == "abc"


def test_an_output_that_is_right_is_left_alone(tmp_path: Path) -> None:
    rows = opened(tmp_path)
    add(rows, "ab")
    rows.write_output([KEYS["a"], KEYS["b"]])
    written = (tmp_path / "out.jsonl").stat().st_mtime_ns
    opened(tmp_path).write_output([KEYS["a"], KEYS["b"]])
    assert (tmp_path / "out.jsonl").stat().st_mtime_ns == written
    opened(tmp_path).write_output([KEYS["b"], KEYS["a"]])
    assert ids(tmp_path / "out.jsonl") == "ba"


def test_rows_of_other_conversations_are_said_and_left_out(tmp_path: Path, caplog) -> None:
    rows = opened(tmp_path)
    add(rows, "abc")
    rows.write_output([KEYS[name] for name in "abc"])
    fewer = opened(tmp_path, wanted="ac")
    assert "1 answers belong to no conversation of the source" in caplog.text
    assert fewer.tally.rows == 2
    fewer.write_output([KEYS["a"], KEYS["c"]])
    assert ids(tmp_path / "out.jsonl") == "ac"


def test_counts_over_rows(tmp_path: Path) -> None:
    rows = opened(tmp_path)
    cut = {"role": "assistant", "content": "x", "token_ids": [1], "finish_reason": "length"}
    rows.append(KEYS["a"], {**row("a"), "messages": [*row("a")["messages"], cut], "ended": "an answer cut by length"})
    add(rows, "b")
    for tally in (rows.tally, opened(tmp_path).tally):
        assert (tally.rows, tally.turns, tally.with_token_ids) == (2, 3, 1)
        assert tally.finish_reasons == {"stop": 2, "length": 1}
        assert tally.ended == {"an answer cut by length": 1}


def test_what_is_not_ours_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="was not made by regeneration"):
        opened(tmp_path)


def test_two_processes_at_one_output_are_refused(tmp_path: Path) -> None:
    rows, other = AnsweredRows(tmp_path / "out.jsonl"), AnsweredRows(tmp_path / "out.jsonl")
    with rows.held(), pytest.raises(ValueError, match="in use by another process"), other.held():
        pass
