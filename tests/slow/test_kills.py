"""One training killed twenty times by its pid, a third of them inside a save: it ends with the bits of an unbroken one."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_core import preparation
from dflash_core.rundir import RunDirectory, open_run
from tests.fakes import make_config
from tests.training.test_exact import state, sums

pytestmark = pytest.mark.slow
KILLS, STEPS = 20, 90
CHILD = [sys.executable, "-m", "tests.training.train_child"]


def prepared(root: Path, target: Path, name: str) -> tuple[RunDirectory, Path]:
    """A run with its shards, three micro-batches a step and a checkpoint every second one; and its config as a file."""
    training = {"epochs": 200, "max_steps": STEPS, "accumulate": 3, "checkpoint_every": 2, "tokens_per_batch": 256}
    config = make_config(root, target, name=name, seed=11, training=training, pipeline={"targets": ["cpu", "cpu"]})
    run = open_run(config)
    preparation.prepare(config, run)
    file = root / f"{name}.json"
    file.write_text(config.model_dump_json())
    return run, file


def killed(file: Path, run: RunDirectory, *, steps: int, seconds: float, in_save: bool) -> bool:
    """Starts the training and kills it after so many new steps and seconds; whether a save was going on."""
    with subprocess.Popen([*CHILD, str(file), "0.03"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _, _line in zip(range(steps), child.stdout, strict=False):
            pass
        if in_save:
            deadline = time.perf_counter() + 20
            while not list(run.checkpoints.glob(".step*")) and child.poll() is None and time.perf_counter() < deadline:
                pass
        else:
            time.sleep(seconds)
        child.kill()
        assert child.wait() == -9, "the training had ended before its kill"
    return bool(list(run.checkpoints.glob(".step*")))


def test_twenty_kills_change_no_bit(tmp_path: Path, target_dir: Path) -> None:
    straight, file = prepared(tmp_path, target_dir, "straight")
    subprocess.run([*CHILD, str(file), "0"], check=True, timeout=300, stdout=subprocess.DEVNULL)
    run, file = prepared(tmp_path, target_dir, "killed")
    rng, halves = random.Random(), 0
    for number in range(KILLS):
        steps, seconds, in_save = rng.randint(3, 5), rng.random() * 0.15, number % 3 == 0
        half = killed(file, run, steps=steps, seconds=seconds, in_save=in_save)
        halves += half
        when = "in a save" if in_save else f"{seconds:.3f} s later"
        print(
            f"kill {number}: {steps} steps and {when}; newest step {state(run)['step']}, half a checkpoint: {half}",
            flush=True,
        )
    assert halves >= 3
    subprocess.run([*CHILD, str(file), "0"], check=True, timeout=300, stdout=subprocess.DEVNULL)
    assert (state(run), sums(run)) == (state(straight), sums(straight))
    assert state(run)["step"] == STEPS
