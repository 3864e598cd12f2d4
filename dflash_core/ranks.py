"""The parent of several ranks: starts torchrun, hears of every step, passes a stop request on, and tells whose error it was.

train_in_ranks --stdin--> torchrun -> ranks --stdout: steps, stderr: everything else--> on_step, the error's text
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from dflash_core.config import Config
from dflash_core.errors import unwrapped
from dflash_core.files import write_json
from dflash_core.records import StepMetrics, TrainResult
from dflash_core.rundir import RunDirectory

STDERR_KEPT = 20_000  # characters
END_S = 20.0  # for torchrun to end its ranks; they leave by themselves when its standard input is closed


async def train_in_ranks(
    config: Config, run: RunDirectory, stop: anyio.Event, on_step: Callable[[StepMetrics, int], None]
) -> TrainResult:
    """`assembly.train` in `pipeline.ranks` processes. Raises RuntimeError, or ValueError for bad input, with the failing rank's error."""
    job = run.root / "ranks.json"
    write_json(job, {"config": config.model_dump(mode="json"), "root": str(run.root)})
    for rank in range(config.pipeline.ranks):
        _error_file(run, rank).unlink(missing_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.pipeline.ranks)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    process = await anyio.open_process(
        [*launcher, "-m", "dflash_core.rank", str(job)],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches this process alone
    )
    said: list[str] = []
    try:
        with unwrapped():
            async with anyio.create_task_group() as group:
                group.start_soon(_pass_on, stop, process)
                all_said = await group.start(_collect, process, said)
                await _forward_steps(process, on_step)
                code = await process.wait()
                with anyio.move_on_after(END_S):
                    await all_said.wait()
                group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)
    if code:
        raise _error(run, config.pipeline.ranks, "".join(said))
    return TrainResult(**json.loads(run.training.read_text(encoding="utf-8")))


async def _pass_on(stop: anyio.Event, process: Process) -> None:
    await stop.wait()
    assert process.stdin is not None
    await process.stdin.send(b"s")


async def _collect(process: Process, said: list[str], *, task_status: anyio.abc.TaskStatus[anyio.Event]) -> None:
    """The end of what the ranks and torchrun wrote; the event is set when they closed it."""
    assert process.stderr is not None
    closed = anyio.Event()
    task_status.started(closed)
    async for text in TextReceiveStream(process.stderr, errors="replace"):
        said[:] = ["".join([*said, text])[-STDERR_KEPT:]]
    closed.set()


async def _forward_steps(process: Process, on_step: Callable[[StepMetrics, int], None]) -> None:
    assert process.stdout is not None
    waiting = ""
    async for text in TextReceiveStream(process.stdout, errors="replace"):
        *lines, waiting = (waiting + text).split("\n")
        for line in lines:
            if line.startswith('{"total"'):
                value = json.loads(line)
                await to_thread.run_sync(on_step, StepMetrics(**value["metrics"]), value["total"])
            elif line.startswith('{"log"'):
                value = json.loads(line)
                if (logger := logging.getLogger(value["log"])).isEnabledFor(value["level"]):
                    logger.log(value["level"], "%s", value["message"])


async def _end(process: Process) -> None:
    """No rank outlives this call."""
    assert process.stdin is not None
    await process.stdin.aclose()
    if process.returncode is None:
        process.terminate()
    with anyio.move_on_after(END_S):
        await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


# ---- whose error -----------------------------------------------------------------------------------------------------


def _error_file(run: RunDirectory, rank: int) -> Path:
    return run.of_rank(rank).root / "error.json"


def _error(run: RunDirectory, ranks: int, said: str) -> Exception:
    """A rank that was killed, else the first that failed by itself: what follows in other ranks are broken connections."""
    if killed := killed_rank(said):
        return RuntimeError(f"rank {killed[0]} was killed by {signal.Signals(killed[1]).name}; the other ranks were ended")
    files = {rank: _error_file(run, rank) for rank in range(ranks)}
    errors: dict[int, dict[str, Any]] = {
        rank: json.loads(file.read_text(encoding="utf-8")) for rank, file in files.items() if file.is_file()
    }
    if not errors:
        return RuntimeError(f"the ranks ended without a word:\n{said[-4000:]}")
    rank = min(errors, key=lambda number: float(errors[number]["time"]))
    error = errors[rank]
    if error["type"] == "ValueError":
        return ValueError(f"rank {rank}: {error['message']}")
    return RuntimeError(f"rank {rank} failed:\n{error['traceback']}")


def killed_rank(said: str) -> tuple[int, int] | None:
    """(rank, signal) of the first rank in torchrun's summary that ended by a signal other than torchrun's own SIGTERM."""
    for rank, code in re.findall(r"rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)", said):
        if int(code) < 0 and -int(code) != signal.SIGTERM:
            return int(rank), -int(code)
    return None
