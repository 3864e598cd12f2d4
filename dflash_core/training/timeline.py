"""What every stage worker did when: a file for Perfetto, and a picture of the first and of a late minute.

intervals of the clocks --write_timeline--> timeline.json --draw_timeline--> timeline.png
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_core.files import write_json, written_beside
from dflash_core.training.observation import StageClock

MINUTE_S = 60.0
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d")


def write_timeline(path: Path, clocks: Iterable[StageClock]) -> None:
    """Intervals in Chrome's trace format (chrome://tracing, Perfetto): one row a stage worker, microseconds."""
    clocks = list(clocks)
    events = [
        {
            "name": f"{interval.stage} {interval.number}",
            "cat": interval.stage,
            "ph": "X",
            "ts": round(interval.start * 1e6, 1),
            "dur": round((interval.end - interval.start) * 1e6, 1),
            "pid": 0,
            "tid": f"{interval.stage}-{interval.worker}",
            "args": {"number": interval.number},
        }
        for clock in clocks
        for interval in clock.intervals
    ]
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms", "unkept": sum(clock.unkept for clock in clocks)})


def minutes(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(start, end) in seconds of the first minute with training in it, and of the last one where they do not overlap."""
    trained = [event for event in events if event["cat"] == "train"] or events
    if not trained:
        return []
    first = min(event["ts"] for event in trained) / 1e6
    end = max(event["ts"] + event["dur"] for event in trained) / 1e6
    if end - first <= 2 * MINUTE_S:
        return [(first, min(end, first + MINUTE_S))]
    return [(first, first + MINUTE_S), (end - MINUTE_S, end)]


def draw_timeline(source: Path, picture: Path) -> None:
    """A Gantt picture of `source`, one bar a piece of work, coloured by stage."""
    from matplotlib.figure import Figure

    events = json.loads(source.read_text(encoding="utf-8"))["traceEvents"]
    spans = minutes(events)
    lanes = list(dict.fromkeys(event["tid"] for event in events))
    colours = {stage: COLOURS[i % len(COLOURS)] for i, stage in enumerate(dict.fromkeys(event["cat"] for event in events))}
    figure = Figure(figsize=(14, 1 + max(1, len(spans)) * (0.6 + 0.3 * len(lanes))))
    panels = figure.subplots(max(1, len(spans)), 1, squeeze=False)[:, 0]
    for panel, (start, end) in zip(panels, spans, strict=False):
        for row, lane in enumerate(lanes):
            seen = [event for event in events if event["tid"] == lane and start * 1e6 <= event["ts"] <= end * 1e6]
            bars = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in seen]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=[colours[event["cat"]] for event in seen])
        panel.set_yticks(range(len(lanes)), lanes)
        panel.set_ylim(len(lanes) - 0.5, -0.5)
        panel.set_xlim(start, end)
        panel.set_xlabel("seconds since the pipeline started")
    figure.tight_layout()
    with written_beside(picture) as place:
        figure.savefig(place, format="png", dpi=110)
