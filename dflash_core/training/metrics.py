"""Waiting is a metric: what every stage did with its time, the bottleneck in words, and the timeline.

busy     working                      starved  waiting for input
blocked  waiting for room downstream  (what is left over is scheduling)
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_core.records import Interval, StepMetrics

Doing = Literal["busy", "starved", "blocked"]
KEPT_INTERVALS = 20_000  # a stage; further ones are counted, not kept


@dataclass
class StageClock:
    """Seconds and items of one stage, over all its workers."""

    stage: str
    started: float
    workers: int = 1
    items: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"busy": 0.0, "starved": 0.0, "blocked": 0.0})
    intervals: list[Interval] = field(default_factory=list)
    unkept: int = 0

    @contextmanager
    def doing(self, what: Doing, *, worker: int = 0, number: int = -1) -> Iterator[None]:
        """Adds the time inside to `what`; busy time also becomes an interval of the timeline."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[what] += end - start
            if what == "busy":
                self.items += 1
                if len(self.intervals) < KEPT_INTERVALS:
                    self.intervals.append(
                        Interval(
                            stage=self.stage,
                            worker=worker,
                            number=number,
                            start=start - self.started,
                            end=end - self.started,
                        )
                    )
                else:
                    self.unkept += 1

    def as_dict(self) -> dict[str, Any]:
        """For the report: seconds summed over workers, and shares of the stage's whole time."""
        total = sum(self.seconds.values()) or 1.0
        shares = {f"{what}_share": round(value / total, 4) for what, value in self.seconds.items()}
        return {"workers": self.workers, "items": self.items, **{k: round(v, 3) for k, v in self.seconds.items()}, **shares}


def bottleneck(stages: dict[str, dict[str, Any]]) -> str:
    """The stage that waits least, in words: `train (busy 93 % of the time; tap waits for room 40 %)`."""
    candidates = {name: stage for name, stage in stages.items() if name in ("read", "tap", "train")}
    name, stage = max(candidates.items(), key=lambda item: item[1]["busy_share"])
    words = f"{name}: busy {stage['busy_share']:.0%} of its time"
    others = [
        f"{other} waits {candidates[other]['starved_share']:.0%} for input and {candidates[other]['blocked_share']:.0%} for room"
        for other in candidates
        if other != name
    ]
    return "; ".join([words, *others])


def write_timeline(path: Path, clocks: list[StageClock]) -> None:
    """Intervals in Chrome's trace format (chrome://tracing, Perfetto): one row a stage worker, microseconds."""
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


def step_row(metrics: StepMetrics) -> dict[str, Any]:
    """One line of metrics.jsonl: the sums as they are, and the means that people read."""
    drafts = max(1, metrics.counted[1]) if len(metrics.counted) > 1 else 1
    means = {
        "loss": metrics.loss_sum / metrics.weight_sum if metrics.weight_sum else None,
        "accuracy": sum(metrics.correct) / max(1, sum(metrics.counted)),
        "simulated_acceptance_length": 1 + metrics.accepted_sum / drafts,
        "tokens_per_second": metrics.tokens / metrics.seconds if metrics.seconds else None,
    }
    row = {**asdict(metrics), **means}
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class MetricsFile:
    """`metrics.jsonl`: one line a step, flushed line by line; lines of an earlier try beyond `resume_step` are cut off."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the half line of a killed writer, written again by the resumed steps
                if row["step"] <= resume_step:
                    kept.append(line + "\n")
        beside = path.with_name(path.name + ".partial")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        """Appends one step."""
        self._file.write(json.dumps(step_row(metrics)) + "\n")

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def write_json(path: Path, value: Any) -> None:
    """JSON written beside and renamed."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)
