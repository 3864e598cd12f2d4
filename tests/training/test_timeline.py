"""timeline.json opens in Perfetto, and its picture shows the first and the last minute."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core.training.observation import StageClock
from dflash_core.training.timeline import draw_timeline, minutes, write_timeline
from tests.training.test_observation import Ticks


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


def event(stage: str, start: float, seconds: float, *, worker: int = 0) -> dict[str, Any]:
    return {"cat": stage, "ts": start * 1e6, "dur": seconds * 1e6, "tid": f"{stage}-{worker}", "name": stage}


def test_minutes_begin_with_training_and_do_not_overlap() -> None:
    assert minutes([]) == []
    assert minutes([event("read", 0, 1), event("train", 5, 1), event("train", 40, 2)]) == [(5, 42)]
    assert minutes([event("read", 0, 1), event("train", 5, 1), event("train", 400, 2)]) == [(5, 65), (342, 402)]


@pytest.mark.parametrize("last", [50, 500, None])
def test_the_picture(tmp_path: Path, last: int | None) -> None:
    events = [] if last is None else [event("tap", 0, 9, worker=1), event("train", 9, 3), event("train", last, 3)]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    draw_timeline(tmp_path / "timeline.json", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".partial"] == []
