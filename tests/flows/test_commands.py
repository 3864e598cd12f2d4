"""The command lines of README.md as they stand there, for a tiny run, and its Python code."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests import fakes
from tests.decoding.test_served import server
from tests.flows.conftest import PATIENCE_S, ROOT, clean_environment, process, wait_for
from tests.readme import commands

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent


def run_line(line: str, environment: dict[str, str]) -> str:
    """What a shell line prints. Raises AssertionError where it does not end with exit code 0."""
    done = subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{line}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert "Traceback" not in done.stdout + done.stderr, line
    return done.stdout


@pytest.fixture(scope="module")
def environment(prefect_server: dict[str, str], s3_server: dict[str, str]) -> dict[str, str]:
    """`python` is this one, and Prefect and S3 are there."""
    return prefect_server | s3_server | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, target_dir: Path, environment: dict[str, str]) -> dict[str, str]:
    """What each flow command of the README printed for one tiny run, in the README's order."""
    place = tmp_path_factory.mktemp("commands")
    file = fakes.save_config(fakes.make_config(place, target_dir, regeneration={"max_tokens": 6}), place / "my.yaml")
    run, printed = place / "runs" / "tiny", {}
    places = {"my.yaml": str(file), "runs/<name>": str(run), " DIR": f" {run / 'export'}", "s3://bucket": "s3://dflash"}
    with server("vllm") as endpoint:
        places["http://host:8000/v1"] = endpoint
        for command in commands():
            if " -m flows." in command:
                line = command
                for shown, here in places.items():
                    line = line.replace(shown, here)
                printed[command] = run_line(line, environment)
    return printed | {"run": str(run)}


def test_the_commands_of_the_readme_in_their_order(finished: dict[str, str]) -> None:
    said = {
        "train --help": "--training.learning_rate",
        "train --config my.yaml --print-config": "config_fingerprint: ",
        "regenerate --config my.yaml": "regenerated: 24 of 24 conversations",
        "prepare --config my.yaml --preview 5": "Supervised tokens, which the drafter learns to predict",
        "prepare --config my.yaml": "prepared: 24 rows",
        "prepare --verify runs/<name>/shards": "(sizes, checksums and rows)",
        "plan --config my.yaml --devices 4xrtx-pro-6000": "FLOPs a data token",
        "train --config my.yaml": "acceptance length, this drafter",
        "evaluate --config my.yaml": "acceptance length, this drafter",
        "evaluate --check-export DIR": "every engine would serve what was trained",
        "promote --config my.yaml": "version 1",
        "evaluate --config my.yaml --endpoint http://host:8000/v1": "served.md",
        "full_run --config my.yaml": "preparation skipped",
    }
    for command, words in said.items():
        assert words in finished[f"python -m flows.{command}"], command
    run = Path(finished["run"])
    assert "promotion skipped: decided before" in finished["python -m flows.full_run --config my.yaml"]
    assert json.loads((run / "promotion.json").read_text())["version"] == "1"
    assert len(finished) == len(said) + 2, "a command of the README that nothing is asserted of"


def test_mlflows_page_shows_the_runs(finished: dict[str, str], tmp_path: Path) -> None:
    (command,) = (command for command in commands() if " ui " in command)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place, log = Path(finished["run"]).parent, tmp_path / "log"
    line = command.replace(".venv/bin", str(BIN)).replace("sqlite:///runs", f"sqlite:///{place}")
    with process([*line.split(), "--port", str(port)], clean_environment(tmp_path / "home"), log) as child:

        def found() -> bool:
            body = b'{"experiment_ids": ["1"]}'
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"}
            )
            with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
                return [run["info"]["run_name"] for run in json.load(answer)["runs"]] == ["tiny"]
            return False

        wait_for("the run", found, child, log)


def test_the_python_code_of_the_readme_generates_with_a_drafter(finished: dict[str, str], target_dir: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = code.replace("configs/quickstart/target", str(target_dir)).replace("runs/quickstart", finished["run"])
    code += "alone = target.generate(**inputs, do_sample=False, max_new_tokens=120)\n"
    code += "assert ids.shape[1] > inputs['input_ids'].shape[1] and torch.equal(ids, alone)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
