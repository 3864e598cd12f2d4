"""The target's own answers to the prompts of a data set, every assistant turn in order.

    conversations --survey--> keys in order; which of them have a row
          |
        those that have none --turns.py--> requests <--drive.py--> answers --answered.py--> rows on disk
          |
    output, in the order of the source

Read lazily: in memory are the conversations in work and a key for each. A stop request drops those in work and keeps the rest;
a conversation that gets no answer leaves no row and is asked again by the next run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from dflash_core.config import Config
from dflash_core.data.conversations import read_conversations
from dflash_core.data.sources import locate
from dflash_core.data_config import SourceConfig
from dflash_core.decoding.answered import AnsweredRows, key_of
from dflash_core.decoding.drive import Progress, Waiting, by_endpoints, in_process
from dflash_core.decoding.endpoints import api_key
from dflash_core.decoding.turns import thinks, turns
from dflash_core.errors import unwrapped
from dflash_core.records import Conversation

DUPLICATE = "same id and content as an earlier one"


def output_path(config: Config) -> Path:
    """Where the answers go."""
    return Path(config.regeneration.output or Path(config.places.runs) / f"{config.name}.regenerated.jsonl").absolute()


def sources_of(config: Config) -> tuple[SourceConfig, ...]:
    """Whose prompts are answered."""
    return config.regeneration.conversations or config.data.conversations


def is_prepared_by(config: Config) -> bool:
    """Whether data.conversations has the output, so that preparing this same config reads the answers."""
    return any(Path(source.path).absolute() == output_path(config) for source in config.data.conversations)


def read_source(config: Config, dropped: Counter[str]) -> Iterator[Conversation]:
    """The conversations, one by one; what cannot be read is counted in `dropped`, the first of a new kind logged."""
    data = config.data.model_copy(update={"conversations": sources_of(config)})
    return read_conversations(data, dropped, answers=False)


def check(config: Config) -> None:
    """What can be seen before anything heavy. Raises ValueError."""
    from dflash_core.modeling.target import read_facts  # torch

    output = output_path(config)
    if not sources_of(config):
        raise ValueError("regeneration.conversations is not set, and data.shards has no prompts; name a source")
    for source in sources_of(config):
        if Path(source.path).absolute() == output:
            raise ValueError(f"regeneration.output {str(output)!r} is the source of the prompts; name another file")
        locate(source)
    api_key(config.regeneration)
    if not read_facts(config.target.path).eos_ids:
        raise ValueError(f"target.path {config.target.path!r}: its config names no eos_token_id, so no answer would end")


def decisive(config: Config) -> dict[str, Any]:
    """What decides the answers, apart from the prompts: not who serves, how many at a time, or how patiently."""
    names = ("model", "temperature", "top_p", "top_k", "max_tokens", "seed", "thinking")
    settings = config.regeneration.model_dump(mode="json")
    sources = [source.model_dump(mode="json") for source in sources_of(config)]
    return {"conversations": sources, "target": config.target.path, **{name: settings[name] for name in names}}


async def regenerate(
    config: Config, stop: anyio.Event, on_row: Callable[[Progress], None], *, fresh: bool = False
) -> dict[str, Any]:
    """Answers all prompts that have no row yet, and writes the output unless `stop` was set before the last.

    `on_row` is called after every row, from any thread. Returns the summary: {"output", "stopped", "conversations":
    {"rows_in", "kept", "left", "dropped"}, "before", "turns", "finish_reasons", "ended", ...}. Raises ValueError for bad input,
    where all endpoints are out of service, and where no conversation got an answer.
    """
    answered = AnsweredRows(output_path(config))
    if fresh:
        answered.set_aside()
    with answered.held():
        answered.begin(decisive(config))
        order, progress = await to_thread.run_sync(_survey, config, answered)
        todo = {key for key in order if key not in answered}
        on_row(progress)
        try:
            if todo and not stop.is_set():
                drive = by_endpoints if config.regeneration.endpoints else in_process
                with unwrapped():
                    await drive(config, _pending(config, todo, progress), progress, stop, on_row)
        finally:
            answered.close()
        stopped = stop.is_set() and progress.left > 0
        if not stopped:
            if not progress.rows:
                reasons = "; ".join(f"{count} x {reason}" for reason, count in progress.dropped.most_common(5))
                raise ValueError(f"none of {progress.rows_in} conversations could be answered: {reasons}")
            await to_thread.run_sync(answered.write_output, order)
    return _summary(progress, stopped=stopped)


def _survey(config: Config, answered: AnsweredRows) -> tuple[dict[bytes, None], Progress]:
    """All keys in the order of the source, before anything is asked: bad input is seen now, and the total is known."""
    dropped: Counter[str] = Counter()
    order: dict[bytes, None] = {}
    for conversation in read_source(config, dropped):
        key = key_of(conversation)
        if key in order:
            dropped[DUPLICATE] += 1
        order[key] = None
    answered.load(order)
    rows_in = len(order) + sum(dropped.values())
    return order, Progress(rows_in=rows_in, answered=answered, before=answered.tally.rows, dropped=dropped)


def _pending(config: Config, todo: set[bytes], progress: Progress) -> Iterator[Waiting]:
    """Conversations of `todo`, which is used up, each once, as (key, its turns)."""
    settings = config.regeneration
    for conversation in read_source(config, Counter(progress.dropped)):  # a copy: the survey has counted
        key = key_of(conversation)
        if key in todo:
            todo.discard(key)
            thinking = thinks(conversation, share=settings.thinking, seed=settings.seed)
            yield key, turns(conversation, thinking=thinking, seed=settings.seed)


def _summary(progress: Progress, *, stopped: bool) -> dict[str, Any]:
    tally = progress.answered.tally
    return {
        "output": str(progress.answered.output),
        "stopped": stopped,
        "conversations": {
            "rows_in": progress.rows_in,
            "kept": progress.rows,
            "left": progress.left,
            "dropped": dict(progress.dropped.most_common()),
        },
        "before": progress.before,
        "turns": tally.turns,
        "with_token_ids": tally.with_token_ids,
        "finish_reasons": dict(tally.finish_reasons.most_common()),
        "ended": dict(tally.ended.most_common()),
        "failures": dict(progress.failures.most_common()),
    }
