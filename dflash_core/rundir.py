"""The directory of one run, and what running the same config again means.

    runs/<name>/  run.json  shards/  validation/  data.png  preview.html  checkpoints/step-00000123/  export/
                  metrics.jsonl  evaluations.jsonl  timeline.json  timeline.png  training.json  report.json  report.md
                  acceptance.png  training.png

new: nothing is there.  resume: the same experiment, not finished.  finished: report.json is there.  The same name with another
experiment is an error that shows the difference. `fresh` sets the old directory aside and starts anew.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dflash_core.config import Config, differences, experiment, fingerprint
from dflash_core.files import beside, file_sha256, locked, write_json

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Paths of one run."""

    root: Path
    state: Literal["new", "resume", "finished"]

    def of_rank(self, rank: int) -> "RunDirectory":
        """Where a rank writes what only it knows: rank 0 here, others under ranks/. The checkpoints are rank 0's."""
        if rank == 0:
            return self
        root = self.root / "ranks" / str(rank)
        root.mkdir(parents=True, exist_ok=True)
        return RunDirectory(root=root, state=self.state)

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def validation(self) -> Path:
        return self.root / "validation"

    @property
    def preview(self) -> Path:
        return self.root / "preview.html"

    @property
    def picture(self) -> Path:
        return self.root / "data.png"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def index(self) -> Path:
        """What was worked out about files of others that the run reads."""
        return self.root / "index"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def export_speculators(self) -> Path:
        return self.root / "export-speculators"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.json"

    @property
    def timeline_picture(self) -> Path:
        return self.root / "timeline.png"

    @property
    def training(self) -> Path:
        return self.root / "training.json"

    @property
    def acceptance_picture(self) -> Path:
        return self.root / "acceptance.png"

    @property
    def training_picture(self) -> Path:
        return self.root / "training.png"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def report_text(self) -> Path:
        return self.root / "report.md"


def config_fingerprint(config: Config) -> str:
    """Identity of an experiment: equal for two configs that must give the same drafter. Raises ValueError as `identity`."""
    return fingerprint(identity(config))


def identity(config: Config, *, recorded: dict[str, Any] | None = None) -> dict[str, Any]:
    """The experiment, and the content of the drafter that it starts from.

    Where that directory is gone by now, its content is what the run `recorded`, by default in its own run.json. Raises ValueError
    where neither is there.
    """
    start = config.training.warm_start
    if start is None:
        return experiment(config)
    if not (content := _weights_sha256(Path(start))):
        record = _root(config) / "run.json"
        if recorded is None and record.is_file():
            recorded = json.loads(record.read_text(encoding="utf-8"))["experiment"]
        content = (recorded or {}).get("warm_start", {})
    if not content:
        raise ValueError(f"training.warm_start {start!r}: no directory with .safetensors files; name an exported drafter")
    return experiment(config) | {"warm_start": content}


def _weights_sha256(directory: Path) -> dict[str, str]:
    """sha256 of each file of weights, by name."""
    stats = {file: file.stat() for file in sorted(directory.glob("*.safetensors"))}
    return {file.name: _sha256(file, stat.st_mtime_ns, stat.st_size, stat.st_ino) for file, stat in stats.items()}


@lru_cache
def _sha256(file: Path, *looks: int) -> str:
    """Read once while the file looks the same."""
    return file_sha256(file)


def _root(config: Config) -> Path:
    return Path(config.places.runs).absolute() / config.name


def open_run(config: Config, *, fresh: bool = False, begin: bool = True) -> RunDirectory:
    """The run directory of `config`, created where it is new and `begin` allows it.

    Raises ValueError where the name belongs to another experiment, no run is there that may not begin, or `fresh` would
    move a run that is in use.
    """
    root = _root(config)
    record = root / "run.json"
    if fresh and record.is_file():
        identity(config, recorded={})  # what the new run needs is there
        _set_aside(root)
    if record.is_file():
        check_experiment(record.read_text(encoding="utf-8"), config, str(root))
        return RunDirectory(root=root, state="finished" if (root / "report.json").is_file() else "resume")
    if root.is_dir() and any(path.name not in (beside(record).name, "preview.html") for path in root.iterdir()):
        raise ValueError(f"{root} is not empty and no run of this tool (no run.json); choose another name")
    if not begin:
        raise ValueError(f"{root}: no such run; train first")
    own = identity(config)
    root.mkdir(parents=True, exist_ok=True)
    write_json(record, {"experiment": own, "config_fingerprint": fingerprint(own)})
    return RunDirectory(root=root, state="new")


def check_experiment(record: str, config: Config, where: str) -> None:
    """Raises ValueError where the run.json of `where` is that of another experiment than `config`."""
    recorded = json.loads(record)["experiment"]
    changed = differences(recorded, identity(config, recorded=recorded))
    if changed:
        raise ValueError(
            f"{where} belongs to another experiment; give this one a new name, or --fresh to set the old one aside. "
            f"Different (old -> new): {'; '.join(changed)}"
        )


def _set_aside(root: Path) -> None:
    number = 1
    while (aside := root.with_name(f"{root.name}.old-{number}")).exists():
        number += 1
    with hold(RunDirectory(root=root, state="resume")):
        os.rename(root, aside)
    LOG.warning("the older run is kept in %s", aside)


@contextmanager
def hold(run: RunDirectory) -> Iterator[None]:
    """Keeps other processes out of the run while it works. Raises ValueError where one is already at it, or as `locked` does."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(run.root / ".lock", wait=False))
        except BlockingIOError as error:
            raise ValueError(f"{run.root} is in use by another process; wait for it or choose another name") from error
        yield
