"""Checkpoints are complete or absent, and what is loaded is what was saved."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_core.records import TrainState
from dflash_core.training import checkpoint
from dflash_core.training.checkpoint import clean, clone, environment, latest, load_checkpoint, prune, save_checkpoint

DEPENDS_ON = {"config_fingerprint": "c", "data_fingerprint": "d"}


def state(step: int = 12, *, seed: int = 0) -> TrainState:
    generator = torch.Generator().manual_seed(seed)
    return TrainState(
        step=step,
        position=3 * step + 1,
        weights={"fc.weight": torch.randn(4, 6, generator=generator), "norm.weight": torch.randn(4, generator=generator)},
        moments={"fc.weight.exp_avg": torch.randn(4, 6, generator=generator)},
        counters={"applied": 36, "updates": 12, "skipped: no anchor": 1},
    )


def test_round_trip(tmp_path: Path) -> None:
    saved = state()
    path = save_checkpoint(tmp_path, saved, depends_on=DEPENDS_ON)
    assert path == tmp_path / "step-00000012"
    assert sorted(file.name for file in path.iterdir()) == ["moments.safetensors", "state.json", "weights.safetensors"]
    loaded, stored = load_checkpoint(path)
    assert (loaded.step, loaded.position, loaded.counters) == (saved.step, saved.position, saved.counters)
    for a, b in ((loaded.weights, saved.weights), (loaded.moments, saved.moments)):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == torch.float32 for name in a)
    assert stored["depends_on"] == DEPENDS_ON
    assert stored["environment"] == environment()
    assert stored["environment"]["torch"] == torch.__version__
    wanted = hashlib.sha256((path / "weights.safetensors").read_bytes()).hexdigest()
    assert stored["sha256"]["weights.safetensors"] == wanted


def test_a_running_mean_of_the_weights_comes_back_and_must_not_be_lost(tmp_path: Path) -> None:
    averaged = replace(state(), average={name: tensor * 0.5 for name, tensor in state().weights.items()})
    path = save_checkpoint(tmp_path, averaged, depends_on={})
    found, _ = load_checkpoint(path)
    assert found.average is not None
    assert all(torch.equal(found.average[name], tensor) for name, tensor in (averaged.average or {}).items())
    assert found.drafter is found.average
    (path / "average.safetensors").unlink()
    with pytest.raises(ValueError, match=r"average\.safetensors: missing"):
        load_checkpoint(path)


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    for place in ("a", "b"):
        save_checkpoint(tmp_path / place, state(), depends_on=DEPENDS_ON)
    for name in ("weights.safetensors", "moments.safetensors", "state.json"):
        one, two = (tmp_path / place / "step-00000012" / name for place in ("a", "b"))
        assert one.read_bytes() == two.read_bytes()


def test_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None
    assert latest(tmp_path) is None
    for step in (9, 100, 20):
        save_checkpoint(tmp_path, state(step), depends_on=DEPENDS_ON)
    (tmp_path / "step-00000500").mkdir()  # somebody's empty directory
    (tmp_path / ".step-00000600.partial").mkdir()
    (tmp_path / "step-00000700.bak").mkdir()
    (tmp_path / "step-00000700.bak" / "state.json").write_text("{}")
    assert latest(tmp_path) == tmp_path / "step-00000100"


@pytest.mark.parametrize("killed_at", ["save_file", "file_sha256", "sync", "rename"])
def test_a_save_killed_anywhere_leaves_the_old_one_and_a_removable_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    save_checkpoint(tmp_path, state(5), depends_on=DEPENDS_ON)

    class Killed(BaseException):
        pass

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    monkeypatch.setattr(os if killed_at == "rename" else checkpoint, killed_at, killed)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, state(10), depends_on=DEPENDS_ON)
    monkeypatch.undo()
    assert latest(tmp_path) == tmp_path / "step-00000005"
    assert (tmp_path / ".step-00000010.partial").is_dir()
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    again = save_checkpoint(tmp_path, state(10), depends_on=DEPENDS_ON)
    assert load_checkpoint(again)[0].step == 10


def test_a_save_writes_over_what_a_killed_one_left(tmp_path: Path) -> None:
    rest = tmp_path / ".step-00000012.partial"
    rest.mkdir()
    (rest / "weights.safetensors").write_bytes(b"half")
    (rest / "stray").write_text("x")
    path = save_checkpoint(tmp_path, state(), depends_on=DEPENDS_ON)
    assert not rest.exists()
    assert not (path / "stray").exists()
    load_checkpoint(path)


def test_saving_an_existing_step_keeps_it(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, state(), depends_on=DEPENDS_ON)
    before = {file.name: file.stat().st_mtime_ns for file in first.iterdir()}
    assert save_checkpoint(tmp_path, state(), depends_on=DEPENDS_ON) == first
    assert {file.name: file.stat().st_mtime_ns for file in first.iterdir()} == before


@pytest.mark.parametrize("name", ["weights.safetensors", "moments.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    path = save_checkpoint(tmp_path, state(), depends_on=DEPENDS_ON)
    content = (path / name).read_bytes()
    if damage == "truncated":
        (path / name).write_bytes(content[:-5])
    elif damage == "changed":
        (path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (path / name).unlink()
    with pytest.raises(ValueError, match=rf"step-00000012/{name}: missing or changed since it was saved"):
        load_checkpoint(path)


def test_state_without_moments(tmp_path: Path) -> None:
    """Before the first step there are none."""
    path = save_checkpoint(tmp_path, replace(state(0), moments={}), depends_on=DEPENDS_ON)
    assert load_checkpoint(path)[0].moments == {}
    assert json.loads((path / "state.json").read_text())["step"] == 0


def test_clones_are_private() -> None:
    original = {"a": torch.zeros(3, requires_grad=True)}
    copy = clone(original)
    with torch.no_grad():
        original["a"] += 1
    assert copy["a"].sum() == 0
    assert not copy["a"].requires_grad


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for step, quality in ((10, 1.5), (20, 3.5), (30, 3.0), (40, 2.0), (50, 2.5)):
        saved = replace(state(step), counters={"updates": step, "quality": quality})
        save_checkpoint(tmp_path, saved, depends_on=DEPENDS_ON)
    (tmp_path / "step-00000005").mkdir()  # somebody's empty directory
    prune(tmp_path, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000005", "step-00000020", "step-00000040", "step-00000050"]
    prune(tmp_path, keep=1)
    assert latest(tmp_path) == tmp_path / "step-00000050"
    assert (tmp_path / "step-00000020").is_dir()
    assert not (tmp_path / "step-00000040").exists()


def test_the_best_by_real_acceptance_stays_whatever_was_simulated(tmp_path: Path) -> None:
    for step, quality in ((10, 1.5), (20, 3.5), (30, 3.0), (40, 2.0), (50, 2.5)):
        saved = replace(state(step), counters={"updates": step, "quality": quality})
        save_checkpoint(tmp_path, saved, depends_on=DEPENDS_ON)
    real = {10: 2.2, 20: 1.9, 40: 2.1, 35: 9.0}  # 35 has no checkpoint; 30 and 50 were not measured
    prune(tmp_path, keep=1, real=real, evaluating=40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000040", "step-00000050"]
    prune(tmp_path, keep=1, real={**real, 50: 2.3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000050"]


def test_of_equally_good_ones_the_newest_is_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, state(step), depends_on=DEPENDS_ON)
    prune(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000030"]
