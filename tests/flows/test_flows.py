"""The flows called as functions: what a second run of the same config does."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from flows.evaluate import evaluate
from flows.prepare import prepare
from flows.train import train
from tests import fakes

pytestmark = pytest.mark.usefixtures("api")


@pytest.fixture(autouse=True)
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making MLflow's tables takes seconds, and test_tracking has it."""
    monkeypatch.setenv("DFLASH_MLFLOW_URI", "none")


def call(flow: Any, config: Path, **parameters: Any) -> Any:
    return anyio.run(partial(flow, config=str(config), **parameters))


def test_bad_conversations_leave_the_name_free(run_file: Path, tmp_path: Path) -> None:
    bad = fakes.write_jsonl(tmp_path / "bad.jsonl", [{"messages": [{"role": "heron", "content": "Hi"}]}])
    with pytest.raises(ValueError, match="unknown role 'heron'"):
        call(prepare, run_file, overrides={"data.conversations": str(bad)})
    assert list((tmp_path / "runs").iterdir()) == []
    assert call(prepare, run_file) == {"shards": str(tmp_path / "runs" / "tiny" / "shards"), "skipped": False}


def test_preparation_is_skipped_until_an_input_changes(run_file: Path, tmp_path: Path, caplog) -> None:
    assert not call(prepare, run_file)["skipped"]
    assert "prepared: 24 rows" in caplog.text
    caplog.clear()
    assert call(prepare, run_file)["skipped"]
    assert "preparation skipped: the shards are up to date: 24 rows" in caplog.text
    fakes.write_jsonl(tmp_path / "conversations.jsonl", fakes.chats(25))
    assert not call(prepare, run_file)["skipped"]


def test_evaluating_an_untrained_run_is_bad_input(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such run; train first"):
        call(evaluate, run_file)
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_prints_its_report_and_evaluate_measures_again(run_file: Path, tmp_path: Path, caplog) -> None:
    run = tmp_path / "runs" / "tiny"
    first = call(train, run_file)
    assert first["export"] == str(run / "export")
    written = (run / "report.json").stat().st_mtime_ns
    caplog.clear()
    assert call(train, run_file) == first
    assert "finished before" in caplog.text
    assert "acceptance length, this drafter" in caplog.text
    assert (run / "report.json").stat().st_mtime_ns == written
    weights, card = run / "export" / "model.safetensors", run / "export" / "README.md"
    assert "4 held-out requests" in card.read_text()
    before = weights.stat()
    card.write_text("stale")
    assert call(evaluate, run_file)["acceptance_length"] == first["acceptance_length"]
    report = json.loads((run / "report.json").read_text())
    assert f"| acceptance length, n-gram reference | {report['acceptance_length_ngram']:.2f} |" in card.read_text()
    assert "greedy, float32, at most 12 new tokens, 1 together, block size 4" in card.read_text()
    assert (weights.stat().st_ino, weights.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (run / "report.json").stat().st_mtime_ns > written
    with pytest.raises(ValueError, match=r"training\.learning_rate: 0\.0006 -> 0\.5"):
        call(train, run_file, overrides={"training.learning_rate": 0.5})


def test_evaluations_during_training_are_in_the_log_the_files_and_the_report(run_file: Path, tmp_path: Path, caplog) -> None:
    run = tmp_path / "runs" / "tiny"
    call(train, run_file, overrides={"during_training.eval_every": 1, "during_training.max_new_tokens": 8})
    found = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert found
    lines = [record.getMessage() for record in caplog.records if "by decoding 4 prompts" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == [f"step {one['step']}" for one in found]
    report = json.loads((run / "report.json").read_text())
    assert report["evaluation"]["evaluations"] == found
    steps = report["training"]["total_steps"]
    assert len(found) + report["evaluation"]["left_out"] == steps
    text = (run / "report.md").read_text()
    assert "## While it was trained" in text
    assert f"| {found[0]['step']} | {found[0]['acceptance_length']:.2f} |" in text
    caplog.clear()
    assert call(train, run_file)["report"] == str(run / "report.json")  # without evaluations it is the same experiment
    assert "finished before" in caplog.text


def test_a_run_killed_while_evaluating_does_not_train_again(run_file: Path, tmp_path: Path, caplog) -> None:
    run = tmp_path / "runs" / "tiny"
    call(train, run_file)
    stages = json.loads((run / "training.json").read_text())["stages"]
    for name in ("report.json", "report.md"):
        (run / name).unlink()
    caplog.clear()
    call(train, run_file)
    assert "training skipped" in caplog.text
    assert json.loads((run / "report.json").read_text())["stages"] == stages
