"""Pictures are pictures, and the curve in them is the run's."""

import dataclasses
import json
from pathlib import Path

import pytest

from dflash_core.decoding.plots import draw_report, training_curve
from dflash_core.decoding.summary import report_on
from dflash_core.records import Measurements
from tests.decoding.results import measured


def write_metrics(path: Path, steps: int) -> Path:
    rows = [{"step": step, "loss": 10 / step, "simulated_acceptance_length": 1 + step / 10} for step in range(1, steps + 1)]
    rows[2]["loss"] = None  # it was not finite
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_long_runs_are_averaged_in_stretches(tmp_path: Path) -> None:
    curve = training_curve(write_metrics(tmp_path / "metrics.jsonl", 4))
    assert curve == [(1, 10.0, 1.1), (2, 5.0, 1.2), (4, 2.5, 1.4)]
    curve = training_curve(write_metrics(tmp_path / "metrics.jsonl", 401))
    assert len(curve) == 200
    assert curve[0] == pytest.approx((1.5, 7.5, 1.15))


def test_pictures_are_written(tmp_path: Path) -> None:
    report = dataclasses.asdict(report_on(Measurements(results=[measured()], counts={}), block_size=4, dtype="float32"))
    metrics = tmp_path / "metrics.jsonl"
    places = {"acceptance": tmp_path / "acceptance.png", "training": tmp_path / "training.png"}
    assert draw_report(report, metrics, **places) == [places["acceptance"]]  # no training was recorded here
    write_metrics(metrics, 5)
    assert draw_report(report, metrics, **places) == list(places.values())
    before = places["training"].read_bytes()
    snapshots = [{"step": 2, "acceptance_length": 1.5}, {"step": 4, "acceptance_length": 0.0}]
    draw_report({**report, "evaluation": {"evaluations": snapshots}}, metrics, **places)
    assert places["training"].read_bytes() != before
    for place in places.values():
        assert place.read_bytes().startswith(b"\x89PNG")
