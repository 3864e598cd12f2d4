"""A run on S3: COPIES/NAME/... with the paths of the run directory, so that another machine can go on with it.

    runs/NAME --RunCopy.send--> COPIES/NAME      metrics, shards, checkpoints (newest first), export, reports last

Directories are complete or absent (data.remote). Older checkpoints go by the rule of the run directory, once the newest is there.
`copies_id.txt` tells a run from a later one of the same name: what is another run's is never touched.
"""

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dflash_core.config import Config
from dflash_core.data import remote
from dflash_core.files import write_json
from dflash_core.rundir import RunDirectory
from dflash_core.training.checkpoint import STATE, STEP, complete, quality, surplus
from dflash_core.training.evaluations import read_evaluations

LOG = logging.getLogger(__name__)
ID, RECORD, TRAINED = "copies_id.txt", "run.json", "training.json"
FIRST = (ID, RECORD, "mlflow_run.txt", "metrics.jsonl", "evaluations.jsonl")  # what a run needs to go on, besides its directories
EXPORTS = ("export", "export-speculators")
BEHIND = "copies_behind.txt"  # in the run directory: what the store does not have
SENT = ".copied.json"  # in the run directory: the directories that the store has, and what they were like
WORK = ".copying-"


def place_of(config: Config) -> str:
    """Where the run's copy lies."""
    return f"{config.places.copies}/{config.name}"


class RunCopy:
    """What of a run is at its place, and the sending of the rest. Used by one thread at a time."""

    def __init__(self, config: Config, run: RunDirectory) -> None:
        self.place = place_of(config)
        self._run, self._keep = run, config.pipeline.keep_checkpoints
        self._sent: dict[str, Any] = {}  # `_looks` of each file and directory when it was sent
        self._sums: dict[str, Any] = {}  # and sha256 of a directory's files
        self.found = False  # the place was looked at and is this run's
        self._quality: dict[str, float] = {}
        for left in run.root.glob(f"{WORK}*"):
            shutil.rmtree(left)
        if not (run.root / ID).is_file():
            (run.root / ID).write_text(f"{uuid.uuid4().hex}\n", encoding="utf-8")

    def behind(self) -> list[str]:
        """Names of the files and directories that are not there as they are here; none before there is anything worth a copy."""
        directories = self._directories()
        parts = [*directories, *self._files()] if directories else []
        return [name for name in parts if self._sent.get(name) != _looks(self._run.root / name)]

    def send(self, *, everything: bool) -> None:
        """Sends what changed, if there is a new directory or `everything` is asked for.

        Raises one of `remote.trouble()` where the store does not take it, and ValueError where the place is another run's.
        """
        directories = self._directories()
        if not directories:
            return
        if not self.found:
            self._look()
        if not everything and all(self._sent.get(name) == _looks(self._run.root / name) for name in directories):
            return
        with TemporaryDirectory(prefix=WORK, dir=self._run.root) as work:
            for name in [*FIRST, *directories]:
                self._send(name, Path(work))
            self._retire()
            for name in self._files():
                self._send(name, Path(work))

    def _directories(self) -> list[str]:
        """What is complete or absent, in the order of sending."""
        run = self._run
        steps = [path.name for path in complete(run.checkpoints)]
        names = ["shards", "validation", *(f"checkpoints/{step}" for step in sorted(steps, reverse=True)), *EXPORTS]
        return [name for name in names if (run.root / name).is_dir()]

    def _files(self) -> list[str]:
        ours = [path.name for path in sorted(self._run.root.iterdir()) if path.is_file() and _travels(path.name)]
        index = f"{self._run.index.name}/manifest.json"
        return [*ours, index] if (self._run.root / index).is_file() else ours

    def _look(self) -> None:
        """Whose the place is, and which of the things that were sent before are still there."""
        if remote.read_text(self.place, RECORD) is not None:
            owner = remote.read_text(self.place, ID)
            if owner != (self._run.root / ID).read_text(encoding="utf-8"):
                raise ValueError(
                    f"{self.place} has another run of this name: nothing is copied; take another name or places.copies, or move it away"
                )
        there = remote.list_files(self.place)
        memory = self._run.root / SENT
        known = json.loads(memory.read_text(encoding="utf-8")) if memory.is_file() else {}
        for name, (looks, sums) in known.items():
            if self._whole(name, there) == sums:
                self._sent[name], self._sums[name] = looks, sums
        self._warn_of_later(there)
        self.found = True

    def _whole(self, name: str, there: dict[str, tuple[int, str]]) -> dict[str, str] | None:
        below = {key.removeprefix(f"{name}/"): value for key, value in there.items() if key.startswith(f"{name}/")}
        return remote.is_whole(f"{self.place}/{name}", below)

    def _warn_of_later(self, there: dict[str, tuple[int, str]]) -> None:
        """Says so where another machine went on with the run and this one goes on from before that."""
        later = max((step for name in there if (step := checkpoint_of(name))), default="")
        here = max((path.name for path in complete(self._run.checkpoints)), default="")
        if later > here and self._whole(f"checkpoints/{later}", there):
            LOG.warning(
                "%s is further (%s) than this machine (%s), which goes on from what it has; to go on from there, stop and remove %s",
                self.place, later, here or "no checkpoint", self._run.root,
            )  # fmt: skip

    def _send(self, name: str, work: Path) -> None:
        """One file or directory, if it is not there as it is here. What is replaced meanwhile is left to the next time."""
        path = self._run.root / name
        looks = _looks(path)
        if not looks or self._sent.get(name) == looks:
            return
        try:
            with _held(path, work) as held:
                if held.is_file():
                    remote.send_file(held, self.place, name)
                else:
                    self._sums[name] = remote.file_sums(held)
                    remote.push(held, f"{self.place}/{name}", self._sums[name])
        except FileNotFoundError:
            if _looks(path) == looks:
                raise
            return
        self._sent[name] = looks
        if name in self._sums:
            write_json(
                self._run.root / SENT, {key: (self._sent[key], sums) for key, sums in self._sums.items() if key in self._sent}
            )

    def _retire(self) -> None:
        """Removes the checkpoints that are surplus there and not here, and what is left of uploads that were killed."""
        there = remote.list_files(f"{self.place}/checkpoints")
        steps = {name.partition("/")[0] for name in there}
        whole = [step for step in steps if f"{step}/{remote.COPY}" in there]
        for step in whole:
            if step not in self._quality:
                state = remote.read_text(f"{self.place}/checkpoints/{step}", STATE)
                self._quality[step] = quality(state) if state else 0.0
        real = {step: one.acceptance_length for step, one in read_evaluations(self._run.evaluations).items()}
        gone = {*surplus({step: self._quality[step] for step in whole}, keep=self._keep, real=real), *(steps - set(whole))}
        for step in sorted(gone):
            if not (self._run.checkpoints / step).is_dir():
                remote.remove(f"{self.place}/checkpoints/{step}")
                for known in (self._sent, self._sums):
                    known.pop(f"checkpoints/{step}", None)


def checkpoint_of(name: str) -> str:
    """`step-00000012` of the objects of a checkpoint, else empty."""
    parts = name.split("/")
    return parts[1] if parts[0] == "checkpoints" and STEP.match(parts[1]) else ""


def _travels(name: str) -> bool:
    """Whether a file of the run directory is worth a copy: not what is in the making, nor what only this machine needs."""
    mine = ("ranks.json", BEHIND)
    return not name.startswith((".", "evaluation-job-")) and not name.endswith(".partial") and name not in mine


def _looks(path: Path) -> dict[str, list[int]]:
    """Numbers that change when a file of a directory, or a file, does: size, mtime, inode. Empty where there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    try:
        found = {file.relative_to(path.parent).as_posix(): file.stat() for file in files if file.is_file()}
    except FileNotFoundError:  # it is being replaced
        return {}
    return {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino] for name, stat in found.items()}


@contextmanager
def _held(path: Path, work: Path) -> Iterator[Path]:
    """A file as it is now; of a checkpoint, other names of its files, so that retention does not take them away amid an upload."""
    held = work / path.name
    if path.is_file():
        shutil.copyfile(path, held)
        yield held
        held.unlink()
    elif STEP.match(path.name):
        held.mkdir()
        for file in path.iterdir():
            _link(file, held / file.name)
        yield held
        shutil.rmtree(held)
    else:
        yield path


def _link(file: Path, name: Path) -> None:
    try:
        os.link(file, name)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(file, name)
