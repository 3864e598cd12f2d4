"""Figures of the queue pipeline, against loops that do without it: `python -m tests.benchmarks.pipeline [sleep planned compute faults storm]`.

sleep     stages of 10/30/25/2 ms: share of the bound that the slowest stage sets, and ratios to three simpler loops
compute   a real target and drafter on the CPU, one thread a stage, against the same work in turn; equal weights
planned   the rate that flows.plan predicts, with stages that sleep as long as it says
faults    seconds from a fault to the end, for every stage x place x kind
storm     200 seeds of random times, failing replicas and the smallest window: nothing hangs

A line a figure, with what it must be at least; medians of TRIALS runs. Run it on a machine with nothing else to do.
"""

import logging
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import torch

from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, load_ends, read_facts
from dflash_core.planning import DEVICES, Cost, Room, token_seconds, topologies
from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch
from dflash_core.sizes import resolve
from dflash_core.training.observation import Observation, observe
from dflash_core.training.pipeline import run_pipeline
from dflash_core.training.trainer import Trainer
from dflash_core.training.work import STAGES, Limits, Outcome, Work
from tests.fakes import VOCAB, make_batch, make_config, save_target
from tests.training import faults
from tests.training.bench import FakeTrainer, planned, read, tap
from tests.training.test_replicas import storm

ITEMS, TRIALS = 120, 5
SECONDS = {"read": 0.010, "tap": 0.030, "train": 0.025, "metrics": 0.002}
ORDER = tuple(SECONDS)


def say(what: str, value: float, least: float | None = None, *, unit: str = "") -> None:
    wanted = "" if least is None else f"   (at least {least}: {'yes' if value >= least else 'NO'})"
    print(f"{what:<78} {value:8.3f}{unit}{wanted}", flush=True)


# ---- stages that sleep -----------------------------------------------------------------------------------------------


class Naps:
    """Sleeps of every stage, the same for the same seed, and what they took in fact."""

    def __init__(self, jitter: float, seed: int, seconds: dict[str, float] = SECONDS) -> None:
        rng = random.Random(seed)
        self.planned = {name: [s * (1 + jitter * rng.uniform(-1, 1)) for _ in range(ITEMS)] for name, s in seconds.items()}
        self.taken: dict[str, dict[int, float]] = defaultdict(dict)

    def __call__(self, stage: str, number: int) -> None:
        start = time.perf_counter()
        time.sleep(self.planned[stage][number])
        self.taken[stage][number] = time.perf_counter() - start

    def bound(self, targets: int) -> float:
        """No order of the same work is faster: fill, the slowest stage from end to end, drain."""
        workers = {"tap": targets}
        times = []
        for place, name in enumerate(ORDER):
            fill = sum(self.taken[before][0] for before in ORDER[:place])
            drain = sum(self.taken[after][ITEMS - 1] for after in ORDER[place + 1 :])
            times.append(fill + sum(self.taken[name].values()) / workers.get(name, 1) + drain)
        return max(times)

    def least(self, window: int) -> float:
        """Seconds of the same work with one target and `window` micro-batches between reading and the end of the step, at best."""
        ends: dict[str, list[float]] = {name: [] for name in ORDER}
        for number in range(ITEMS):
            ready = ends["train"][number - window] if number >= window else 0.0
            for name in ORDER:
                ready = max(ready, ends[name][-1] if ends[name] else 0.0) + self.taken[name][number]
                ends[name].append(ready)
        return ends[ORDER[-1]][-1]


def queued(naps: Naps, *, targets: int = 1, window: int = 50) -> tuple[float, Observation]:
    """Seconds of the pipeline, with checkpoints, metrics and gauges as in a training."""

    class Sleeping(FakeTrainer):
        def train(self, tapped: TappedBatch) -> StepMetrics | None:
            naps("train", tapped.batch.plan.number)
            return super().train(tapped)

    def sleeping_read(plan: PlannedBatch) -> Batch:
        naps("read", plan.number)
        return read(plan)

    def sleeping_tap(batch: Batch) -> TappedBatch:
        naps("tap", batch.plan.number)
        return tap(batch)

    def log(metrics: StepMetrics) -> None:
        observation.sample(metrics)
        naps("metrics", metrics.step - 1)

    observation, outcome = observe(STAGES, total_steps=ITEMS), Outcome()
    work = Work(
        plan=planned(ITEMS), first=0, read=sleeping_read, taps=(sleeping_tap,) * targets, rebuild=lambda number: None,
        trainer=Sleeping(), log=log, save=lambda state: time.sleep(0.005),
    )  # fmt: skip
    limits = Limits(
        readers=1, ahead_bytes=window, checkpoint_every=20, stop_deadline_s=5, stall_s=60, first_batch_s=60, rebuilds=3
    )
    start = time.perf_counter()
    anyio.run(run_pipeline, work, limits, observation, anyio.Event(), outcome)
    seconds = time.perf_counter() - start
    assert outcome.consumed == ITEMS
    assert observation.most["credit"] <= window
    return seconds, observation


def lock_step(naps: Naps) -> float:
    """One thing after the other."""
    start = time.perf_counter()
    for number in range(ITEMS):
        for stage in ORDER:
            naps(stage, number)
    return time.perf_counter() - start


def prefetched(naps: Naps) -> float:
    """Reading ahead in a thread, the rest in turn."""
    ready: queue.Queue[int] = queue.Queue(4)

    def reader() -> None:
        for number in range(ITEMS):
            naps("read", number)
            ready.put(number)

    start = time.perf_counter()
    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(ITEMS):
        number = ready.get()
        for stage in ORDER[1:]:
            naps(stage, number)
    thread.join()
    return time.perf_counter() - start


def rounds(naps: Naps, targets: int) -> float:
    """Lock-step whose targets work side by side, each on its own micro-batch."""
    start = time.perf_counter()
    with ThreadPoolExecutor(targets) as pool:
        for first in range(0, ITEMS, targets):
            numbers = range(first, min(first + targets, ITEMS))
            for number in numbers:
                naps("read", number)
            list(pool.map(lambda number: naps("tap", number), numbers))
            for number in numbers:
                naps("train", number)
                naps("metrics", number)
    return time.perf_counter() - start


def sleep() -> None:
    for jitter in (0.0, 0.5):
        shares, walls, instrumentation = [], [], []
        for trial in range(TRIALS):
            naps = Naps(jitter, trial)
            wall, seen = queued(naps)
            shares.append(naps.bound(1) / wall)
            walls.append(wall)
            instrumentation.append(seen.summary()["instrumentation_share"])
        say(f"jitter {jitter}: share of the bound", statistics.median(shares), 0.97)
        say(f"jitter {jitter}: instrumentation, % of the wall (at most 1)", 100 * statistics.median(instrumentation), unit=" %")
        plain = statistics.median(walls)
        for window, words in ((3, "one micro-batch a stage"), (5, "and two that wait; at most 1.01")):
            small, shares = [], []
            for trial in range(TRIALS):
                naps = Naps(jitter, trial)
                small.append(queued(naps, window=window)[0])
                shares.append(naps.least(window) / small[-1])
            say(f"jitter {jitter}: seconds with window {window} / with 50 ({words})", statistics.median(small) / plain)
            say(f"jitter {jitter}: window {window}: share of what any order could reach in it", statistics.median(shares))
        say(
            f"jitter {jitter}: lock-step / pipeline",
            statistics.median(lock_step(Naps(jitter, t)) for t in range(3)) / plain,
            2.15,
        )
        say(
            f"jitter {jitter}: prefetch + serial / pipeline",
            statistics.median(prefetched(Naps(jitter, t)) for t in range(3)) / plain,
            1.8,
        )
        three = statistics.median(queued(Naps(jitter, t), targets=3)[0] for t in range(TRIALS))
        parallel = statistics.median(rounds(Naps(jitter, t), 3) for t in range(3))
        say(f"jitter {jitter}: 3 targets: lock-step with parallel targets / pipeline", parallel / three, 1.5)


def planned_rates(*, micro_batch: int = 16_384, scale: float = 1 / 12) -> None:
    """Qwen3.6-27B on 4 GPUs at 3 + 1, 128 and 256 anchors, twelve times as fast as planned."""
    device = DEVICES["rtx-pro-6000"]
    for anchors, drafter_flops in ((128, 16.2e9), (256, 31.5e9)):
        costs = Cost(target=48.4e9, context=0.0, block=drafter_flops, block_tokens=1.0)
        target_s, drafter_s = (scale * micro_batch * seconds for seconds in token_seconds(costs, device))
        plans = topologies(costs, 4, device, target=Room(parts={}), drafter=lambda ranks: Room(parts={}))
        predicted = next(topology.rate for topology in plans if topology.name == "3+1")
        times = {"read": 0.001, "tap": target_s, "train": drafter_s, "metrics": 0.001}
        walls = [queued(Naps(0.0, trial, times), targets=3, window=5)[0] for trial in range(3)]
        fill = target_s + drafter_s
        reached = (ITEMS - 1) * micro_batch / (statistics.median(walls) - fill) * scale
        say(f"planned 3+1 at {anchors} anchors: rate of the sleeping pipeline / predicted", reached / predicted, 0.95)


# ---- real compute ----------------------------------------------------------------------------------------------------


def compute(*, batches: int = 24) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        target = save_target(
            root / "target", hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, head_dim=32, initializer_range=0.1,
        )  # fmt: skip
        config = make_config(
            root, target, drafter={"num_layers": 2, "block_size": 8, "target_layer_ids": [1, 3, 6]},
            training={
                "anchors_per_row": 24, "tokens_per_batch": 2048, "anchors_per_batch": 256, "max_steps": batches,
                "optimizer": "adamw",  # with it, target and drafter take about as long as each other
            },
            pipeline={"ahead_bytes": 2**26},
        )  # fmt: skip
        _compute(config, str(target), [_rows(number) for number in range(batches)])


def _rows(number: int) -> Batch:
    rng = random.Random(number)
    rows = [([rng.randrange(4, VOCAB) for _ in range(256)], [int(i > 64) for i in range(256)]) for _ in range(8)]
    return make_batch(rows, number=number, first_row=8 * number)


def _compute(config: Any, target: str, data: list[Batch]) -> None:
    shape = resolve(config, read_facts(target))
    ends = load_ends(target, dtype="float32", device="cpu", attention="sdpa")
    replica = TapReplica(target, layer_ids=shape.target_layer_ids, dtype="float32", device="cpu", attention="sdpa")

    def trainer() -> Trainer:
        return Trainer(new_drafter(shape, 0), ends, config, total_steps=len(data), device="cpu")

    def in_turn() -> tuple[float, Trainer, list[float], list[float]]:
        made, taps, trains = trainer(), [], []
        start = time.perf_counter()
        for batch in data:
            begin = time.perf_counter()
            tapped = replica.tap(batch)
            middle = time.perf_counter()
            made.train(tapped)
            taps.append(middle - begin)
            trains.append(time.perf_counter() - middle)
        return time.perf_counter() - start, made, taps, trains

    def through_queues() -> tuple[float, Trainer]:
        made, outcome, observation = trainer(), Outcome(), observe(STAGES, total_steps=len(data))
        plans: Iterator[PlannedBatch] = (replace(batch.plan, credit=1) for batch in data)
        work = Work(
            plan=plans, first=0, read=lambda plan: replace(data[plan.number], plan=plan), taps=(replica.tap,),
            rebuild=lambda number: None, trainer=made, log=observation.sample, save=lambda state: None,
        )  # fmt: skip
        limits = Limits(
            readers=1, ahead_bytes=3, checkpoint_every=10**6, stop_deadline_s=5, stall_s=600, first_batch_s=600, rebuilds=0
        )
        start = time.perf_counter()
        anyio.run(run_pipeline, work, limits, observation, anyio.Event(), outcome)
        return time.perf_counter() - start, made

    in_turn()
    ratios, bounds = [], []
    for _ in range(TRIALS):
        plain, first, taps, trains = in_turn()
        queued_s, second = through_queues()
        a, b = first.snapshot().weights, second.snapshot().weights
        assert all(torch.equal(a[name], b[name]) for name in a), "the weights differ"
        ratios.append(plain / queued_s)
        bounds.append(plain / max(sum(taps), sum(trains)))
    say("lock-step on one thread / pipeline on one thread a stage, weights bit-identical", statistics.median(ratios), 1.65)
    say("   its bound: lock-step / the slower of target and drafter", statistics.median(bounds))
    say(
        "   lock-step on two threads / pipeline",
        _two_threads(in_turn) / statistics.median([through_queues()[0] for _ in range(3)]),
    )


def _two_threads(in_turn: Callable[[], tuple[float, Any, Any, Any]]) -> float:
    fixed = torch.set_num_threads
    fixed(2)
    torch.set_num_threads = lambda number: None  # type: ignore[assignment]
    try:
        return statistics.median(in_turn()[0] for _ in range(3))
    finally:
        torch.set_num_threads = fixed
        fixed(1)


# ---- faults and storms -----------------------------------------------------------------------------------------------


def fault_table() -> None:
    print(
        f"{'seconds to the end':<20}"
        + "".join(f"{place + ' ' + what:>20}" for what in ("exception", "SIGTERM") for place in faults.PLACES)
    )
    for stage in faults.STAGES:
        line = f"{stage:<20}"
        for what in ("exception", "SIGTERM"):
            for place in faults.PLACES:
                struck = faults.strike(stage, place, what)
                good = struck.threads == 0 and struck.error is (struck.raised if what == "exception" else None)
                line += f"{struck.seconds:>20.3f}" if good else f"{'WRONG':>20}"
        print(line, flush=True)


def storms(*, seeds: int = 200) -> None:
    start = time.perf_counter()
    for seed in range(seeds):
        storm(seed)
    say(f"storms: seconds for {seeds} seeds, none hung", time.perf_counter() - start, unit=" s")


PARTS: dict[str, Callable[[], None]] = {
    "sleep": sleep,
    "compute": compute,
    "faults": fault_table,
    "storm": storms,
    "planned": planned_rates,
}

if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of replicas that fail on purpose
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
