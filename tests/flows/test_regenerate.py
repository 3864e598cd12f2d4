"""The flow of regeneration: what a person sees, what a second run does, and a stop request."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from prefect.exceptions import CancelledRun

from dflash_core.decoding.drive import Progress
from flows.prepare import prepare
from flows.progress import RegenerationProgress
from flows.regenerate import regenerate

pytestmark = pytest.mark.usefixtures("api")
SHORT = {"regeneration.max_tokens": 6, "regeneration.concurrency": 5}


def call(flow: Any, config: Path, **parameters: Any) -> Any:
    return anyio.run(partial(flow, config=str(config), **parameters))


def test_regenerated_conversations_prepare_and_are_not_asked_again(run_file: Path, tmp_path: Path, caplog) -> None:
    summary = call(regenerate, run_file, overrides=SHORT)
    output = tmp_path / "runs" / "tiny.regenerated.jsonl"
    assert summary["output"] == str(output)
    assert summary["conversations"] == {"rows_in": 24, "kept": 24, "left": 0, "dropped": {}}
    assert "regenerated: 24 of 24 conversations" in caplog.text
    assert f"next: python -m flows.prepare --config {run_file} --data.conversations {output}" in caplog.text
    again = call(regenerate, run_file, overrides=SHORT)
    assert again["before"] == 24
    assert "answered by an earlier run: 24" in caplog.text
    prepared = call(prepare, run_file, overrides={"data.conversations": str(output), "data.min_kept": 0})
    assert Path(prepared["shards"]).is_dir()


def test_one_config_can_regenerate_what_it_prepares(run_file: Path, tmp_path: Path, caplog) -> None:
    prompts, output = tmp_path / "conversations.jsonl", tmp_path / "answers.jsonl"
    overrides = SHORT | {
        "data.conversations": str(output),
        "data.min_kept": 0,
        "regeneration.conversations": str(prompts),
        "regeneration.output": str(output),
    }
    call(regenerate, run_file, overrides=overrides)
    assert caplog.messages.count(f"next: python -m flows.prepare --config {run_file}") == 1
    assert Path(call(prepare, run_file, overrides=overrides)["shards"]).is_dir()


def test_a_stop_request_ends_as_stopped_and_the_next_run_goes_on(run_file: Path, monkeypatch) -> None:
    class Stopping(RegenerationProgress):
        def __call__(self, progress: Progress) -> None:
            super().__call__(progress)
            if progress.rows == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("flows.progress.RegenerationProgress", Stopping)
    with pytest.raises(CancelledRun, match=r"stopped with \d+ of 24 conversations answered; they are kept"):
        call(regenerate, run_file, overrides=SHORT)
    monkeypatch.undo()
    assert 5 <= call(regenerate, run_file, overrides=SHORT)["before"] < 24


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"regeneration.endpoints": ["http://me:secret@host/v1"]}, "holds a user or password"),
        ({"regeneration.conversations": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"regeneration.api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE, which is not set"),
    ],
)
def test_bad_input_is_seen_before_anything_starts(
    overrides: dict[str, Any], message: str, run_file: Path, tmp_path: Path, caplog
) -> None:
    with pytest.raises(ValueError, match=message):
        call(regenerate, run_file, overrides=overrides)
    assert "secret" not in caplog.text
    assert not (tmp_path / "runs").exists()
