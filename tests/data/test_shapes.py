"""Shapes: what each becomes, nulls that loaders fill in, and the real conversation files counted independently."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.data.conversations import read_conversations
from dflash_core.data.shapes import Unusable, fields, row_shape, tools, without_nulls
from dflash_core.data_config import DataConfig
from dflash_core.records import Conversation
from tests.fakes import write_jsonl

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PAIR = [USER, ASSISTANT]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
TOOL = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}


def messages(row: Any, shape: str = "auto", **roles: str) -> list[dict[str, Any]]:
    return fields(without_nulls(row, columnar=False), shape, roles)["messages"]


def reason(row: Any, shape: str = "auto") -> str:
    with pytest.raises(Unusable) as error:
        messages(row, shape)
    return str(error.value)


def read(path: Path | str, **data: Any) -> tuple[list[Conversation], dict[str, int]]:
    dropped: Counter[str] = Counter()
    return list(read_conversations(DataConfig(conversations=str(path), **data), dropped)), dict(dropped)


# ---- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "row"),
    [
        ("messages", {"messages": PAIR}),
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        ("sharegpt", {"conversations": PAIR}),
        ("turns", PAIR),
        ("turns", [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]),
        ("instruction", {"instruction": "a", "input": "", "output": "b"}),
        ("instruction", {"instruction": "a", "input": None, "output": "b", "history": [], "system": ""}),
        ("prompt", {"prompt": "a", "response": "b"}),
        ("prompt", {"prompt": "a", "completion": "b"}),
        ("prompt", {"prompt": [USER], "completion": [ASSISTANT]}),
        ("prompt", {"prompt": "a", "chosen": PAIR, "rejected": PAIR}),
        ("prompt", {"chosen": PAIR, "rejected": PAIR}),
        ("messages", {"prompt": "x", "messages": PAIR, "text": "y"}),
    ],
)
def test_each_shape_is_found_and_says_the_same(shape: str, row: Any) -> None:
    assert row_shape(row) == shape
    assert messages(row) == messages(row, shape) == PAIR


def test_the_longer_forms() -> None:
    row = {"instruction": "Count the vowels.", "input": "queue", "output": "4", "system": "s", "history": [["q", "r"]]}
    said = [(message["role"], message["content"]) for message in messages(row)]
    assert said == [("system", "s"), ("user", "q"), ("assistant", "r"), ("user", "Count the vowels.\nqueue"), ("assistant", "4")]
    with_system = {"system": "s", "conversations": [{"from": "system", "value": "own"}, {"from": "human", "value": "a"}]}
    assert messages(with_system)[0] == {"role": "system", "content": "own"}
    assert len(messages(with_system)) == 2


def test_rendered_text_and_tokens() -> None:
    assert fields({"id": 1, "text": "<|im_start|>"}, "auto", {}) == {"messages": [], "text": "<|im_start|>"}
    row = {"input_ids": [5, 0, 7], "loss_mask": [0, True, 1]}
    assert fields(row, "auto", {}) == {"messages": [], "input_ids": [5, 0, 7], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1]}, "input_ids and loss_mask differ in length"),
        ({"input_ids": [5, 6, 99999, 8], "loss_mask": [0, 0, 2, 1]}, "loss_mask holds other values than 0 and 1"),
        ({"input_ids": [5, 6]}, "input_ids without loss_mask"),
        ({"input_ids": [5, -6], "loss_mask": [0, 1]}, "input_ids are no token ids"),
        ({"input_ids": "text", "loss_mask": [0, 1]}, "input_ids are no token ids"),
        ({"text": 3}, "content is no text"),
        ({"nothing": 3}, "no messages"),
        ({"messages": [USER, {"role": "assistant", "content": True}]}, "content is no text"),
        ({"messages": [{**USER, "content": []}]}, "content is no text"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]}, "multimodal"),
        ({"messages": [{**USER, "content": [{"type": "input_audio", "text": "x"}]}]}, "multimodal"),
        ({"messages": PAIR, "images": ["1.jpg"]}, "multimodal"),
        ({"messages": [{**ASSISTANT, "tool_calls": "[{"}]}, "broken tool call"),
        ({"messages": [{**ASSISTANT, "tool_calls": [{"function": {"arguments": {}}}]}]}, "broken tool call"),
        ({"conversations": [{"from": "function_call", "value": "weather(Oslo)"}]}, "broken tool call"),
        ({"messages": PAIR, "tools": "[{"}, "broken tools"),
        ({"messages": PAIR, "tools": 3}, "broken tools"),
        ({"messages": PAIR, "tools": [3]}, "broken tools"),
        ({"messages": [{**ASSISTANT, "loss_mask": 2}]}, "a message's loss_mask or weight is neither 0 nor 1"),
        ({"prompt": 3, "response": "x"}, "prompt or response is neither text nor messages"),
        ({"response": "x"}, "no prompt"),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "history is no list of pairs"),
    ],
)
def test_what_cannot_be_used_has_a_reason(row: Any, expected: str) -> None:
    assert reason(row) == expected


def test_a_named_shape_drops_the_others_and_columns_can_be_renamed(tmp_path: Path) -> None:
    assert reason({"text": "x"}, "messages") == "no row of shape messages"
    assert messages({"messages": 3, "prompt": "a", "response": "b"}, "prompt") == PAIR, "the named one wins"
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "dialogue": PAIR, "messages": "something else"}])
    config = DataConfig(conversations={"path": str(path), "columns": {"messages": "dialogue"}})
    assert [row.messages for row in read_conversations(config, Counter())] == [PAIR]


# ---- messages -------------------------------------------------------------------------------------------------------


def test_content_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}, "!"]
    assert messages({"messages": [{**USER, "content": parts}]})[0]["content"] == "part one, part two!"


def test_tool_calls_keep_their_arguments_and_null_content_is_empty_beside_them() -> None:
    mapping = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "unit": None}}}
    calling = [{"role": "assistant", "content": None, "tool_calls": [call]} for call in (CALL, mapping)]
    assert messages({"messages": calling}) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [mapping]},
    ], "a null that someone wrote into arguments stays"
    assert messages({"messages": [{**ASSISTANT, "tool_calls": []}]}) == [ASSISTANT]
    assert reason({"messages": [USER, {"role": "assistant", "content": None}]}) == "content is no text"
    thought = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert messages({"messages": [thought]}) == [{**thought, "content": ""}]


def test_sharegpt_s_calls_and_observations() -> None:
    turns = [{"from": "function_call", "value": json.dumps(CALL["function"])}, {"from": "observation", "value": "3 C"}]
    assert messages({"conversations": turns}) == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL["function"]}]},
        {"role": "tool", "content": "3 C"},
    ]


def test_a_turn_can_be_left_untrained() -> None:
    """A flag on an answer is kept for the mask; `weight` is its name in fine-tuning files."""
    turns = [USER, {**ASSISTANT, "loss_mask": 0}, USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "loss_mask": 1}]
    flags = [message.get("loss_mask") for message in messages({"messages": turns})]
    assert flags == [None, 0, None, 0, None, None]


def test_tools_are_the_same_from_a_list_and_from_text(tmp_path: Path) -> None:
    given: list[Any] = [[WRAPPED], json.dumps([WRAPPED]), "absent", "null", "[{"]
    rows = [{"id": f"{i}", "messages": PAIR} | ({} if tool == "absent" else {"tools": tool}) for i, tool in enumerate(given)]
    found, dropped = read(write_jsonl(tmp_path / "c.jsonl", rows))
    assert [row.tools for row in found] == [[WRAPPED], [WRAPPED], None, None]
    assert found[0].content_hash == found[1].content_hash != found[2].content_hash == found[3].content_hash
    assert dropped == {"broken tools": 1}
    assert tools([TOOL]) == tools(json.dumps(TOOL)) == [WRAPPED], "definitions alone are put in OpenAI's form"


# ---- nulls ----------------------------------------------------------------------------------------------------------


def test_a_row_says_the_same_alone_and_beside_rows_with_more_fields(tmp_path: Path) -> None:
    plain = {"id": "F00", "messages": [USER, ASSISTANT]}
    rich = {
        "id": "F07",
        "tools": [WRAPPED],
        "messages": [
            USER | {"name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
            {"role": "tool", "content": "3 C", "tool_call_id": "c1"},
            ASSISTANT,
        ],
    }
    rich["tools"] = json.dumps(rich["tools"])
    for name, write in (
        ("rows.jsonl", lambda path, rows: write_jsonl(path, rows)),
        ("rows.parquet", lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path)),
    ):
        write(tmp_path / name, [plain])
        alone, _ = read(tmp_path / name)
        write(tmp_path / name, [plain, rich])
        together, dropped = read(tmp_path / name)
        assert dropped == {}
        assert together[0] == alone[0]
        assert together[0].messages == PAIR
        assert together[1].messages[1] == {**rich["messages"][1], "content": ""}


def test_nulls_that_a_schema_fills_into_arguments_go(tmp_path: Path) -> None:
    def calling(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": [call]}]}

    given = [{"city": "Oslo"}, {"unit": "C"}]
    pq.write_table(pa.Table.from_pylist([calling(arguments) for arguments in given]), tmp_path / "rows.parquet")
    found, _ = read(tmp_path / "rows.parquet")
    assert [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in found] == given


def test_columns_that_are_no_json_and_deep_rows_are_dropped_by_name(tmp_path: Path) -> None:
    row = {"id": "1", "messages": [USER | {"at": 1}, ASSISTANT]}
    table = pa.Table.from_pylist([row])
    when = pa.array([[dict(USER, at=10**9), dict(ASSISTANT, at=None)]], pa.list_(pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("at", pa.timestamp("s"))]
    )))  # fmt: skip
    pq.write_table(table.set_column(1, "messages", when), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet") == ([], {"a field that is no JSON value": 1})
    deep = '{"messages":[{"role":"user","content":"a","x":' + "[" * 900 + "]" * 900 + '},{"role":"assistant","content":"b"}]}'
    found, dropped = read(write_jsonl(tmp_path / "deep.jsonl", [deep]))
    assert (len(found), dropped) in [(1, {}), (0, {"nested too deeply": 1})]


# ---- real files -----------------------------------------------------------------------------------------------------


def independent(path: Path) -> list[list[tuple[str, str]]]:
    """(role, text) of each turn of each row, by the simplest code for the file at hand."""
    text = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    names = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
    found = []
    for row in rows if isinstance(rows, list) else [rows]:
        turns = row.get("messages") or row["conversations"]
        pairs = [(turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))) for turn in turns]
        found.append([(names.get(role, role), "" if role == "function_call" else text or "") for role, text in pairs])
    return found


@pytest.mark.parametrize(
    ("name", "rows", "calls"),
    [
        ("sharegpt.json", 500, 0),
        ("sharegpt_tools.json", 300, 211),
        ("openai_tools.jsonl", 50, 282),
        ("predictable.jsonl", 1001, 0),
        ("near_duplicates.jsonl", 1000, 0),
        ("missing_turns.json", 1, 0),
    ],
)
def test_real_files_are_kept_whole(name: str, rows: int, calls: int, assets_dir: Path) -> None:
    path = assets_dir / "conversations" / name
    found, dropped = read(path)
    assert (len(found), dropped) == (rows, {})
    assert [[(turn["role"], turn["content"]) for turn in row.messages] for row in found] == independent(path)
    assert sum(len(turn.get("tool_calls", [])) for row in found for turn in row.messages) == calls
    assert len({row.id for row in found if row.content_hash.startswith(row.id)}) == (
        len({row.content_hash for row in found}) if name in ("sharegpt_tools.json", "missing_turns.json") else 0
    ), "only these two have no ids of their own"


def test_real_tools_become_openai_s(assets_dir: Path) -> None:
    found, _ = read(assets_dir / "conversations" / "sharegpt_tools.json")
    raw = json.loads((assets_dir / "conversations" / "sharegpt_tools.json").read_text())
    for row, source in zip(found, raw, strict=True):
        assert [tool["function"] for tool in row.tools or []] == json.loads(source["tools"])
    assert found[0].tools
    assert {tool["type"] for row in found for tool in row.tools or []} == {"function"}


def test_rows_with_images_are_dropped_by_name(assets_dir: Path) -> None:
    assert read(assets_dir / "conversations" / "multimodal.json") == ([], {"multimodal": 6})
