"""flows.full_run: the chain skips what is done, ends where a step was stopped, and begins a new run for new data."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from dflash_core.rundir import open_run
from flows.full_run import full_run, newest_run
from flows.prepare import prepare
from flows.settings import load_config
from tests import fakes

pytestmark = pytest.mark.usefixtures("api")


def call(flow: Any, config: Path, **parameters: Any) -> Any:
    return anyio.run(partial(flow, config=str(config), **parameters))


def finish(root: Path) -> None:
    """The mark of a finished run."""
    (root / "report.json").write_text("{}")


def test_the_newest_run_goes_on_until_it_is_finished_and_its_inputs_change(run_file: Path, tmp_path: Path) -> None:
    config, runs = load_config(str(run_file)), tmp_path / "runs"
    assert newest_run(config) == "tiny"
    call(prepare, run_file)
    assert newest_run(config) == "tiny", "not finished: it resumes"
    finish(runs / "tiny")
    assert newest_run(config) == "tiny", "nothing changed"
    other = config.model_copy(update={"seed": 7})
    assert newest_run(other) == "tiny-2", "another config"
    fakes.write_jsonl(tmp_path / "conversations.jsonl", fakes.chats(25))
    assert newest_run(config) == "tiny-2", "new data"
    open_run(config.model_copy(update={"name": "tiny-2"}))
    assert newest_run(config) == "tiny-2", "begun and not finished"
    finish(runs / "tiny-2")
    assert newest_run(config) == "tiny-3", "never prepared with these data"


def test_shards_that_were_there_before_are_new_data_when_they_change(run_file: Path, tmp_path: Path) -> None:
    call(prepare, run_file)
    shards = tmp_path / "theirs"
    shutil.copytree(tmp_path / "runs" / "tiny" / "shards", shards)
    fingerprint = json.loads((shards / "manifest.json").read_text())["fingerprint"]
    config = load_config(str(run_file), {"name": "given", "data.conversations": [], "data.shards": [str(shards)]})
    run = open_run(config)
    run.report.write_text(json.dumps({"data_fingerprint": fingerprint}))
    assert newest_run(config) == "given"
    run.report.write_text(json.dumps({"data_fingerprint": "older"}))
    assert newest_run(config) == "given-2"
    assert not run.index.exists()


def test_a_stopped_step_ends_the_chain_as_stopped(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_MLFLOW_URI", "none")
    run = tmp_path / "runs" / "tiny"
    stopper = threading.Thread(
        target=_when, args=((run / "metrics.jsonl").is_file, partial(os.kill, os.getpid(), signal.SIGTERM))
    )
    stopper.start()
    state = anyio.run(partial(full_run, config=str(run_file), overrides={"training": {"epochs": 100_000}}, return_state=True))
    stopper.join()
    assert (state.name, state.type.value) == ("Stopped", "CANCELLED")
    assert state.message.startswith("train: stopped at step ")
    assert "resumable" in state.message
    assert not (run / "export").exists()
    assert not (run / "promotion.json").exists()


def _when(found: Callable[[], bool], act: Callable[[], None]) -> None:
    end = time.monotonic() + 240
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)
    act()
