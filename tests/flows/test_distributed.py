"""Parts tokenized by two local workers of a Dask cluster, through the flow: the same shards as here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fakes
from tests.flows.conftest import PATIENCE_S, ROOT


@pytest.mark.slow
def test_a_dask_cluster_makes_the_same_shards(tmp_path: Path, target_dir: Path, prefect_server: dict[str, str]) -> None:
    pytest.importorskip("prefect_dask", reason="the extra `distributed` is not installed")
    manifests = []
    for name, runner in (("here", "threads"), ("there", "dask")):
        data = {"part_rows": 5, "processes": 2, "task_runner": runner}
        config = fakes.save_config(fakes.make_config(tmp_path, target_dir, name=name, data=data), tmp_path / f"{name}.yaml")
        command = [sys.executable, "-m", "flows.prepare", "--config", str(config)]
        done = subprocess.run(
            command, cwd=ROOT, env=prefect_server, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        manifests.append(json.loads((tmp_path / "runs" / name / "shards" / "manifest.json").read_text()))
    assert manifests[0]["rows"] == 24
    assert manifests[0] == manifests[1]
