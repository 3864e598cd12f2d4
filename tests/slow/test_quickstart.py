"""`make quickstart` as a user runs it, and what must be true of the numbers it prints."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a whole quickstart."""
    runs = tmp_path_factory.mktemp("runs")
    command = ["make", f"BIN={Path(sys.executable).parent}", "-o", ".venv/.installed", "quickstart"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DFLASH_RUNS": str(runs)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=environment, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return runs / "quickstart"


def test_the_drafter_beats_both_references(run: Path) -> None:
    """Acceptance length at least 4.5 of 8, above the n-gram's + 1 and 1.5 times that without the target's features."""
    report = json.loads((run / "report.json").read_text())
    assert report["prompts"] >= 200
    assert report["acceptance_length"] >= 4.5
    assert report["acceptance_length"] > report["acceptance_length_ngram"] + 1
    assert report["acceptance_length"] > 1.5 * report["acceptance_length_zero_features"]
    assert all(divergence["tie"] for divergence in report["divergences"])


def test_stages_overlap_and_both_replicas_work_at_once(run: Path) -> None:
    """In timeline.json: read, tap and train of three different batches at the same moment, and two taps at once."""
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    spans = {
        stage: [
            (event["ts"], event["ts"] + event["dur"], event["tid"], event["args"]["number"])
            for event in events
            if event["cat"] == stage
        ]
        for stage in ("read", "tap", "train")
    }
    assert {tid for _, _, tid, _ in spans["tap"]} == {"tap-0", "tap-1"}

    def together(first: list, second: list) -> bool:
        return any(a < d and c < b and p != q for a, b, _, p in first for c, d, _, q in second)

    assert together(spans["train"], spans["tap"])
    assert together(spans["train"], spans["read"])
    by_replica = [[span for span in spans["tap"] if span[2] == f"tap-{i}"] for i in (0, 1)]
    assert together(*by_replica)


def test_every_micro_batch_is_trained_once_and_in_order(run: Path) -> None:
    """Positions in metrics.jsonl rise by the micro-batches of each step; the ledgers add up."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["position"] == rows[0]["micro_batches"]
    assert all(b["position"] - a["position"] == b["micro_batches"] and b["step"] == a["step"] + 1 for a, b in pairwise(rows))
    ledger = json.loads((run / "report.json").read_text())["ledger"]
    batches, conversations = ledger["micro_batches"], ledger["conversations"]
    assert batches["issued"] == batches["applied"] + sum(batches["skipped"].values()) + batches["returned"]
    assert conversations["rows_in"] == conversations["kept"] + sum(conversations["dropped"].values())


def test_a_second_run_prints_the_report_again(run: Path) -> None:
    """Nothing is trained twice."""
    before = (run / "report.json").stat().st_mtime_ns
    command = [sys.executable, "-m", "flows.train", "--config", "configs/quickstart.yaml", "--places.runs", str(run.parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert "acceptance length, this drafter" in done.stdout
    assert (run / "report.json").stat().st_mtime_ns == before
