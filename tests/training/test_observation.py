"""Clocks, gauges, rates and the named bottleneck."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from dflash_core.training import observation
from dflash_core.training.observation import StageClock, bottleneck, observe
from dflash_core.training.work import STAGES
from tests.training.test_metrics import STEP


class Ticks:
    """A clock that stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(observation.time, "perf_counter", lambda: self.now)


def test_clock_sums_what_its_workers_did(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    clock = StageClock("tap", 100.0, workers=2)
    for what, seconds, worker in (("starved", 1.0, 0), ("busy", 2.0, 0), ("busy", 3.0, 1), ("blocked", 0.5, 1)):
        with clock.doing(what, worker=worker, number=7 + worker):  # type: ignore[arg-type]
            ticks.now += seconds
    assert clock.as_dict() == {
        "workers": 2,
        "items": 2,
        "items_per_second": 0.308,
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


def test_the_first_minute_and_the_end_are_kept_and_the_rest_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "KEPT_INTERVALS", 3)
    ticks = Ticks(monkeypatch)
    clock = StageClock("read", 100.0)
    for number in range(30):
        with clock.doing("busy", number=number):
            ticks.now += 7
    assert [interval.number for interval in clock.intervals] == [0, 1, 2, 27, 28, 29]
    assert (clock.items, clock.unkept) == (30, 24)


def test_a_sample_is_of_the_last_step_and_the_summary_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(monkeypatch)
    seen = observe(STAGES, total_steps=10, peak_flops=1000.0, step_flops=lambda metrics: 3.0 * metrics.tokens)
    depth = [4]
    seen.gauges.update(train=lambda: depth[0], credit=lambda: 1000 * depth[0])
    seen.clocks["tap"].workers = 2
    for what, seconds in (("busy", 1.0), ("starved", 1.0)):
        with seen.clocks["tap"].doing(what, worker=0):  # type: ignore[arg-type]
            ticks.now += seconds
    first = seen.sample(replace(STEP, step=1, seconds=2.0))
    assert (first["tap_busy"], first["tap_starved"], first["train_busy"]) == (0.25, 0.25, 0.0)
    assert (first["waiting_for_train"], first["credit_bytes"]) == (4, 4000)
    assert (first["tokens_per_second"], first["computed_tokens_per_second"], first["anchors_per_second"]) == (50, 60, 5)
    assert first["mfu"] == pytest.approx(300 / 2000)
    assert first["eta_s"] == 18
    depth[0] = 1
    with seen.clocks["train"].doing("busy"):
        ticks.now += 3.0
    second = seen.sample(replace(STEP, step=2, seconds=3.0, tokens=600))
    assert (second["train_busy"], second["tap_busy"], second["tokens_per_second"]) == (1.0, 0.0, 200)
    assert second["eta_s"] == 8 * 2.5
    summary = seen.summary()
    assert summary["waiting"] == {"train": {"mean": 2.5, "most": 4}}
    assert (summary["credit_bytes_most"], summary["tokens_per_second"]) == (4000, 140)
    assert summary["mfu"] == pytest.approx(3 * 700 / 5000)


def test_without_a_peak_there_is_no_mfu() -> None:
    seen = observe(STAGES, total_steps=3)
    assert "mfu" not in seen.sample(STEP)
    assert seen.summary()["mfu"] is None
    assert 0 <= seen.summary()["instrumentation_share"] < 1


# ---- in words --------------------------------------------------------------------------------------------------------


def stage(workers: int, each: float, *, items: int = 100, waits: float = 0.0) -> dict[str, Any]:
    busy = each * items
    return {"workers": workers, "items": items, "busy": busy, "starved_share": waits, "blocked_share": 0.0}


def words(read: dict[str, Any], tap: dict[str, Any], train: dict[str, Any]) -> str:
    return bottleneck({"read": read, "tap": tap, "train": train}, tokens=1000.0, anchors=512)


def test_targets_that_wait_for_the_drafter() -> None:
    """Three targets make 30 micro-batches a second, the drafter takes 10: a target less and a second drafter take 20."""
    text = words(stage(1, 0.01), stage(3, 0.1, waits=0.62), stage(1, 0.1))
    assert text == (
        "the targets wait for the drafter 62% of the time: 2 targets + 2 drafters would give about 20.0 Ktok/s, "
        "or training.anchors_per_row 256 would give about 20.0 Ktok/s"
    )


def test_a_single_target_that_waits_for_the_drafter() -> None:
    text = words(stage(1, 0.01), stage(1, 0.08, waits=0.2), stage(1, 0.1))
    assert text == "the targets wait for the drafter 20% of the time: training.anchors_per_row 256 would give about 12.5 Ktok/s"


def test_a_drafter_that_waits_for_the_targets_and_targets_that_wait_for_readers() -> None:
    text = words(stage(1, 0.01), stage(1, 0.1), stage(1, 0.04, waits=0.6))
    assert text == "the drafter waits for the targets 60% of the time: 2 targets would give about 20.0 Ktok/s"
    text = words(stage(1, 4.0), stage(2, 0.1, waits=0.9), stage(1, 0.04))
    assert text == "the targets wait for the readers 90% of the time: pipeline.readers 2 would give about 500 tok/s"


def test_balanced_stages_need_no_advice() -> None:
    text = words(stage(1, 0.1), stage(1, 0.1), stage(1, 0.101))
    assert text.endswith("the stages are balanced, about 9.9 Ktok/s")


def test_a_run_without_a_step_has_words_too() -> None:
    nothing = stage(1, 0.0, items=0)
    assert math.isfinite(len(words(nothing, nothing, nothing)))
