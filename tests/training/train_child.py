"""Trains the run of a config file in a process of its own: `python -m tests.training.train_child CONFIG.json TAP_SECONDS`.

Prints `step N` after each step; every target pass takes TAP_SECONDS longer, so that a kill can land in the middle.
"""

import sys
import time
from pathlib import Path

import anyio

from dflash_core import assembly
from dflash_core.config import Config
from dflash_core.modeling.target import TapReplica
from dflash_core.records import Batch, StepMetrics, TappedBatch
from dflash_core.rundir import open_run

tap = TapReplica.tap


def main(config_file: str, tap_seconds: str) -> None:
    """The whole of training, resumed where the run stands."""

    def slower_tap(replica: TapReplica, batch: Batch) -> TappedBatch:
        time.sleep(float(tap_seconds))
        return tap(replica, batch)

    def on_step(metrics: StepMetrics, total: int) -> None:
        print(f"step {metrics.step}", flush=True)

    async def train() -> None:
        await assembly.train(config, open_run(config), anyio.Event(), on_step)

    TapReplica.tap = slower_tap  # type: ignore[method-assign]
    config = Config.model_validate_json(Path(config_file).read_text(encoding="utf-8"))
    anyio.run(train)


if __name__ == "__main__":
    main(*sys.argv[1:])
