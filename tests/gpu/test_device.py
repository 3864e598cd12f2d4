"""One GPU, at most fifteen minutes: `make test-gpu` on a machine that has one. Target and drafter share it on streams of their own.

Prints what only a device can show: stage shares, real-token MFU (DFLASH_PEAK_TFLOPS, default 989.5), bytes under credit.
"""

import json
import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from dflash_core import assembly, preparation
from dflash_core.config import Config
from dflash_core.records import Batch, PlannedBatch, TappedBatch, TrainResult
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.training.transfer import Carrier
from tests.fakes import chats, make_config, save_target, write_jsonl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PEAK = float(os.environ.get("DFLASH_PEAK_TFLOPS", "989.5"))


def train(config: Config) -> tuple[TrainResult, RunDirectory]:
    run = open_run(config)
    preparation.prepare(config, run)

    async def main() -> TrainResult:
        return await assembly.train(config, run, anyio.Event(), lambda metrics, total: None)

    return anyio.run(main), run


def losses(run: RunDirectory) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


def test_a_shared_device_trains_what_the_cpu_trains(tmp_path: Path, target_dir: Path) -> None:
    found = []
    for name, (target, drafter) in {
        "cpu": ("cpu", "cpu"),
        "shared": ("cuda:0", "cuda:0"),
        "spread": ("cuda:0+cpu", "cuda:0"),  # the target's layers on both
        "spread-back": ("cpu+cuda:0", "cuda:0"),
    }.items():
        pipeline: dict[str, Any] = {"targets": [target], "drafter": drafter}
        config = make_config(tmp_path, target_dir, name=name, pipeline=pipeline, training={"epochs": 3})
        found.append(losses(train(config)[1]))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "tolerance"), [({"autocast": "bfloat16"}, 2e-2), ({"compile": True}, 1e-3), ({"attention": "dense"}, 1e-3)]
)
def test_switches_train_what_plain_float32_trains(
    tmp_path: Path, target_dir: Path, changes: dict[str, Any], tolerance: float
) -> None:
    found = []
    for name, switches in (("plain", {}), ("switched", changes)):
        pipeline: dict[str, Any] = {"targets": ["cuda:0"], "drafter": "cuda:0"}
        training = {"epochs": 2, **switches}
        found.append(losses(train(make_config(tmp_path, target_dir, name=name, pipeline=pipeline, training=training))[1]))
    assert found[1] == pytest.approx(found[0], rel=tolerance)


def test_states_are_whole_when_the_next_tap_runs_already() -> None:
    """Constants through 2,000 taps on a stream of their own, read on the default stream under allocator pressure."""
    carrier, nothing = Carrier("cuda:0", "cuda:0"), torch.zeros(0)
    wrong = torch.zeros((), device="cuda:0")
    for number in range(2000):
        plan = PlannedBatch(number=number, epoch=0, rows=(number,), credit=0)
        batch = Batch(plan=plan, input_ids=nothing, loss_mask=nothing, lengths=nothing)

        def tap(batch: Batch = batch) -> TappedBatch:
            states = torch.full((1, 512, 1024), float(batch.plan.number), device="cuda:0")
            return TappedBatch(batch=batch, target_hidden=states * 1.0)

        tapped = carrier(tap)
        wrong += (tapped.target_hidden != number).any()
        pressure = torch.randn(1 + number % 7, 512, 1024, device="cuda:0")
        del tapped, pressure
    assert int(wrong) == 0


def test_memory_that_is_short_halves_the_micro_batch(tmp_path: Path, target_dir: Path) -> None:
    """A tenth of a gigabyte for everything: the run ends, or a micro-batch is named; it never hangs."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 0.1e9 / total))
    try:
        config = make_config(
            tmp_path, target_dir, name="short", pipeline={"targets": ["cuda:0"], "drafter": "cuda:0"},
            training={"tokens_per_batch": 4096, "anchors_per_row": 64, "anchors_per_batch": 4096},
        )  # fmt: skip
        result, _ = train(config)
        print("departures", result.departures)
    except torch.OutOfMemoryError as error:
        print("named", error.__notes__)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_utilisation_of_a_real_size(tmp_path: Path) -> None:
    """A random target of 1.4 B parameters: what keeps the device busy, and how much of it is real tokens."""
    target = save_target(
        tmp_path / "target", hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    )  # fmt: skip
    rows = [{**row, "messages": row["messages"] * 12} for row in chats(2000)]
    write_jsonl(tmp_path / "conversations.jsonl", rows)
    config = make_config(
        tmp_path, target, name="large", target={"path": str(target), "dtype": "bfloat16"}, data={"max_length": 2048},
        drafter={"num_layers": 5, "block_size": 16, "target_layer_ids": [1, 7, 13, 19, 25]},
        training={"tokens_per_batch": 16_384, "anchors_per_row": 128, "anchors_per_batch": 1024, "max_steps": 60,
                  "autocast": "bfloat16", "checkpoint_every": 1000},
        pipeline={"targets": ["cuda:0"], "drafter": "cuda:0", "ahead_bytes": 8 * 2**30, "peak_tflops": PEAK},
    )  # fmt: skip
    result, _ = train(config)
    for name in ("read", "tap", "train"):
        print(name, {key: value for key, value in result.stages[name].items() if key.endswith("share")})
    print("real tokens/s", result.tokens_per_second, "| MFU", result.pipeline["mfu"], "|", result.bottleneck)
    print("credit, GB at most", result.pipeline["credit_bytes_most"] / 1e9, "| start", result.startup_s)
    assert result.step == 60
    assert result.pipeline["mfu"] > 0
