"""Evaluation prompts: what a drafter is measured on, and what its training rows are compared with.

    evaluation.prompts, evaluation.prompt_sets --read_prompt_sets--> PromptSet: system and user messages of each prompt

A row is {"turns": [text, ...]}, OpenAI {"messages": [...]} (assistant messages are left out: the target answers itself), or a row
of a public benchmark in the form that its preset asks. The first rows are taken, so a set is the same in every run.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import EvaluationConfig, PromptSetConfig
from dflash_core.data.sources import RawRow, locate, read_rows
from dflash_core.data_config import SourceConfig
from dflash_core.files import begins_at

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """Prompts that are reported together."""

    name: str
    prompts: tuple[Messages, ...]  # system and user messages; the target answers after each user message
    thinking: bool | None = None  # enable_thinking; None: the run's


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A public benchmark."""

    source: SourceConfig
    turns: Callable[[dict[str, Any]], list[str]]  # of one row


REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
PRESETS = {  # the forms in which published acceptance lengths of DFlash drafters were measured (z-lab, DeepSpec)
    "gsm8k": Preset(
        source=SourceConfig(path="hf://openai/gsm8k", subset="main", split="test"), turns=lambda row: [row["question"] + REASON]
    ),
    "math500": Preset(
        source=SourceConfig(path="hf://HuggingFaceH4/MATH-500", split="test"), turns=lambda row: [row["problem"] + REASON]
    ),
    "humaneval": Preset(
        source=SourceConfig(path="hf://openai/openai_humaneval", split="test"),
        turns=lambda row: [SOLVE.format(row["prompt"])],
    ),
    "mbpp": Preset(
        source=SourceConfig(path="hf://google-research-datasets/mbpp", subset="sanitized", split="test"),
        turns=lambda row: [row["prompt"]],
    ),
    "mt-bench": Preset(
        source=SourceConfig(path="hf://HuggingFaceH4/mt_bench_prompts", split="train"), turns=lambda row: list(row["prompt"])
    ),
    "alpaca": Preset(
        source=SourceConfig(path="hf://tatsu-lab/alpaca", split="train"),
        turns=lambda row: [row["instruction"] + (f"\n\nInput:\n{row['input']}" if row.get("input") else "")],
    ),
}


def read_prompt_sets(evaluation: EvaluationConfig) -> list[PromptSet]:
    """All prompt sets of an evaluation, `prompts` first. Raises ValueError for a missing, empty or malformed one."""
    sets = []
    if evaluation.prompts is not None:
        if not Path(evaluation.prompts).is_file():
            raise ValueError(f"evaluation.prompts {evaluation.prompts!r}: no such file{begins_at(evaluation.prompts)}")
        only = PromptSetConfig(path=evaluation.prompts)
        sets.append(_read("prompts", f"evaluation.prompts {evaluation.prompts!r}", only, evaluation.num_prompts))
    for name, settings in evaluation.prompt_sets.items():
        sets.append(_read(name, f"evaluation.prompt_sets.{name}", settings, evaluation.num_prompts))
    return sets


def prompt_texts(evaluation: EvaluationConfig) -> list[str]:
    """What the users of all prompts say."""
    messages = (message for one in read_prompt_sets(evaluation) for prompt in one.prompts for message in prompt)
    return [message["content"] for message in messages if message["role"] == "user"]


def _read(name: str, key: str, settings: PromptSetConfig, num_prompts: int | None) -> PromptSet:
    preset = PRESETS[settings.preset] if settings.preset else None
    source = SourceConfig(path=settings.path) if settings.path else preset.source if preset else None
    assert source is not None, "the config has checked it"
    try:
        location = locate(source)
    except ValueError as error:
        raise ValueError(f"{key}: {str(error).removeprefix('data.conversations ')}") from error
    rows = itertools.islice(read_rows(source, location), settings.num_prompts or num_prompts)
    prompts = tuple(_messages(row, preset) for row in rows)
    if not prompts:
        raise ValueError(f"{key} is empty: give at least one prompt")
    return PromptSet(name=name, prompts=prompts, thinking=settings.thinking)


def _messages(row: RawRow, preset: Preset | None) -> Messages:
    value = row.value
    if row.fault or not isinstance(value, dict):
        raise ValueError(f'{row.place}: not of the form {{"turns": ["..."]}}{f" ({row.fault})" if row.fault else ""}')
    if "messages" in value:
        return list(_asked(row, value["messages"]))
    turns = value.get("turns")
    if "turns" not in value:
        try:
            turns = preset.turns(value) if preset else None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{row.place}: not a row of this preset's data set: {error} is missing or no text") from error
        if turns is None:
            raise ValueError(f'{row.place}: not of the form {{"turns": ["..."]}} or {{"messages": [...]}}')
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{row.place}: turns must be a list of texts, at least one")
    return [{"role": "user", "content": turn} for turn in turns]


def _asked(row: RawRow, messages: Any) -> Iterator[dict[str, Any]]:
    """System and user messages of an OpenAI row."""
    users = 0
    for message in messages if isinstance(messages, list) else [None]:
        message = message if isinstance(message, dict) else {}
        role = message.get("role")
        if role not in ("system", "user", "assistant") or (role != "assistant" and not isinstance(message.get("content"), str)):
            raise ValueError(f"{row.place}: messages must be texts of system, user and assistant")
        users += role == "user"
        if role != "assistant":
            yield {"role": role, "content": message["content"]}
    if not users:
        raise ValueError(f"{row.place}: no user message")
