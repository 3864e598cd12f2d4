"""Ranks as torchrun starts them, on gloo: the run of one process, whatever their number, and no rank outlives another or its parent."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from dflash_core import assembly, preparation
from dflash_core.config import Config
from dflash_core.decoding.export import write_export
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import read_facts
from dflash_core.ranks import killed_rank, train_in_ranks
from dflash_core.records import StepMetrics, TrainResult
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.sizes import resolve
from tests.fakes import make_config

pytestmark = pytest.mark.slow
STEPS = 10


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Any:
    """`bench(name, ranks)`: a config of ten steps of six micro-batches, and its run directory with shards."""
    root = tmp_path_factory.mktemp("ranks")
    training = {"epochs": 40, "max_steps": STEPS, "accumulate": 6, "checkpoint_every": 4, "tokens_per_batch": 256}

    def make(name: str, ranks: int, **changes: Any) -> tuple[Config, RunDirectory]:
        config = make_config(root, target_dir, name=name, seed=11, training={**training, **changes}, pipeline={"ranks": ranks})
        run = open_run(config)
        if name == "shards":
            preparation.prepare(config, run)
        else:
            shutil.copytree(root / "runs" / "shards" / "shards", run.shards, dirs_exist_ok=True)
        return config, run

    make("shards", 1)
    return make


def train(config: Config, run: RunDirectory, *, stop_at: int = 0, steps: list[StepMetrics] | None = None) -> TrainResult:
    async def main() -> TrainResult:
        stop = anyio.Event()

        def on_step(metrics: StepMetrics, total: int) -> None:
            (steps if steps is not None else []).append(metrics)
            if metrics.step == stop_at:
                anyio.from_thread.run_sync(stop.set)

        if config.pipeline.ranks == 1:
            return await assembly.train(config, run, stop, on_step)
        return await train_in_ranks(config, run, stop, on_step)

    return anyio.run(main)


def rows(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def check_same_run(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for name in ("step", "position", "micro_batches", "rows", "tokens", "blocks", "counted", "learning_rate"):
        assert [row[name] for row in found] == [row[name] for row in wanted], name
    assert found[0]["gradient_norm"] == pytest.approx(wanted[0]["gradient_norm"], rel=1e-6)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-3)


@pytest.fixture(scope="module")
def alone(bench: Any) -> list[dict[str, Any]]:
    config, run = bench("alone", 1)
    train(config, run)
    return rows(run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_makes_the_run_of_one(bench: Any, alone: list[dict[str, Any]], ranks: int) -> None:
    config, run = bench(f"r{ranks}", ranks)
    steps: list[StepMetrics] = []
    result = train(config, run, steps=steps)
    assert (result.step, result.stopped, result.saved) == (STEPS, False, True)
    assert [metrics.step for metrics in steps] == list(range(1, STEPS + 1))
    check_same_run(rows(run), alone)
    assert result.ledger["applied"] == 6 * STEPS // ranks
    for rank in range(1, ranks):
        assert [row["loss"] for row in rows(run.of_rank(rank))] == [row["loss"] for row in rows(run)]


def test_ranks_begin_from_the_drafter_that_is_named(bench: Any, alone: list[dict[str, Any]], tmp_path: Path) -> None:
    config, run = bench("warm-alone", 1)
    shape = resolve(config, read_facts(config.target.path))
    start = write_export(tmp_path / "start", new_drafter(shape, 99).state_dict(), shape, target="some/target")
    for ranks in (1, 2):
        config, run = bench(f"warm-{ranks}", ranks, warm_start=str(start))
        train(config, run)
    first, second = (rows(bench(f"warm-{ranks}", ranks, warm_start=str(start))[1]) for ranks in (1, 2))
    check_same_run(second, first)
    assert first[0]["loss"] != alone[0]["loss"]


def test_a_stopped_run_goes_on_with_another_number_of_ranks(bench: Any, alone: list[dict[str, Any]]) -> None:
    config, run = bench("changed", 2)
    first = train(config, run, stop_at=3)
    assert (first.stopped, first.saved) == (True, True)
    assert 3 <= first.step < STEPS
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"ranks": 1})})
    last = train(config, run)
    assert (last.step, last.departures) == (STEPS, ("ranks: 2 -> 1",))
    check_same_run(rows(run), alone)


PARENT = """
import sys
from pathlib import Path
from dflash_core.config import Config
from dflash_core.rundir import RunDirectory
from tests.slow.test_ranks import train
config = Config.model_validate_json(Path(sys.argv[1]).read_text())
train(config, RunDirectory(root=Path(sys.argv[2]), state="resume"))
"""


def ranks_of(run: RunDirectory) -> list[int]:
    """Process ids whose command line names this run's job."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except (OSError, NotADirectoryError):
            continue
        if str(run.root / "ranks.json").encode() in words and b"torch.distributed.run" not in words:
            found.append(int(place.name))
    return found


@pytest.fixture
def parent(bench: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A process that trains in three ranks for a long time, some steps into it."""
    config, run = bench(f"killed-{request.node.name[:20]}", 3, max_steps=100_000, epochs=10**6)
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    child = subprocess.Popen([sys.executable, "-c", PARENT, str(file), str(run.root)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 900
        while not (run.metrics.is_file() and run.metrics.read_text().count("\n") > 3):
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.1)
        assert len(ranks_of(run)) == 3
        yield child, run
    finally:
        child.kill()


def gone_within(run: RunDirectory, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while ranks_of(run):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_the_kill_of_one_rank_ends_all_with_its_name(parent: Any) -> None:
    child, run = parent
    start = time.monotonic()
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    _, stderr = child.communicate(timeout=60)
    print(f"parent ended {time.monotonic() - start:.1f} s after the kill of a rank")
    assert time.monotonic() - start < 30
    assert child.returncode == 1
    assert "was killed by SIGKILL; the other ranks were ended" in stderr
    assert ranks_of(run) == []


def test_ranks_leave_when_their_parent_is_killed(parent: Any) -> None:
    child, run = parent
    start = time.monotonic()
    child.kill()
    assert gone_within(run, 30)
    print(f"ranks gone {time.monotonic() - start:.1f} s after the kill of their parent")


def test_the_error_of_a_rank_comes_out(bench: Any) -> None:
    config, run = bench("wrong", 2)
    shutil.rmtree(run.shards)
    with pytest.raises(ValueError, match=r"rank \d: .*shards"):
        train(config, run)


def test_torchruns_summary_names_the_killed_rank() -> None:
    summary = """
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 12)
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 14)
"""
    assert killed_rank(summary) == (2, 9)
    assert killed_rank(summary.replace("-9", "1")) is None
