"""The whole chain, as it is scheduled: `python -m flows.full_run --config FILE`.

    regenerate -> prepare -> train (export, evaluate) -> promote     regenerate: where the run prepares its own regenerated answers

Every step is a flow run of its own and skips what is done. A step that was stopped ends the chain as stopped; one that failed, as
failed. `retrain` is for a schedule: new data or a changed config begin a new run NAME-2, NAME-3, ... beside the finished one, and
promotion puts it into use only where it is better.
"""

import json
from typing import Any

from flows.command import read_command_line, run_flow

PURPOSE = "Regenerates, prepares, trains, measures and promotes."
OPTIONS = {
    "retrain": {"action": "store_true", "help": "where the run is finished and its data or config changed, begin NAME-2, ..."}
}
COMMAND = read_command_line("full_run", PURPOSE, options=OPTIONS) if __name__ == "__main__" else None

from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import flow
from prefect.context import FlowRunContext

from dflash_core.config import Config
from dflash_core.decoding import regenerate as regeneration
from dflash_core.rundir import RunDirectory, config_fingerprint, open_run
from flows import console
from flows.parameters import UNCHANGED, Overrides, given
from flows.prepare import prepare
from flows.promote import PROMOTION, promote
from flows.regenerate import regenerate
from flows.running import Stopped, in_thread, load_core, stop_requests, stopped_state
from flows.settings import QUICKSTART, load_config
from flows.train import train


def by_schedule() -> bool:
    """Whether a schedule began this run: those retrain. Prefect's server empties a schedule's own parameters when it is switched on."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and bool(context.flow_run.auto_scheduled)


@flow(name="full-run")
async def full_run(config: str = QUICKSTART, overrides: Overrides = UNCHANGED, retrain: bool = False) -> dict[str, Any]:
    """From prompts to a promoted drafter: regenerates, prepares, trains, measures and promotes; skips what is done.

    Args:
        config: The run, a YAML file such as configs/quickstart.yaml.
        overrides: Fields of the run to change, in their sections or by dotted key.
        retrain: Where the run is finished and its data or config changed since, begin a new one, NAME-2, NAME-3, ...
    """
    changes = given(overrides)
    settings = load_config(config, changes)
    async with stop_requests() as stop:
        try:
            if regeneration.is_prepared_by(settings):
                await _step(regenerate, config, changes)
            if retrain or by_schedule():
                name = await in_thread(stop, newest_run, settings)
                settings, changes = settings.model_copy(update={"name": name}), changes | {"name": name}
            prepared = await _step(prepare, config, changes)
            trained = await _step(train, config, changes)
            root = Path(settings.places.runs).absolute() / settings.name
            if (root / PROMOTION).is_file():
                promoted = json.loads((root / PROMOTION).read_text(encoding="utf-8"))
                console.say(f"promotion skipped: decided before, {root / PROMOTION}")
            else:
                promoted = await _step(promote, config, changes)
        except Stopped as reason:
            return stopped_state(reason)
    return {"run": settings.name, "skipped_preparation": prepared["skipped"], **trained, "promotion": promoted}


async def _step(step: Any, config: str, changes: dict[str, Any]) -> dict[str, Any]:
    """One flow of the chain. Raises Stopped where it was stopped, and its own error where it failed."""
    state = await step(config, changes, return_state=True)
    if state.is_cancelled():
        raise Stopped(f"{step.name}: {state.message}")
    return await state.aresult()


def newest_run(config: Config) -> str:
    """The run to go on with: the newest that is not finished or up to date, else a new name."""
    number = 1
    while _root(config, number + 1).is_dir():
        number += 1
    if not (_root(config, number) / "report.json").is_file():
        return _root(config, number).name
    record = json.loads((_root(config, number) / "run.json").read_text(encoding="utf-8"))
    if record["config_fingerprint"] == config_fingerprint(config) and _is_up_to_date(config, number):
        return _root(config, number).name
    return _root(config, number + 1).name


def _root(config: Config, number: int) -> Path:
    name = config.name if number == 1 else f"{config.name}-{number}"
    return Path(config.places.runs).absolute() / name


def _is_up_to_date(config: Config, number: int) -> bool:
    """Whether a finished run was trained on what its config names today."""
    core, _ = load_core()
    run = open_run(config.model_copy(update={"name": _root(config, number).name}), begin=False)
    if config.data.shards:
        trained_on = json.loads(run.report.read_text(encoding="utf-8"))["data_fingerprint"]
        vocab_size = core.read_facts(config.target.path).vocab_size
        with TemporaryDirectory(dir=config.places.runs) as place:  # opening keeps an index, which must not replace the run's
            look = RunDirectory(root=Path(place), state="new")
            with core.opening.open_data(config, look, vocab_size=vocab_size) as dataset:
                return dataset.manifest().fingerprint == trained_on
    return core.preparation.prepared(config, run) is not None


if __name__ == "__main__":
    run_flow(full_run, COMMAND, retrain=COMMAND.options["retrain"])
