"""The target's own answers to the prompts of the conversations: `python -m flows.regenerate --config FILE`.

prompts --regenerate_answers (servers, or transformers in this process)--> a JSONL file that flows.prepare reads

Stopped or killed: what is finished is kept, and the same command goes on. Finished: only what has no answer yet is asked.
"""

from typing import Any

from flows.command import read_command_line, run_flow

PURPOSE = "Answers the prompts of the conversations with the target itself."
COMMAND = read_command_line("regenerate", PURPOSE, fresh=True) if __name__ == "__main__" else None

import anyio
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from dflash_core.config import Config
from dflash_core.decoding import regenerate as regeneration
from flows import console, progress
from flows.parameters import UNCHANGED, Overrides
from flows.running import Stopped, in_thread, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config


@task(cache_policy=NO_CACHE)
async def regenerate_answers(config: Config, stop: anyio.Event, fresh: bool) -> dict[str, Any]:
    """Answers every prompt that has no row yet; returns the summary."""
    summary = await regeneration.regenerate(config, stop, progress.RegenerationProgress(), fresh=fresh)
    if summary["stopped"]:
        counts = summary["conversations"]
        raise Stopped(f"stopped with {counts['kept']} of {counts['rows_in']} conversations answered; they are kept")
    return summary


@flow(name="regenerate")
async def regenerate(config: str = QUICKSTART, overrides: Overrides = UNCHANGED, fresh: bool = False) -> dict[str, Any]:
    """Writes the target's own answers to the prompts of the conversations.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, in their sections or by dotted key.
        fresh: Set older answers aside and ask everything anew.
    """
    settings = load_config(config, overrides)
    async with stop_requests() as stop:
        try:
            await in_thread(stop, regeneration.check, settings)
            summary = await regenerate_answers(settings, stop, fresh)
        except Stopped as reason:
            return stopped_state(reason)
    other = "" if regeneration.is_prepared_by(settings) else f" --data.conversations {summary['output']}"
    console.show_regenerated(summary, f"python -m flows.prepare --config {config}{other}")
    return summary


if __name__ == "__main__":
    run_flow(regenerate, COMMAND, check=regeneration.check, fresh=COMMAND.fresh)
