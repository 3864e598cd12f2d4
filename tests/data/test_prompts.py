"""Prompt files: every turn in order, or the line that is wrong."""

from pathlib import Path

import pytest

from dflash_core.config import EvaluationConfig
from dflash_core.data.prompts import prompt_texts, read_prompt_sets
from tests.fakes import write_jsonl


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give at least one prompt"),
        ("\n\n", "is empty"),
        ('{"turns": ["a"]}\n{"turns": []}', "line 2: turns must be a list of texts"),
        ('{"turns": "a"}', "line 1: turns must be a list of texts"),
        ('{"turns": [1]}', "line 1: turns must be a list of texts"),
        ('{"prompt": "a"}', "line 1: not of the form"),
        ('["a"]', "line 1: not of the form"),
        ("{", "line 1: not of the form"),
    ],
)
def test_wrong_prompts_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompt_sets(EvaluationConfig(prompts=str(file)))


def test_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation.prompts .*: no such file"):
        read_prompt_sets(EvaluationConfig(prompts=str(tmp_path / "absent")))
    (tmp_path / "p").write_text('{"turns": ["a", "b"]}\n\n{"turns": ["é"], "id": 3}', encoding="utf-8")
    [only] = read_prompt_sets(EvaluationConfig(prompts=str(tmp_path / "p")))
    assert only.name == "prompts"
    assert only.prompts == (
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "é"}],
    )
    assert prompt_texts(EvaluationConfig(prompts=str(tmp_path / "p"))) == ["a", "b", "é"]


def test_openai_messages_keep_system_and_users_only(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "not the target's"},
        {"role": "user", "content": "b"},
    ]
    file = write_jsonl(tmp_path / "chat.jsonl", [{"messages": messages}])
    [only] = read_prompt_sets(EvaluationConfig(prompt_sets={"chat": {"path": str(file), "thinking": True}}))
    assert (only.name, only.thinking) == ("chat", True)
    assert only.prompts == ([messages[0], messages[1], messages[3]],)
    for wrong in ([], "a", [{"role": "tool", "content": "x"}], [{"role": "user", "content": None}], [messages[0]]):
        write_jsonl(file, [{"messages": wrong}])
        with pytest.raises(ValueError, match=r"chat\.jsonl, line 1: (messages must be|no user message)"):
            read_prompt_sets(EvaluationConfig(prompt_sets={"chat": {"path": str(file)}}))


REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("preset", "row", "turns"),
    [
        ("gsm8k", {"question": "2 + 2?", "answer": "4"}, ["2 + 2?" + REASON]),
        ("math500", {"problem": "$x$?"}, ["$x$?" + REASON]),
        (
            "humaneval",
            {"prompt": "def f():\n"},
            [
                "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```",
            ],
        ),
        ("mbpp", {"prompt": "Write f."}, ["Write f."]),
        ("mt-bench", {"prompt": ["a", "b"]}, ["a", "b"]),
        ("alpaca", {"instruction": "Do.", "input": "it"}, ["Do.\n\nInput:\nit"]),
        ("alpaca", {"instruction": "Do.", "input": ""}, ["Do."]),
        ("gsm8k", {"turns": ["as it stands"]}, ["as it stands"]),
    ],
)
def test_presets_ask_in_their_public_form(preset: str, row: dict, turns: list[str], tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", [row])
    evaluation = EvaluationConfig(prompt_sets={"x": {"preset": preset, "path": str(file)}})
    assert prompt_texts(evaluation) == turns
    write_jsonl(file, [{"other": 1}])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: not a row of this preset's data set"):
        read_prompt_sets(evaluation)


def test_sets_have_names_limits_and_places_of_their_own(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"turns": [str(i)]} for i in range(9)])
    sets = {"a": {"path": str(file), "num_prompts": 5}, "b": {"path": str(file)}}
    read = read_prompt_sets(EvaluationConfig(prompts=str(file), prompt_sets=sets, num_prompts=2))
    assert [(one.name, len(one.prompts)) for one in read] == [("prompts", 2), ("a", 5), ("b", 2)]
    with pytest.raises(ValueError, match=r"evaluation\.prompt_sets\.far: .*absent\.jsonl.*no such path"):
        read_prompt_sets(EvaluationConfig(prompt_sets={"far": {"path": str(tmp_path / "absent.jsonl")}}))
    for wrong in ({}, {"prompt_sets": {"a": {}}}, {"prompts": "p", "prompt_sets": {"prompts": {"path": "q"}}}):
        with pytest.raises(ValueError, match=r"no prompts|needs a path or a preset|another name"):
            EvaluationConfig(**wrong)
