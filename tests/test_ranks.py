"""What the parent of several ranks hears from them: steps for its display, and log records for its own log."""

import json
import logging
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from dflash_core import ranks
from dflash_core.rank import _Lines
from tests.training.test_metrics import STEP

CORE = logging.getLogger("dflash_core")


def test_steps_and_log_records_of_rank_0_reach_the_parent(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = logging.getLogger("dflash_core.training.evaluations")
    caplog.set_level(logging.INFO, child.name)
    lines = _Lines()
    for level, words in ((logging.INFO, "step 70: acceptance length %.2f"), (logging.WARNING, "the gap grew to %.2f")):
        lines.emit(child.makeRecord(child.name, level, "", 0, words, (2.5,), None))
    lines.emit(CORE.makeRecord("dflash_core.quiet", logging.DEBUG, "", 0, "for nobody", (), None))
    step = json.dumps({"total": 9, "metrics": asdict(STEP)})
    said = (capsys.readouterr().out + step + "\nsomething else\n").encode()
    heard: list[Any] = []

    async def main() -> None:
        send, receive = anyio.create_memory_object_stream[bytes](100)
        with send:
            for start in range(0, len(said), 37):  # lines come in pieces
                await send.send(said[start : start + 37])
        process: Any = SimpleNamespace(stdout=receive)
        await ranks._forward_steps(process, lambda metrics, total: heard.append((metrics.step, total)))

    anyio.run(main)
    assert heard == [(1, 9)]
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        (child.name, logging.INFO, "step 70: acceptance length 2.50"),
        (child.name, logging.WARNING, "the gap grew to 2.50"),
    ]
