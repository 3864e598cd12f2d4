"""Clocks, the timeline, the named bottleneck and the metrics file."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.records import StepMetrics
from dflash_core.training import metrics
from dflash_core.training.metrics import MetricsFile, StageClock, bottleneck, step_row, write_timeline

STEP = StepMetrics(
    step=1,
    position=2,
    epoch=0,
    micro_batches=2,
    skipped={"no anchor": 1},
    rows=3,
    tokens=100,
    computed_tokens=120,
    blocks=10,
    loss_sum=12.0,
    weight_sum=8.0,
    correct=(0, 6, 3),
    counted=(0, 10, 5),
    accepted_sum=9,
    learning_rate=0.1,
    gradient_norm=1.5,
    applied=True,
    seconds=0.5,
)


class Ticks:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now)


def test_clock_sums_what_its_workers_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    clock = StageClock("tap", 100.0, workers=2)
    for what, seconds, worker in (("starved", 1.0, 0), ("busy", 2.0, 0), ("busy", 3.0, 1), ("blocked", 0.5, 1)):
        with clock.doing(what, worker=worker, number=7 + worker):  # type: ignore[arg-type]
            ticks.now += seconds
    assert clock.as_dict() == {
        "workers": 2,
        "items": 2,
        "busy": 5.0,
        "starved": 1.0,
        "blocked": 0.5,
        "busy_share": 0.7692,
        "starved_share": 0.1538,
        "blocked_share": 0.0769,
    }
    assert [(i.stage, i.worker, i.number, i.start, i.end) for i in clock.intervals] == [("tap", 0, 7, 1, 3), ("tap", 1, 8, 3, 6)]


def test_time_of_a_failed_piece_of_work_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    clock = StageClock("train", 100.0)

    def fail() -> None:
        with clock.doing("busy"):
            ticks.now += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert clock.seconds["busy"] == 2.0


def test_a_stage_that_did_nothing_has_no_shares() -> None:
    assert StageClock("read", time.perf_counter()).as_dict()["busy_share"] == 0.0


def test_intervals_are_bounded_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metrics, "KEPT_INTERVALS", 3)
    clock = StageClock("read", time.perf_counter())
    for number in range(5):
        with clock.doing("busy", number=number):
            pass
    assert (len(clock.intervals), clock.unkept, clock.items) == (3, 2, 5)
    write_timeline(tmp_path / "timeline.json", [clock])
    assert json.loads((tmp_path / "timeline.json").read_text())["unkept"] == 2


def test_timeline_is_a_chrome_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ticks = Ticks(monkeypatch)
    clocks = [StageClock("read", 100.0), StageClock("tap", 100.0)]
    for clock, worker in zip(clocks, (0, 1), strict=True):
        with clock.doing("busy", worker=worker, number=4):
            ticks.now += 0.25
    write_timeline(tmp_path / "timeline.json", clocks)
    value = json.loads((tmp_path / "timeline.json").read_text())
    assert value["displayTimeUnit"] == "ms"
    assert value["traceEvents"] == [
        {
            "name": "read 4",
            "cat": "read",
            "ph": "X",
            "ts": 0.0,
            "dur": 250000.0,
            "pid": 0,
            "tid": "read-0",
            "args": {"number": 4},
        },
        {
            "name": "tap 4",
            "cat": "tap",
            "ph": "X",
            "ts": 250000.0,
            "dur": 250000.0,
            "pid": 0,
            "tid": "tap-1",
            "args": {"number": 4},
        },
    ]


def shares(busy: float, starved: float, blocked: float) -> dict[str, Any]:
    return {"busy_share": busy, "starved_share": starved, "blocked_share": blocked}


def test_the_bottleneck_is_the_stage_that_waits_least() -> None:
    stages = {"plan": shares(1, 0, 0), "read": shares(0.1, 0.2, 0.7), "tap": shares(0.6, 0, 0.4), "train": shares(0.93, 0.07, 0)}
    words = bottleneck(stages)
    assert words.startswith("train: busy 93% of its time")
    assert "tap waits 0% for input and 40% for room" in words
    stages["tap"] = shares(0.99, 0.01, 0)
    assert bottleneck(stages).startswith("tap: busy 99%")


def test_a_row_has_the_sums_and_the_means_of_them() -> None:
    row = step_row(STEP)
    assert row["loss"] == 1.5
    assert row["accuracy"] == 9 / 15
    assert row["simulated_acceptance_length"] == 1.9
    assert row["tokens_per_second"] == 200.0
    assert (row["loss_sum"], row["skipped"], row["counted"]) == (12.0, {"no anchor": 1}, (0, 10, 5))


def test_a_step_without_weight_is_still_strict_json() -> None:
    empty = replace(STEP, loss_sum=0.0, weight_sum=0.0, correct=(0, 0, 0), counted=(0, 0, 0), gradient_norm=float("nan"))
    text = json.dumps(step_row(empty), allow_nan=False)
    assert json.loads(text)["loss"] is None
    assert json.loads(text)["gradient_norm"] is None


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2):
        file.write(replace(STEP, step=step))
        assert steps(path) == list(range(1, step + 1))
    file.close()


def test_a_resumed_run_cuts_what_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(1, 8):
        file.write(replace(STEP, step=step))
    file.close()
    with path.open("a") as half:
        half.write('{"step": 8, "posi')
    file = MetricsFile(path, 5)
    file.write(replace(STEP, step=6))
    file.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_half_line_within_the_kept_part_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    file = MetricsFile(path, 1)
    file.write(replace(STEP, step=2))
    file.close()
    assert steps(path) == [1, 2]
