"""Figures of shards, plan and assembly beside what else reads them: `python -m tests.benchmarks.data --dir DIR`.

One table. Every line is measured in this one run, sides taking turns, medians; what the sides read is compared before any of it
is timed. DIR keeps the data for the next run (about 1 GB with the default sizes).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dflash_core.config import TrainingConfig
from dflash_core.data.plan import lay_out, order_statistics, plan
from tests.benchmarks.children import ROWS, LoadFromDisk, mapped_batches, padded, picks
from tests.benchmarks.stores import evict, make_store, save_as_users_do

Line = tuple[str, str, str, bool]  # figure, measured, at least, kept


def child(name: str, store: Path, *arguments: object) -> dict[str, Any]:
    """A measurement of `tests.benchmarks.children` in a fresh process."""
    command = [sys.executable, "-m", "tests.benchmarks.children", name, str(store), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def opening(many: Path, long: Path, *, cold: bool) -> list[Line]:
    """Open and any 30 rows, in fresh processes: our reader, `load_from_disk` of what `datasets` saved, and of our files."""
    save_as_users_do(many)
    ways = {
        "ours": ("open_mapped", "shards"),
        "saved": ("open_load_from_disk", "saved"),
        "same": ("open_load_from_disk", "shards"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(5):
        checks = set()
        for name, (function, directory) in ways.items():
            if cold:
                evict(many / directory)
            result = child(function, many, seed, *([directory] if name != "ours" else []))
            checks.add(result["check"])
            seconds[name].append(result["seconds"])
        assert len(checks) == 1, f"they read other rows: {checks}"
    ours, saved, same = (median(times) for times in seconds.values())
    at_least = 10 if cold else 50
    measured = f"{ours * 1e3:.2f} ms; load_from_disk {saved * 1e3:.0f} ms ({same * 1e3:.0f} of our files): {saved / ours:.0f}x"
    return [(f"open + 30 rows, {'evicted' if cold else 'warm'}", measured, f"{at_least}x", saved / ours >= at_least)]


def start(many: Path, long: Path) -> list[Line]:
    """From nothing to the first planned micro-batch."""
    results = [child("first_planned", many, seed) for seed in range(7)]
    seconds, opened, planned = (median(result[key] for result in results) for key in ("seconds", "opened", "planned"))
    measured = f"{seconds:.3f} s (opened {opened:.3f}, planned {planned:.3f})"
    return [("start to the first planned batch, warm", measured, "<= 1 s", seconds <= 1)]


def assembly(many: Path, long: Path) -> list[Line]:
    """A padded micro-batch of 30 rows, four ways in turn."""
    import datasets

    ours, rows = mapped_batches(long)
    by_list = datasets.load_from_disk(str(long / "shards")).with_format("numpy")

    def formatted(chosen: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        found = by_list[list(chosen)]
        return padded(list(zip(found["input_ids"], found["loss_mask"], strict=True)))

    ways: dict[str, tuple[Callable[[tuple[int, ...]], Any], int]] = {
        "ours": (lambda chosen: _pair(ours(chosen)), 1),
        "flat numpy": (flat(long), 1),
        "ds[list] in numpy": (formatted, 10),
        "ds[i] and torch.tensor": (LoadFromDisk(long).batch, 20),
    }
    for chosen in picks(rows, 20, 9):
        made = [way(chosen) for way, _ in ways.values()]
        assert all(ids.equal(made[0][0]) and mask.equal(made[0][1].to(mask.dtype)) for ids, mask in made)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number, chosen in enumerate(picks(rows, 6000, 0)):
        for name in random.sample(list(ways), len(ways)):
            way, share = ways[name]
            if number % share == 0:
                began = time.perf_counter()
                way(chosen)
                times[name].append(time.perf_counter() - began)
    ms = {name: median(values) * 1e3 for name, values in times.items()}
    measured = f"{ms['ours']:.4f} ms; "
    return [
        (f"{ROWS}-row padded batch", f"{measured}{name} {ms[name]:.3f} ms: {ms[name] / ms['ours']:.2f}x", wanted, kept)
        for name, wanted, kept in (
            ("ds[i] and torch.tensor", "50x", ms["ds[i] and torch.tensor"] >= 50 * ms["ours"]),
            ("ds[list] in numpy", "3x", ms["ds[list] in numpy"] >= 3 * ms["ours"]),
            ("flat numpy", "0.83x", ms["flat numpy"] * 1.2 >= ms["ours"]),
        )
    ]


def _pair(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.input_ids, batch.loss_mask


def flat(store: Path) -> Callable[[tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]]:
    """The same rows from one flat file a column, without the overhead of np.memmap's own class."""
    ids = np.asarray(np.memmap(store / "ids.bin", np.int32, "r"))
    mask = np.asarray(np.memmap(store / "mask.bin", np.int8, "r"))
    offsets = np.load(store / "offsets.npy")
    longest = int(np.diff(offsets).max())
    all_ids, all_mask = np.empty(ROWS * longest, np.int32), np.empty(ROWS * longest, np.uint8)

    def make(chosen: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = np.array(chosen)
        starts, ends = offsets[rows], offsets[rows + 1]
        longest = int((ends - starts).max())
        ids_out = all_ids[: len(rows) * longest].reshape(len(rows), longest)
        mask_out = all_mask[: len(rows) * longest].reshape(len(rows), longest)
        for place, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            ids_out[place, : last - first] = ids[first:last]
            ids_out[place, last - first :] = 0
            mask_out[place, : last - first] = mask[first:last]
            mask_out[place, last - first :] = 0
        return torch.from_numpy(ids_out), torch.from_numpy(mask_out)

    return make


def stolen_time(many: Path, long: Path) -> list[Line]:
    """What one busy loader thread takes from a thread that launches torch ops."""
    ours, theirs = ([child("stolen", long, how, seed)["stolen_ms"] for seed in range(5)] for how in ("mapped", "load_from_disk"))
    mine, other = median(ours), median(theirs)
    measured = f"{mine:.3f} ms a batch; ds[i] {other:.2f} ms: {other / mine:.0f}x"
    return [("stolen from a launching thread", measured, "8x less, <= 1.5 ms", other >= 8 * mine and mine <= 1.5)]


def anonymous_memory(many: Path, long: Path) -> list[Line]:
    """What stays in memory after two epochs, above 24 bytes a row."""
    lines = []
    for store in (long, many):
        result = child("memory", store, 0)
        rows, (first, second) = result["rows"], result["used"]
        limit = 24 * rows + 8 * 2**20
        measured = f"{first / 2**20:.1f} then {second / 2**20:.1f} MiB"
        kept = max(first, second) <= limit and second <= first + 2**20
        lines.append((f"anonymous memory, {rows:,} rows", measured, f"<= {limit / 2**20:.1f} MiB, no growth", kept))
    return lines


def prefetch(many: Path, long: Path) -> list[Line]:
    """One prefetch thread, as a run has by default, beside torch's DataLoader processes over the same store."""
    count = 1000
    ours = [child("threads", long, 1, count) for _ in range(3)]
    lines = []
    for context in ("fork", "spawn"):
        theirs = [child("data_loader", long, context, count) for _ in range(3)]
        assert {result["check"] for result in ours + theirs} == {ours[0]["check"]}
        per_s, other = (median(result["per_s"] for result in results) for results in (ours, theirs))
        first, later = (median(result["first_s"] for result in results) for results in (ours, theirs))
        measured = f"{per_s:.0f}; {context} x2 {other:.0f}: {per_s / other:.1f}x"
        lines.append(("batches/s of a prefetch thread", measured, "5x", per_s >= 5 * other))
        measured = f"{first * 1e3:.2f} ms; {context} x2 {later * 1e3:.0f} ms: {later / first:.0f}x"
        lines.append(("time to the first batch", measured, "50x sooner", later >= 50 * first))
    return lines


def padding(many: Path, long: Path) -> list[Line]:
    """Computed over real tokens of 902,087 rows with a long tail, and how random their order is."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(900), 0.8, 902_087)), 16, 8192).astype(np.int32)
    supervised = np.maximum(2, lengths * rng.random(len(lengths))).astype(np.int32)
    training = TrainingConfig(epochs=1)
    batches = list(plan(lay_out(lengths, supervised, training=training), seed=0, epochs=1, bytes_per_token=1))
    share = sum(batch.credit for batch in batches) / lengths.sum()
    shuffled = rng.permutation(len(lengths))
    thirties = np.maximum.reduceat(lengths[shuffled], np.arange(0, len(lengths), ROWS)).astype(np.int64)
    by_chance = thirties.sum() * ROWS / lengths.sum()
    measured = f"{share:.4f} in {len(batches):,} micro-batches; random rows {by_chance:.2f}"
    lines = [("computed / real tokens", measured, "<= 1.04", share <= 1.04)]
    order = order_statistics(lengths, np.array([row for batch in batches for row in batch.rows]))
    full = order_statistics(lengths, shuffled)
    for name, value in order.items():
        close = abs(value - full[name]) < 0.02
        lines.append((f"order: {name.replace('_', ' ')}", f"{value:.4f}; full shuffle {full[name]:.4f}", "as a shuffle", close))
    return lines


FIGURES: dict[str, Callable[[Path, Path], list[Line]]] = {
    "open": lambda many, long: opening(many, long, cold=False),
    "cold": lambda many, long: opening(many, long, cold=True),
    "start": start,
    "assembly": assembly,
    "stolen": stolen_time,
    "memory": anonymous_memory,
    "prefetch": prefetch,
    "padding": padding,
}


def main() -> None:
    """Makes the data where it is missing, measures, prints the table; exit code 1 where a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the data is made and kept")
    parser.add_argument("--rows", type=int, default=902_087, help="rows of the store that is opened")
    parser.add_argument("--long-rows", type=int, default=100_000, help="rows of the store that micro-batches are read from")
    parser.add_argument("--only", choices=FIGURES, action="append", help="this figure; may be given again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    many = make_store(arguments.dir / "many", rows=arguments.rows, median=30, longest=128)
    long = make_store(arguments.dir / "long", rows=arguments.long_rows, median=360, longest=4096)
    kept = True
    for name in arguments.only or FIGURES:
        for figure, measured, wanted, good in FIGURES[name](many, long):
            print(f"{figure:38}  {measured:74}  {wanted:24}  {'yes' if good else 'NO'}", flush=True)
            kept = kept and good
    raise SystemExit(not kept)


if __name__ == "__main__":
    main()
