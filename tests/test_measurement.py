"""The processes of an evaluation: their outputs, and who ends them."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from dflash_core.decoding.report import _data_lines, _evaluation_lines, _micro_batches
from dflash_core.measurement import run_side_by_side


def command(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def sleeper(file: Path) -> list[str]:
    """A process that leaves its pid in a file and sleeps."""
    return command(f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(str(os.getpid())); time.sleep(120)")


def is_alive(file: Path) -> bool:
    with suppress(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
        return True
    return False


def run(commands: list[list[str]], *, stop_when: Path | None = None, seconds: float = 60.0) -> list[str] | None:
    async def main() -> list[str] | None:
        stop = anyio.Event()

        async def stopper() -> None:
            while stop_when is None or not (stop_when.is_file() and stop_when.read_text()):
                await anyio.sleep(0.02)
            stop.set()

        async with anyio.create_task_group() as group:
            group.start_soon(stopper)
            try:
                return await run_side_by_side(commands, stop, seconds=seconds)
            finally:
                group.cancel_scope.cancel()

    return anyio.run(main)


def test_outputs_come_in_the_order_of_the_commands() -> None:
    slow = command("import time; time.sleep(0.3); print('slow')")
    assert run([slow, command("print('fast')")]) == ["slow\n", "fast\n"]


def test_one_that_fails_ends_the_others_and_says_why(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    failing = command(
        f"import pathlib, sys, time\nwhile not pathlib.Path({str(file)!r}).is_file(): time.sleep(0.01)\nsys.exit('no heron here')"
    )
    with pytest.raises(BaseExceptionGroup) as caught:
        run([sleeper(file), failing])
    (error,) = caught.value.exceptions
    assert isinstance(error, RuntimeError)
    assert "failed with exit code 1:\nno heron here" in str(error)
    assert not is_alive(file)


def test_a_stop_request_ends_them(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    start = time.perf_counter()
    assert run([sleeper(file), command("print(1)")], stop_when=file) is None
    assert time.perf_counter() - start < 30
    assert not is_alive(file)


def test_after_the_limit_they_are_ended_and_the_limit_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with pytest.raises(BaseExceptionGroup) as caught:
        run([sleeper(file)], seconds=3.0)
    (error,) = caught.value.exceptions
    assert isinstance(error, TimeoutError)
    assert "more than 3 s (pipeline.evaluation_s)" in str(error)
    assert not is_alive(file)


def test_evaluations_that_were_never_due_are_said_to_be() -> None:
    nothing = {"evaluations": [], "correlation": None, "best_step": None, "seconds": 0.0, "share": 0.0, "warnings": []}
    (line,) = _evaluation_lines({**nothing, "left_out": 0, "given_up": 0})
    assert "none was due" in line
    assert _evaluation_lines(None) == []


def test_ledgers_are_read_as_words() -> None:
    none = {"issued": 37, "applied": 12, "skipped": {}, "returned": 25}
    assert _micro_batches(none) == "37 issued, 12 trained, skipped 0, 25 read ahead and not trained"
    some = {"issued": 1012, "applied": 1010, "skipped": {"no rows": 2}, "returned": 0}
    assert _micro_batches(some) == "1,012 issued, 1,010 trained, 2 x no rows, none left over"
    conversations = {"rows_in": 1060, "kept": 1056, "cut": 0, "dropped": {"unknown role": 3, "no messages": 1}}
    data = {"rows": 1056, "tokens": 5000, "supervised": 3000, "shards": 1}
    first, second = _data_lines({"data": data, "ledger": {"conversations": conversations}})
    assert first.endswith("3,000 supervised, 1 shard")
    assert second == "- conversations in 1,060, kept 1,056, cut 0, dropped: 3 x unknown role, 1 x no messages"
