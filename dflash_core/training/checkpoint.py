"""What training resumes from: `checkpoints/step-00000123/`, complete or absent.

    weights.safetensors   fp32 masters          moments.safetensors   what the optimizer keeps, fp32
    average.safetensors   running mean of the weights, with training.ema
    state.json            step, position, counters, what the run depends on, sha256 of these files; written last

A directory is written beside (`.partial`), every file fsynced, and renamed; leftovers of a killed save are removed at the next
start. There is no random state to keep: anchors and order come from (seed, epoch, row).
"""

import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_core.files import file_sha256, sync
from dflash_core.records import TrainState

WEIGHTS, MOMENTS, AVERAGE, STATE = "weights.safetensors", "moments.safetensors", "average.safetensors", "state.json"
STEP = re.compile(r"^step-(\d{8})$")


def environment(*, ranks: int = 1) -> dict[str, Any]:
    """What bit-identical arithmetic depends on besides the config: stored, and compared on resume."""
    packages = {name: version(name) for name in ("transformers", "numpy", "safetensors")}
    packages["torch"] = torch.__version__  # with its build, +cpu or +cu130, which the package's own version may lack
    return {"python": platform.python_version(), "machine": platform.machine(), "threads": 1, "ranks": ranks, **packages}


def save_checkpoint(directory: Path, state: TrainState, *, depends_on: dict[str, Any], ranks: int = 1) -> Path:
    """`state` under `directory`/step-XXXXXXXX, atomically; returns that path. `depends_on` goes into state.json."""
    final = directory / f"step-{state.step:08d}"
    if final.is_dir():
        return final
    beside = directory / f".{final.name}.partial"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    files = {WEIGHTS: state.weights, MOMENTS: state.moments} | ({} if state.average is None else {AVERAGE: state.average})
    for file, tensors in files.items():
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, beside / file)
    value = {
        "step": state.step,
        "position": state.position,
        "counters": state.counters,
        "depends_on": depends_on,
        "environment": environment(ranks=ranks),
        "sha256": {file: file_sha256(beside / file) for file in files},
    }
    (beside / STATE).write_text(json.dumps(value, indent=2), encoding="utf-8")
    for name in (*files, STATE):
        sync(beside / name)
    sync(beside)
    os.rename(beside, final)
    sync(directory)
    return final


def clean(directory: Path) -> None:
    """Removes what a killed save left."""
    for partial in directory.glob(".step-*.partial"):
        shutil.rmtree(partial)


def prune(directory: Path, *, keep: int, real: Mapping[int, float] | None = None, evaluating: int = -1) -> None:
    """Removes all checkpoints but the last `keep`, the best, and that of step `evaluating`."""
    found = {path.name: quality((path / STATE).read_text(encoding="utf-8")) for path in complete(directory)}
    for name in surplus(found, keep=keep, real=real or {}):
        if step_of(name) != evaluating:
            beside = directory / f".{name}.partial"
            os.rename(directory / name, beside)  # never half a checkpoint under its name
            shutil.rmtree(beside)


def surplus(found: Mapping[str, float], *, keep: int, real: Mapping[int, float]) -> list[str]:
    """Of complete checkpoints, by name with their `quality`: those that are neither among the last `keep` nor the best.

    The best is the one of the highest real acceptance, `real[step]`; where none was measured, of the highest quality.
    """
    names = sorted(found)
    values = {name: real[step] for name in names if (step := step_of(name)) in real} or found
    best = max(values, key=lambda name: (values[name], name), default=None)
    return [name for name in names[:-keep] if name != best]


def quality(state: str) -> float:
    """Simulated acceptance, from the text of a state.json."""
    counters: dict[str, float] = json.loads(state)["counters"]
    return counters.get("quality", 0.0)


def step_of(name: str) -> int:
    """The step of a checkpoint, by its directory's name."""
    return int(name.removeprefix("step-"))


def stored(directory: Path, step: int) -> Path | None:
    """The complete checkpoint of a step."""
    path = directory / f"step-{step:08d}"
    return path if (path / STATE).is_file() else None


def latest(directory: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    return max(complete(directory), key=lambda path: path.name, default=None)


def complete(directory: Path) -> list[Path]:
    """Every complete checkpoint, in no order."""
    return [path for path in directory.glob("step-*") if STEP.match(path.name) and (path / STATE).is_file()]


def load_checkpoint(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """(state, state.json as stored). Raises ValueError where a file is not the one that was saved."""
    value = json.loads((path / STATE).read_text(encoding="utf-8"))
    for name, wanted in value["sha256"].items():
        if not (path / name).is_file() or file_sha256(path / name) != wanted:
            raise ValueError(
                f"checkpoint {path / name}: missing or changed since it was saved; remove {path} to use an older one"
            )
    state = TrainState(
        step=value["step"],
        position=value["position"],
        weights=load_file(path / WEIGHTS),
        moments=load_file(path / MOMENTS),
        average=load_file(path / AVERAGE) if AVERAGE in value["sha256"] else None,
        counters=value["counters"],
    )
    return state, value


def clone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Private copies of tensors on their own device."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
