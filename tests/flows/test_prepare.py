"""Preparation as a flow: parts as tasks, and a stop request that ends them at their next batch."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect.exceptions import CancelledRun

from flows.prepare import prepare
from tests import fakes

pytestmark = pytest.mark.usefixtures("api")


def call(config: Path, **overrides: Any) -> dict[str, Any]:
    return anyio.run(partial(prepare, config=str(config), overrides=overrides))


def test_a_stop_request_ends_tokenization_within_a_part(run_file: Path, tmp_path: Path, caplog) -> None:
    """One part of 20,000 conversations is many seconds of work, and hears it at its next batch."""
    fakes.write_jsonl(tmp_path / "conversations.jsonl", fakes.chats(20_000))
    run = tmp_path / "runs" / "tiny"
    part = run / "preparing" / "part-00000.jsonl"

    def stop() -> None:
        while not part.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(CancelledRun, match="stopped"):
        call(run_file, **{"data.near_duplicates": "off"})
    assert sorted(path.name for path in run.iterdir()) == [".lock", "run.json"], "nothing half-written is left"


def test_a_part_that_fails_fails_the_flow_with_its_own_error(run_file: Path, tmp_path: Path, monkeypatch) -> None:
    from dflash_core.data import workers

    tokenize_part = workers.tokenize_part

    def broken(part: Path, **keywords: Any) -> Any:
        if part.stem == "part-00002":
            raise RuntimeError("the disk is gone")
        return tokenize_part(part, **keywords)

    monkeypatch.setattr(workers, "tokenize_part", broken)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        call(run_file, **{"data.part_rows": 5})
    assert not (tmp_path / "runs" / "tiny" / "preparing").exists()
    monkeypatch.undo()
    assert call(run_file, **{"data.part_rows": 4})["skipped"] is False, "the size of a part is no other experiment"
