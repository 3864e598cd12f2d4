"""What a run needs and how fast it can be, before a GPU is used: `python -m flows.plan --config FILE --devices 4xrtx-pro-6000`.

the target's config.json and the run's file -> parameters, memory, disk, save time, FLOPs -> tokens/s and days by topology
"""

import functools
from pathlib import Path
from typing import Any

from flows.command import read_command_line, run_plain

DEVICES = {
    "metavar": "NxNAME",
    "default": None,
    "help": "GPUs to plan for: h200, h100, rtx-pro-6000 (default: 8xh200 and 4xrtx-pro-6000)",
}
LENGTH = {
    "metavar": "TOKENS",
    "type": int,
    "default": None,
    "help": "mean tokens of a row (default: of the run's shards, else 2000)",
}
TOKENS = {
    "metavar": "TOKENS",
    "type": float,
    "default": None,
    "help": "tokens of an epoch (default: of the run's shards, else 1e9)",
}
OPTIONS = {"devices": DEVICES, "row-tokens": LENGTH, "tokens": TOKENS}
COMMAND = read_command_line("plan", "Sizes and speed of a run, before it.", options=OPTIONS) if __name__ == "__main__" else None

from dflash_core import planning
from dflash_core.config import Config
from dflash_core.modeling.census import read_census
from dflash_core.modeling.target import read_facts
from dflash_core.records import DrafterShape
from dflash_core.sizes import resolve
from flows.console import say

GB = 1e9


def plan(config: Config, *, devices: str | None, row_tokens: int | None, tokens: float | None) -> None:
    """Prints the plan. Raises ValueError for devices that are not known."""
    chosen = [planning.parse_devices(text) for text in ([devices] if devices else ["8xh200", "4xrtx-pro-6000"])]
    facts = read_facts(config.target.path)
    shape, counted = resolve(config, facts), read_census(config.target.path)
    mean, supervised, epoch = _data(config, row_tokens, tokens)
    anchors = min(config.training.anchors_per_row, supervised)
    costs = planning.cost(config, shape, counted, row_tokens=mean, anchors=anchors)
    say(
        f"target {config.target.path}: {_billions(counted.embedding + sum(counted.layers))} in {len(counted.layers)} layers and embedding"
    )
    say(
        f"drafter: {_billions(planning.drafter_parameters(shape))}, taps {list(shape.target_layer_ids)}, block {shape.block_size}"
    )
    say(
        f"rows of {mean:,.0f} tokens with {anchors:,.0f} anchors; an epoch has {epoch / 1e9:.2f} Gtok, {config.training.epochs} epochs"
    )
    say(f"FLOPs a data token: target {costs.target / 1e9:.1f} G, drafter {costs.drafter / 1e9:.1f} G, "
        f"ratio {costs.target / costs.drafter:.2f}")  # fmt: skip
    target = planning.target_room(config, shape, counted)
    drafter = functools.partial(planning.drafter_room, config, shape, counted)
    for what, room in (
        ("target's device", target),
        ("drafter's device", drafter(config.pipeline.ranks)),
        ("disk", planning.disk_room(config, shape, tokens=epoch)),
    ):
        say(
            f"{what}: {room.total / GB:.1f} GB ("
            + ", ".join(f"{name} {size / GB:.1f}" for name, size in room.parts.items())
            + ")"
        )
    _say_save(config, shape)
    for count, device in chosen:
        say(f"{count} x {device.name} ({device.flops / 1e12:.0f} TF dense bf16, {device.memory / GB:.0f} GB; assumed MFU: target "
            f"{device.target_mfu:.0%}, drafter {device.drafter_mfu:.1%})")  # fmt: skip
        found = planning.topologies(costs, count, device, target=target, drafter=drafter)
        best = next((topology for topology in found if topology.fits and topology.even), None)
        for topology in found:
            notes = ["best"] if topology is best else []
            notes += [] if topology.fits else ["does not fit the memory"]
            notes += [] if topology.even else ["targets do not divide among the drafters' ranks"]
            days = epoch * config.training.epochs / topology.rate / 86400
            say(f"  {topology.name:>7}  {topology.rate / 1000:8.1f} Ktok/s  {days:8.1f} days  {'; '.join(notes)}")
        if best is None:
            say("  nothing fits: lower training.anchors_per_batch, training.tokens_per_batch or pipeline.ahead_bytes")


def _data(config: Config, row_tokens: int | None, tokens: float | None) -> tuple[float, float, float]:
    """(tokens a row, anchors it has room for, tokens an epoch) from the options, the run's shards, or a guess."""
    from dflash_core.data.shards import read_manifest

    manifest = read_manifest(Path(config.places.runs) / config.name / "shards")
    if manifest is None or not manifest.rows:
        return row_tokens or 2000.0, float(config.training.anchors_per_row), tokens or 1e9
    return row_tokens or manifest.tokens / manifest.rows, manifest.supervised / manifest.rows, tokens or float(manifest.tokens)


def _say_save(config: Config, shape: DrafterShape) -> None:
    seconds, deadline = planning.save_seconds(config, shape), config.pipeline.stop_deadline_s
    verdict = f"within the stop deadline of {deadline:.0f} s"
    if seconds > deadline:
        verdict = (
            f"above the stop deadline of {deadline:.0f} s: a stop falls back to the last checkpoint; lower "
            f"training.checkpoint_every, or raise pipeline.stop_deadline_s where nothing ends the process sooner"
        )
    say(f"a save takes about {seconds:.1f} s at {planning.DISK_BYTES_S / GB:.0f} GB/s, {verdict}")


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B parameters" if parameters >= 1e8 else f"{parameters / 1e6:.2f} M parameters"


if __name__ == "__main__":
    given: dict[str, Any] = COMMAND.options
    work = functools.partial(plan, devices=given["devices"], row_tokens=given["row-tokens"], tokens=given["tokens"])
    run_plain(work, COMMAND)
