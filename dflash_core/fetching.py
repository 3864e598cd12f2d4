"""A run back from S3, where this machine has none of its name: what `copies` sent, checked, and in one piece.

    COPIES/NAME --bring--> runs/.NAME.fetching --(renamed)--> runs/NAME

Only whole copies are used: of the checkpoints the newest that is, and what belongs to the end of the training only with its last one.
"""

import json
import logging
import os
import shutil
from pathlib import Path

from dflash_core.config import Config
from dflash_core.copies import EXPORTS, FIRST, RECORD, TRAINED, checkpoint_of, place_of
from dflash_core.data import remote
from dflash_core.rundir import RunDirectory, check_experiment, hold

LOG = logging.getLogger(__name__)


def bring(config: Config, *, fresh: bool = False) -> str:
    """Fetches the run where this machine has none and its place has one; returns what was fetched, in words.

    Raises ValueError where what is there is another experiment, or `fresh` asks for a new run of that name. A store that does not
    answer is a warning: the run begins here.
    """
    root, place = Path(config.places.runs).absolute() / config.name, place_of(config)
    if not fresh and (root / RECORD).is_file():
        return ""
    try:
        record = remote.read_text(place, RECORD)
        if record is None:
            return ""
        if fresh:
            raise ValueError(f"{place} has an older run: --fresh would mix two runs there; move it away, or take another name")
        check_experiment(record, config, place)
        if root.is_dir() and any(path.name != "preview.html" for path in root.iterdir()):
            return ""  # what it is, opening it will tell
        return _fetch(place, root)
    except remote.trouble() as error:
        LOG.warning("%s does not answer (%s): whether it has this run is not known, it begins here", place, error)
        return ""


def _fetch(place: str, root: Path) -> str:
    """The run of `place` as the directory `root`, complete or absent."""
    making = root.with_name(f".{root.name}.fetching")
    making.mkdir(parents=True, exist_ok=True)
    with hold(RunDirectory(root=making, state="new")):
        for left in making.iterdir():
            if left.name != ".lock":
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        there = remote.list_files(place)
        names = {name.partition("/")[0] for name in there}
        remote.fetch_file(place, RECORD, making / RECORD)
        for name in (*FIRST, "shards", "validation"):
            if name in names and name != RECORD:
                _fetched(place, name, making)
        step = _newest(place, there, making)
        ours, other = EXPORTS
        if step and _is_last(place, there, making, step) and _fetched(place, ours, making):
            if other in names:
                _fetched(place, other, making)
            for name in there:
                if name not in FIRST and ("/" not in name or name.startswith("index/")):
                    _fetched(place, name, making)
        shutil.rmtree(root, ignore_errors=True)  # a preview
        os.rename(making, root)
    return f"{place}: {f'checkpoint {step}' if step else 'no checkpoint'} fetched to {root}"


def _newest(place: str, there: dict[str, tuple[int, str]], making: Path) -> str:
    """The newest checkpoint that is whole, fetched; empty where there is none."""
    steps = sorted({step for name in there if (step := checkpoint_of(name))}, reverse=True)
    return next((step for step in steps if _fetched(place, f"checkpoints/{step}", making)), "")


def _is_last(place: str, there: dict[str, tuple[int, str]], making: Path, step: str) -> bool:
    """Whether the training ended at this checkpoint, so that its results belong to it."""
    if TRAINED not in there or not _fetched(place, TRAINED, making):
        return False
    last = json.loads((making / TRAINED).read_text(encoding="utf-8"))["step"] == int(step.removeprefix("step-"))
    if not last:
        (making / TRAINED).unlink()
    return bool(last)


def _fetched(place: str, name: str, making: Path) -> bool:
    """Whether a file or directory came whole; why not is told."""
    try:
        if "." in name:  # files have a suffix, directories none
            remote.fetch_file(place, name, making / name)
        else:
            remote.pull(f"{place}/{name}", making / name)
    except ValueError as error:
        LOG.warning("%s is not used: %s", name, error)
        return False
    return True
