"""Several flows at once on Prefect's default SQLite file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fakes
from tests.flows.conftest import ROOT, clean_environment

RUNS, PARTS = 4, 50


@pytest.mark.slow
@pytest.mark.parametrize("server", ["one server", "temporary servers"])
def test_four_runs_of_fifty_tasks_share_one_sqlite_file(
    server: str, run_file: Path, tmp_path: Path, prefect_server: dict[str, str]
) -> None:
    """Each tokenizes fifty parts, a task each, whose lines go to the run's log; a locked database fails none."""
    fakes.write_jsonl(tmp_path / "conversations.jsonl", fakes.chats(PARTS))
    environment = prefect_server if server == "one server" else clean_environment(tmp_path / "prefect")
    command = [sys.executable, "-m", "flows.prepare", "--config", str(run_file), "--data.part_rows", "1", "--name"]
    children = [
        subprocess.Popen([*command, f"run-{i}"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(RUNS)
    ]  # fmt: skip
    said = [child.communicate(timeout=600)[0] for child in children]
    assert [child.returncode for child in children] == [0] * RUNS, said
    assert not [text for text in said if "locked" in text or "Traceback" in text], said
    for i in range(RUNS):
        manifest = json.loads((tmp_path / "runs" / f"run-{i}" / "shards" / "manifest.json").read_text())
        assert manifest["rows"] == PARTS
