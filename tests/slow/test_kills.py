"""One training killed twenty times by its pid, a third of them inside a save: it ends with the bits of an unbroken one.

Once the training alone, and once the whole command, `python -m flows.train`, with its own temporary Prefect server.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dflash_core import preparation
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.training.checkpoint import latest, step_of
from tests.fakes import make_config
from tests.flows.conftest import ROOT, clean_environment
from tests.training.test_exact import state, sums

pytestmark = pytest.mark.slow
KILLS, STEPS, COMMAND_STEPS = 20, 90, 600
CHILD = [sys.executable, "-m", "tests.training.train_child"]


def prepared(root: Path, target: Path, name: str, *, steps: int = STEPS) -> tuple[RunDirectory, Path]:
    """A run with its shards, three micro-batches a step and a checkpoint every second one; and its config as a file."""
    training = {"epochs": 1000, "max_steps": steps, "accumulate": 3, "checkpoint_every": 2, "tokens_per_batch": 256}
    config = make_config(root, target, name=name, seed=11, training=training, pipeline={"targets": ["cpu", "cpu"]})
    run = open_run(config)
    preparation.prepare(config, run)
    file = root / f"{name}.json"
    file.write_text(config.model_dump_json())
    return run, file


def half_a_checkpoint(run: RunDirectory) -> bool:
    return bool(list(run.checkpoints.glob(".step*")))


def wait_for(found: Callable[[], bool], child: subprocess.Popen[str], *, seconds: float) -> None:
    """Until `found()`, the end of the child, or so many seconds."""
    deadline = time.perf_counter() + seconds
    while not found() and child.poll() is None and time.perf_counter() < deadline:
        time.sleep(0.001)


def kill(child: subprocess.Popen[str], run: RunDirectory, *, seconds: float, in_save: bool) -> None:
    """By its pid, amid the next save or so many seconds from now."""
    if in_save:
        wait_for(lambda: half_a_checkpoint(run), child, seconds=20)
    else:
        time.sleep(seconds)
    child.kill()
    assert child.wait() == -9, "the training had ended before its kill"


def killed(file: Path, run: RunDirectory, *, steps: int, seconds: float, in_save: bool) -> bool:
    """Starts the training and kills it after so many new steps and seconds; whether a save was going on."""
    with subprocess.Popen([*CHILD, str(file), "0.03"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _, _line in zip(range(steps), child.stdout, strict=False):
            pass
        kill(child, run, seconds=seconds, in_save=in_save)
    return half_a_checkpoint(run)


def killed_command(file: Path, run: RunDirectory, *, steps: int, seconds: float, in_save: bool) -> bool:
    """The same with the command that users start; its temporary server is killed after it."""
    stored, begin = latest(run.checkpoints), time.time()
    wanted = steps + (0 if stored is None else step_of(stored.name))

    def gone_on() -> bool:
        """Lines beyond the checkpoint are cut off when the training resumes, and then written anew."""
        file = run.metrics
        return file.is_file() and file.stat().st_mtime > begin and file.read_bytes().count(b"\n") >= wanted

    with started(file) as child:
        try:
            wait_for(gone_on, child, seconds=600)
            kill(child, run, seconds=seconds, in_save=in_save)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return half_a_checkpoint(run)


def started(file: Path) -> subprocess.Popen[str]:
    """`python -m flows.train` in a group of its own, without MLflow."""
    command = [sys.executable, "-m", "flows.train", "--config", str(file), "--places.mlflow_uri", "none"]
    environment = clean_environment(file.parent / "prefect")
    log = file.with_suffix(".log").open("a")
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, text=True, start_new_session=True)


def kill_often(run: RunDirectory, file: Path, start_and_kill: Callable[..., bool]) -> None:
    """Twenty kills at printed times; at least three of them leave half a checkpoint."""
    rng, halves = random.Random(), 0
    for number in range(KILLS):
        steps, seconds, in_save = rng.randint(3, 5), rng.random() * 0.15, number % 3 == 0
        half = start_and_kill(file, run, steps=steps, seconds=seconds, in_save=in_save)
        halves += half
        when, newest = "in a save" if in_save else f"{seconds:.3f} s later", latest(run.checkpoints)
        print(f"kill {number}: {steps} steps and {when}; newest: {newest and newest.name}, half a checkpoint: {half}", flush=True)
    assert halves >= 3


def test_twenty_kills_change_no_bit(tmp_path: Path, target_dir: Path) -> None:
    straight, file = prepared(tmp_path, target_dir, "straight")
    subprocess.run([*CHILD, str(file), "0"], check=True, timeout=300, stdout=subprocess.DEVNULL)
    run, file = prepared(tmp_path, target_dir, "killed")
    kill_often(run, file, killed)
    subprocess.run([*CHILD, str(file), "0"], check=True, timeout=300, stdout=subprocess.DEVNULL)
    assert (state(run), sums(run)) == (state(straight), sums(straight))
    assert state(run)["step"] == STEPS


def test_twenty_kills_of_the_command_change_no_bit(tmp_path: Path, target_dir: Path) -> None:
    straight, file = prepared(tmp_path, target_dir, "straight", steps=COMMAND_STEPS)
    subprocess.run([*CHILD, str(file), "0"], check=True, timeout=600, stdout=subprocess.DEVNULL)
    run, file = prepared(tmp_path, target_dir, "killed", steps=COMMAND_STEPS)
    kill_often(run, file, killed_command)
    with started(file) as child:
        assert child.wait(timeout=600) == 0, file.with_suffix(".log").read_text()[-3000:]
    assert (state(run), sums(run)) == (state(straight), sums(straight))
    assert state(run)["step"] == COMMAND_STEPS
    assert json.loads(run.report.read_text())["training"]["step"] == COMMAND_STEPS
