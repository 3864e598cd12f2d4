"""Waiting is a metric: what every stage did with its time, what waited for it, and the bottleneck in words.

busy     working                      starved  waiting for input
blocked  waiting for room downstream  (what is left over is scheduling)

    clock.doing("busy") ...   one a stage, of all its workers --+--> sample: shares and rates of the last step, into metrics.jsonl
    gauges                    items waiting, bytes under credit --+--> summary: the same over the whole run, into training.json
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_core.records import Interval, StepMetrics

Doing = Literal["busy", "starved", "blocked"]
KEPT_INTERVALS = 20_000  # a stage: of its first minute so many at most, and of the end as many
FIRST_S = 60.0
COUNTED = ("tokens", "computed_tokens", "blocks")  # of StepMetrics
SHOWN = ("read", "tap", "train")  # the stages that a device or a disk can hold up


class StageClock:
    """Seconds and items of one stage, over all its workers."""

    def __init__(self, stage: str, started: float, *, workers: int = 1) -> None:
        self.stage, self.started, self.workers = stage, started, workers
        self.items = self.calls = 0
        self.seconds = {"busy": 0.0, "starved": 0.0, "blocked": 0.0}
        self._first: list[Interval] = []
        self._late: deque[Interval] = deque(maxlen=KEPT_INTERVALS)

    @property
    def intervals(self) -> list[Interval]:
        """Pieces of work in the order of their ends: those of the first minute and the newest ones."""
        return [*self._first, *self._late]

    @property
    def unkept(self) -> int:
        """Pieces of work between both."""
        return self.items - len(self._first) - len(self._late)

    @contextmanager
    def doing(self, what: Doing, *, worker: int = 0, number: int = -1) -> Iterator[None]:
        """Adds the time inside to `what`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, start, time.perf_counter(), worker=worker, number=number)

    def add(self, what: Doing, start: float, end: float, *, worker: int = 0, number: int = -1) -> None:
        """Adds a piece of time, in seconds of `time.perf_counter`, to `what`; busy time also becomes an interval of the timeline."""
        self.seconds[what] += end - start
        self.calls += 1
        if what == "busy":
            self.items += 1
            begin, finish = start - self.started, end - self.started
            interval = Interval(stage=self.stage, worker=worker, number=number, start=begin, end=finish)
            early = finish < FIRST_S and len(self._first) < KEPT_INTERVALS
            (self._first if early else self._late).append(interval)

    def as_dict(self, *, now: float | None = None) -> dict[str, Any]:
        """For the report: seconds summed over workers, shares of the stage's whole time, items a second."""
        total = sum(self.seconds.values()) or 1.0
        wall = max(1e-9, (time.perf_counter() if now is None else now) - self.started)
        shares = {f"{what}_share": round(value / total, 4) for what, value in self.seconds.items()}
        seconds = {what: round(value, 3) for what, value in self.seconds.items()}
        return {
            "workers": self.workers,
            "items": self.items,
            "items_per_second": round(self.items / wall, 3),
            **seconds,
            **shares,
        }


@dataclass
class Observation:
    """What a run is watched by. `peak_flops`: FLOP/s of all its devices; `step_flops(metrics)`: FLOPs of a step's real tokens."""

    clocks: dict[str, StageClock]
    total_steps: int = 0
    peak_flops: float = math.nan
    step_flops: Callable[[StepMetrics], float] = lambda metrics: math.nan
    gauges: dict[str, Callable[[], int]] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)  # the largest value of each gauge
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("steps", "seconds", *COUNTED, "flops"), 0.0))
    _gauged: dict[str, float] = field(default_factory=dict)  # sums over steps
    _last: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict)

    def sample(self, metrics: StepMetrics) -> dict[str, float]:
        """Shares, depths and rates since the last step, and what is left; called once a step."""
        self._sum(metrics)
        values: dict[str, float] = {}
        for name, gauge in self.gauges.items():
            value = gauge()
            self.most[name] = max(value, self.most.get(name, 0))
            self._gauged[name] = self._gauged.get(name, 0.0) + value
            values["credit_bytes" if name == "credit" else f"waiting_for_{name}"] = float(value)
        now = time.perf_counter()
        for name in SHOWN:
            clock = self.clocks[name]
            since, before = self._last.get(name, (clock.started, dict.fromkeys(clock.seconds, 0.0)))
            for what, seconds in clock.seconds.items():
                values[f"{name}_{what}"] = min(1.0, (seconds - before[what]) / max(1e-9, (now - since) * clock.workers))
            self._last[name] = now, dict(clock.seconds)
        values |= rates({**{name: getattr(metrics, name) for name in COUNTED}, "seconds": metrics.seconds})
        values["mfu"] = self.step_flops(metrics) / (self.peak_flops * metrics.seconds) if metrics.seconds else math.nan
        values["eta_s"] = (self.total_steps - metrics.step) * self.sums["seconds"] / self.sums["steps"]
        return {name: round(value, 4) for name, value in values.items() if math.isfinite(value)}

    def _sum(self, metrics: StepMetrics) -> None:
        self.sums["steps"] += 1
        self.sums["seconds"] += metrics.seconds
        self.sums["flops"] += self.step_flops(metrics)
        for name in COUNTED:
            self.sums[name] += getattr(metrics, name)

    def summary(self) -> dict[str, Any]:
        """The same over the whole run."""
        steps, seconds = max(1.0, self.sums["steps"]), max(1e-9, self.sums["seconds"])
        mfu = self.sums["flops"] / (self.peak_flops * seconds)
        waiting = {
            name: {"mean": round(total / steps, 2), "most": self.most[name]}
            for name, total in self._gauged.items()
            if name != "credit"
        }
        return {
            **{name: round(value, 1) for name, value in rates(self.sums).items()},
            "mfu": round(mfu, 4) if math.isfinite(mfu) else None,
            "waiting": waiting,
            "credit_bytes_most": self.most.get("credit", 0),
            "instrumentation_share": round(self._instrumentation_s() / max(1e-9, self._wall()), 6),
        }

    def _wall(self) -> float:
        return time.perf_counter() - min(clock.started for clock in self.clocks.values())

    def _instrumentation_s(self, *, trials: int = 200) -> float:
        """Seconds that the clocks themselves took: their calls, times what one takes here and now."""
        clock = StageClock("", time.perf_counter())
        start = time.perf_counter()
        for _ in range(trials):
            with clock.doing("busy"):
                pass
        each = (time.perf_counter() - start) / trials
        return each * sum(clock.calls for clock in self.clocks.values())


def rates(sums: dict[str, float]) -> dict[str, float]:
    """Real tokens, computed tokens (padding included) and anchors a second."""
    names = ("tokens_per_second", "computed_tokens_per_second", "anchors_per_second")
    if not sums["seconds"]:
        return {}
    return {rate: sums[name] / sums["seconds"] for rate, name in zip(names, COUNTED, strict=True)}


def observe(stages: Iterable[str], **settings: Any) -> Observation:
    """Clocks that all begin now."""
    started = time.perf_counter()
    return Observation({name: StageClock(name, started) for name in stages}, **settings)


# ---- in words --------------------------------------------------------------------------------------------------------


def bottleneck(stages: dict[str, dict[str, Any]], *, tokens: float, anchors: int) -> str:
    """The stage that holds up the others, who waits for it, and what would help; `tokens` are real ones a micro-batch.

    Rates follow from the mean time of a micro-batch in each stage: the slowest stage decides, and the drafter's time is taken as
    proportional to the anchors.
    """
    each = {name: stages[name]["busy"] / max(1, stages[name]["items"]) for name in SHOWN}
    workers = {name: stages[name]["workers"] for name in SHOWN}

    def rate(**changed: float) -> float:
        """Micro-batches a second with other numbers of workers, or another time of one."""
        return min(changed.get(name, workers[name]) / max(1e-9, changed.get(f"{name}_s", each[name])) for name in SHOWN)

    slowest = min(SHOWN, key=lambda name: workers[name] / max(1e-9, each[name]))
    what = {
        "read": "the targets wait for the readers",
        "tap": "the drafter waits for the targets",
        "train": "the targets wait for the drafter",
    }
    share = (
        stages["tap"]["blocked_share"] + stages["tap"]["starved_share"] if slowest != "tap" else stages["train"]["starved_share"]
    )
    targets = workers["tap"]
    helps: dict[str, list[tuple[str, float]]] = {
        "read": [(f"pipeline.readers {workers['read'] + 1}", rate(read=workers["read"] + 1))],
        "tap": [(f"{targets + 1} targets", rate(tap=targets + 1))],
        "train": [(f"training.anchors_per_row {max(1, anchors // 2)}", rate(train_s=each["train"] / 2))],
    }
    if slowest == "train" and targets > 1:
        helps["train"].insert(0, (f"{targets - 1} target{'s' * (targets > 2)} + 2 drafters", rate(tap=targets - 1, train=2)))
    now, better = rate(), [(words, value) for words, value in helps[slowest] if value > 1.02 * rate()]
    text = f"{what[slowest]} {share:.0%} of the time"
    if not better:
        return f"{text}; the stages are balanced, about {_tokens(now * tokens)}"
    return f"{text}: " + ", or ".join(f"{words} would give about {_tokens(value * tokens)}" for words, value in better)


def _tokens(rate: float) -> str:
    return f"{rate / 1000:.1f} Ktok/s" if rate >= 1000 else f"{rate:.0f} tok/s"
