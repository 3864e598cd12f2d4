"""Training is the same, bit by bit, for any number of readers and replicas, any stop and any kill."""

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from dflash_core import assembly, preparation
from dflash_core.config import Config
from dflash_core.files import file_sha256
from dflash_core.records import StepMetrics, TrainResult, TrainState
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.training.checkpoint import latest
from tests.fakes import make_config

STEPS = 30


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Any:
    """`bench(name, **pipeline)`: a config of 30 steps of three micro-batches, and its run directory with the shards in it."""
    root = tmp_path_factory.mktemp("exact")
    training = {"epochs": 40, "max_steps": STEPS, "accumulate": 3, "warmup": 0.5, "checkpoint_every": 5, "tokens_per_batch": 256}

    def make(name: str, **pipeline: Any) -> tuple[Config, RunDirectory]:
        config = make_config(root, target_dir, name=name, seed=11, training=training, pipeline=pipeline)
        run = open_run(config)
        if name == "shards":
            preparation.prepare(config, run)
        else:
            shutil.copytree(root / "runs" / "shards" / "shards", run.shards)
        return config, run

    make("shards")
    return make


def train(config: Config, run: RunDirectory, *, stop_at: int = 0) -> TrainResult:
    """Trains in this process; requests a stop when step `stop_at` is logged."""

    async def main() -> TrainResult:
        stop = anyio.Event()

        def on_step(metrics: StepMetrics, total: int) -> None:
            assert total == STEPS
            if metrics.step == stop_at:
                anyio.from_thread.run_sync(stop.set)

        return await assembly.train(config, run, stop, on_step)

    return anyio.run(main)


def sums(run: RunDirectory) -> dict[str, str]:
    """sha256 of the newest checkpoint's tensors."""
    path = latest(run.checkpoints)
    assert path is not None
    return {name: file_sha256(path / name) for name in ("weights.safetensors", "moments.safetensors")}


def state(run: RunDirectory) -> dict[str, Any]:
    path = latest(run.checkpoints)
    assert path is not None
    return json.loads((path / "state.json").read_text())


def metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """Every logged value that does not measure time."""
    timed = ("seconds", "tokens_per_second", "observed")
    lines = run.metrics.read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in timed} for line in lines]


@pytest.fixture(scope="module")
def straight(bench: Any) -> tuple[RunDirectory, TrainResult]:
    """The uninterrupted run with one reader and one target."""
    config, run = bench("straight", peak_tflops=0.05)
    return run, train(config, run)


def check_equal(run: RunDirectory, straight: RunDirectory) -> None:
    assert sums(run) == sums(straight)
    assert state(run) == state(straight)
    assert metrics(run) == metrics(straight)


def test_the_uninterrupted_run(straight: tuple[RunDirectory, TrainResult]) -> None:
    run, result = straight
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["position"] for row in rows] == list(range(3, 3 * STEPS + 1, 3))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert (result.step, result.total_steps, result.stopped, result.saved) == (STEPS, STEPS, False, True)
    assert result.departures == ()
    assert result.tokens == sum(row["tokens"] for row in rows)
    issued = result.ledger["issued"]
    assert result.ledger == {"issued": issued, "applied": 3 * STEPS, "skipped": {}, "returned": issued - 3 * STEPS}
    assert list(result.startup_s) == ["imports", "open", "plan", "model", "first_batch"]
    assert all(seconds >= 0 for seconds in result.startup_s.values())
    assert json.loads(run.training.read_text())["ledger"] == result.ledger
    assert {path.name for path in run.checkpoints.iterdir()} >= {"step-00000020", "step-00000025", "step-00000030"}
    assert len(list(run.checkpoints.iterdir())) <= 4
    assert result.pipeline["lost_at_restart"] == {"steps": 0, "tokens": 0}
    assert result.pipeline["saves"] + result.pipeline["saves_left_out"] == 6
    assert 0 < result.pipeline["mfu"] < 1
    assert 0 < result.pipeline["credit_bytes_most"] <= 2**24


@pytest.mark.parametrize(("readers", "targets", "device"), [(4, 2, "cpu"), (2, 3, "cpu+cpu")])
def test_readers_and_targets_do_not_matter(
    bench: Any, straight: tuple[RunDirectory, TrainResult], readers: int, targets: int, device: str
) -> None:
    config, run = bench(f"r{readers}t{targets}", readers=readers, targets=[device] * targets)
    result = train(config, run)
    assert result.stages["tap"]["workers"] == targets
    check_equal(run, straight[0])
    events = json.loads(run.timeline.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["cat"] == "tap"} == {f"tap-{i}" for i in range(targets)}


def test_stops_and_resumes_do_not_matter(bench: Any, straight: tuple[RunDirectory, TrainResult]) -> None:
    """Two stops at steps that are no checkpoint's, resumed with other numbers of readers and replicas."""
    config, run = bench("stopped")
    first = train(config, run, stop_at=7)
    assert (first.stopped, first.saved) == (True, True)
    assert 7 <= first.step < STEPS - 5
    assert first.ledger["issued"] == first.ledger["applied"] + first.ledger["returned"]
    assert state(run)["step"] == first.step
    assert len(metrics(run)) == first.step
    (run.checkpoints / ".step-00000099.partial").mkdir()
    config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"targets": ("cpu", "cpu"), "readers": 2})})
    second = train(config, run, stop_at=first.step + 3)
    assert second.step >= first.step + 3
    assert not list(run.checkpoints.glob(".step*"))
    last = train(config, run)
    assert (last.stopped, last.step) == (False, STEPS)
    assert last.ledger["applied"] == 3 * (STEPS - second.step)
    assert last.tokens == straight[1].tokens
    check_equal(run, straight[0])


def test_a_finished_training_run_again_changes_nothing(bench: Any, straight: tuple[RunDirectory, TrainResult]) -> None:
    config, run = bench("again")
    shutil.copytree(straight[0].root, run.root, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in run.checkpoints.rglob("*")}
    result = train(config, run)
    assert (result.step, result.stopped, result.saved) == (STEPS, False, True)
    assert result.ledger["applied"] == 0
    assert {path: path.stat().st_mtime_ns for path in run.checkpoints.rglob("*")} == before
    check_equal(run, straight[0])


def test_a_state_is_of_its_step_though_it_is_written_while_20_more_are_trained(
    bench: Any, monkeypatch: pytest.MonkeyPatch, straight: tuple[RunDirectory, TrainResult]
) -> None:
    kept_config, kept = bench("kept", keep_checkpoints=10)
    train(kept_config, kept)
    config, run = bench("slow-writer", keep_checkpoints=10)
    reached, save = threading.Event(), assembly.save_checkpoint

    def slow_save(directory: Path, state: TrainState, **keywords: Any) -> Path:
        assert state.step != 5 or reached.wait(60)
        return save(directory, state, **keywords)

    def on_step(metrics: StepMetrics, total: int) -> None:
        if metrics.step == 25:
            reached.set()

    monkeypatch.setattr(assembly, "save_checkpoint", slow_save)
    result = anyio.run(assembly.train, config, run, anyio.Event(), on_step)
    assert {path.name for path in run.checkpoints.iterdir()} <= {"step-00000005", "step-00000025", "step-00000030"}
    assert result.pipeline["saves_left_out"] >= 3, "steps 10, 15 and 20 had come due meanwhile"
    for path in run.checkpoints.iterdir():
        for name in ("weights.safetensors", "moments.safetensors", "state.json"):
            assert file_sha256(path / name) == file_sha256(kept.checkpoints / path.name / name), (path.name, name)
    check_equal(run, straight[0])


def test_kill_and_restart_do_not_matter(bench: Any, straight: tuple[RunDirectory, TrainResult], tmp_path: Path) -> None:
    """`kill -9` of a training process at a random time after its first checkpoint, then another process."""
    config, run = bench("killed", targets=["cpu", "cpu"])
    config_file = tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "tests.training.train_child", str(config_file)]
    rng = random.Random()
    kill_step, kill_delay = rng.randint(6, 14), rng.random() * 0.1
    print(f"kill {kill_delay:.3f} s after step {kill_step}")
    with subprocess.Popen([*command, "0.06"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == f"step {kill_step}\n":
                break
        while latest(run.checkpoints) is None:
            time.sleep(0.005)
        time.sleep(kill_delay)
        child.kill()
        assert child.wait() == -9
    found = state(run)["step"]
    print(f"killed; newest checkpoint: step {found}")
    assert 5 <= found < STEPS
    again = subprocess.run([*command, "0"], capture_output=True, text=True, check=True, timeout=400)
    assert again.stdout.splitlines() == [f"step {step}" for step in range(found + 1, STEPS + 1)]
    check_equal(run, straight[0])


def test_a_save_without_room_fails_the_run_and_leaves_the_last_checkpoint(
    bench: Any, straight: tuple[RunDirectory, TrainResult], tmp_path: Path
) -> None:
    """Files that may grow to half the weights: the process hears it as it hears a full disk, as an OSError of its write."""
    config, run = bench("no-room")
    train(config, run, stop_at=6)
    path = latest(run.checkpoints)
    assert path is not None
    most = (path / "weights.safetensors").stat().st_size // 2
    config_file = tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    ended = subprocess.run(
        [sys.executable, "-m", "tests.training.train_child", str(config_file), "0"],
        capture_output=True, text=True, timeout=400, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )  # fmt: skip
    assert ended.returncode not in (0, -signal.SIGXFSZ)
    assert "File too large" in ended.stderr
    assert latest(run.checkpoints) == path
    last = train(config, run)
    assert not list(run.checkpoints.glob(".step*"))
    assert (last.step, last.saved) == (STEPS, True)
    check_equal(run, straight[0])


def test_a_damaged_newest_checkpoint_is_named(bench: Any) -> None:
    config, run = bench("damaged")
    train(config, run, stop_at=6)
    path = latest(run.checkpoints)
    assert path is not None
    weights = path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{path.name}/weights.safetensors: missing or changed"):
        train(config, run)


def test_another_experiments_checkpoint_is_refused(bench: Any) -> None:
    config, run = bench("other")
    train(config, run, stop_at=6)
    other = config.model_copy(update={"seed": 12})
    with pytest.raises(ValueError, match=r"was made with .*config_fingerprint.*--fresh starts anew"):
        train(other, run)
