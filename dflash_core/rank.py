"""One rank of a training, without Prefect and MLflow: what torchrun starts, `torchrun ... -m dflash_core.rank JOB.json`.

parent --standard input: a byte asks to stop, its end means that the parent is gone--> this process, or any other rank
rank 0 --standard output: a line of JSON a step or log record--> parent          an error: ranks/<rank>/error.json, and exit code 1
"""

import dataclasses
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import anyio
import torch
from anyio import from_thread

from dflash_core import assembly
from dflash_core.config import Config
from dflash_core.records import StepMetrics
from dflash_core.rundir import RunDirectory
from dflash_core.training.gang import Gang

ORPHANED = 71  # exit code


def main(job_file: str) -> None:
    """Trains this rank's share of the run that the job names."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    config = Config.model_validate(job["config"])
    run = RunDirectory(root=Path(job["root"]), state="resume")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        core = logging.getLogger("dflash_core")
        core.addHandler(_Lines())
        core.setLevel(logging.INFO)
    asked = threading.Event()
    threading.Thread(target=_watch_parent, args=(asked,), daemon=True).start()
    cuda = config.pipeline.drafter.startswith("cuda")
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        anyio.run(_train, config, run, rank, size, asked)
    except Exception as error:
        value = {"time": time.time(), "type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
        (run.of_rank(rank).root / "error.json").write_text(json.dumps(value), encoding="utf-8")
        traceback.print_exc()
        os._exit(1)  # no collective may be waited for: the others are in another one
    torch.distributed.destroy_process_group()


class _Lines(logging.Handler):
    """What is said here is said by the parent, which has the run's log."""

    def emit(self, record: logging.LogRecord) -> None:
        print(json.dumps({"log": record.name, "level": record.levelno, "message": record.getMessage()}), flush=True)


async def _train(config: Config, run: RunDirectory, rank: int, size: int, asked: threading.Event) -> None:
    stop = anyio.Event()
    gang = Gang(rank=rank, size=size, asked=asked.is_set, agree=lambda: from_thread.run_sync(stop.set))

    def on_step(metrics: StepMetrics, total: int) -> None:
        if rank == 0:
            print(json.dumps({"total": total, "metrics": dataclasses.asdict(metrics)}), flush=True)

    await assembly.train(config, run, stop, on_step, gang=gang)


def _watch_parent(asked: threading.Event) -> None:
    while os.read(0, 1):
        asked.set()
    os._exit(ORPHANED)


if __name__ == "__main__":
    main(sys.argv[1])
