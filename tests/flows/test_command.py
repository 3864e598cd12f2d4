"""`python -m flows.NAME`: bad input is one line and exit code 2, a stop is exit code 3 and the same command goes on."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml
from mlflow import MlflowClient

from dflash_core import preparation
from dflash_core.decoding.export import write_export
from dflash_core.rundir import open_run
from flows import command
from flows.evaluate import check
from flows.prepare import verify
from flows.settings import load_config
from tests import fakes
from tests.flows.conftest import ROOT, clean_environment, process, wait_for

TRACEBACK = "Traceback (most recent call last)"


def run_command(environment: dict[str, str], module: str, *options: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"flows.{module}", *options]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def run_script(text: str, run_file: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A command of its own around the real `run_flow`; it starts no server."""
    script = tmp_path / "script.py"
    script.write_text(text)
    environment = clean_environment(tmp_path / "prefect") | {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, str(script), "--config", str(run_file)]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "section, changes, expected",
    [
        ("data", {"conversations": "nowhere.jsonl"}, "nowhere.jsonl"),
        ("drafter", {"target_layer_ids": [0, 3]}, "drafter.target_layer_ids [0, 3]"),
    ],
)
def test_bad_input_is_seen_before_anything_starts(
    section: str, changes: dict[str, object], expected: str, run_file: Path, tmp_path: Path
) -> None:
    values = yaml.safe_load(run_file.read_text())
    values[section] |= changes
    run_file.write_text(yaml.safe_dump(values))
    done = run_command(clean_environment(tmp_path / "prefect"), "train", "--config", str(run_file))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()
    assert not list((tmp_path / "prefect").glob("*.db")), "no server was started"


def test_a_mapping_that_is_none_is_one_line_too(run_file: Path, tmp_path: Path) -> None:
    done = run_command(clean_environment(tmp_path / "prefect"), "train", "--config", str(run_file), "--training.loss", "ce")
    assert done.returncode == 2
    assert "training.loss" in done.stderr
    assert "KEY=VALUE" in done.stderr
    assert done.stderr.count("\n") == 1


def test_bad_input_seen_by_a_task_is_one_line_too(run_file: Path, tmp_path: Path, prefect_server: dict[str, str]) -> None:
    bad = fakes.write_jsonl(tmp_path / "bad.jsonl", [{"messages": [{"role": "heron", "content": "Hi"}]}])
    done = run_command(prefect_server, "prepare", "--config", str(run_file), "--data.conversations", str(bad))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {bad}, line 1: unknown role 'heron'")
    assert done.stderr.count("\n") == 1


def test_sigterm_saves_and_the_same_command_goes_on(run_file: Path, tmp_path: Path, prefect_server: dict[str, str]) -> None:
    """First with Prefect's temporary server, as a user without one has it."""
    values = yaml.safe_load(run_file.read_text())
    values["training"] |= {"epochs": 2000, "max_steps": 150, "checkpoint_every": 1000}
    run_file.write_text(yaml.safe_dump(values))
    environment = clean_environment(tmp_path / "prefect")
    command = [sys.executable, "-m", "flows.train", "--config", str(run_file)]
    log, run = tmp_path / "log", tmp_path / "runs" / "tiny"

    def steps() -> int:
        return (run / "metrics.jsonl").read_bytes().count(b"\n") if (run / "metrics.jsonl").is_file() else 0

    with process(command, environment, log) as child:
        wait_for("step 5", lambda: steps() >= 5, child, log)
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(60) == 3, log.read_text()
    text = log.read_text()
    assert TRACEBACK not in text
    (checkpoint,) = (run / "checkpoints").iterdir()
    stopped_at = json.loads((checkpoint / "state.json").read_text())["step"]
    assert stopped_at == steps() < 150
    assert f"stopped at step {stopped_at} of 150, resumable from {checkpoint}" in text
    assert "python -m flows.train --config" in text.splitlines()[-1]
    assert not (run / "export").exists()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    identity = (run / "mlflow_run.txt").read_text().strip()
    assert client.get_run(identity).info.status == "KILLED"

    finished = run_command(prefect_server, "train", "--config", str(run_file))
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "preparation skipped" in finished.stdout
    assert "acceptance length, this drafter" in finished.stdout
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/runs/mlflow.db" in finished.stdout
    assert client.get_run(identity).info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(identity, "train/loss")] == list(range(1, 151))
    report = json.loads((run / "report.json").read_text())
    assert client.get_run(identity).data.metrics["acceptance_length"] == report["acceptance_length"]


COLLECTING = """
import gc, weakref
from flows.command import read_command_line, run_flow, run_plain

class Cycle:
    def __init__(self):
        self.itself = self

command = read_command_line("train", "")
print("importing", gc.isenabled())

def work(*_, **__):
    made = weakref.ref(Cycle())
    gc.collect()
    print("working", gc.isenabled(), made() is None, gc.get_freeze_count() > 1000)

async def flow(**_):
    work()

run_plain(work, command) if RUNNER == "run_plain" else run_flow(flow, command, check=lambda config: None)
"""


@pytest.mark.parametrize("runner", ["run_plain", "run_flow"])
def test_garbage_is_collected_while_a_command_works_though_not_while_it_imports(
    runner: str, run_file: Path, tmp_path: Path
) -> None:
    """What was imported is left out: its last search alone, at the end of the process, took seconds."""
    done = run_script(COLLECTING.replace("RUNNER", repr(runner)), run_file, tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "importing False"
    assert last == "working True True True"


INTERRUPTED = """
import os, signal, time
import anyio
from flows.command import read_command_line, run_flow
from flows.running import stop_requests

async def flow(**_):
    async with stop_requests() as stop, anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, time.sleep, 60)
        await anyio.sleep(0.1)
        print("begun", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep(60)

run_flow(flow, read_command_line("train", ""), check=lambda config: None)
"""


def test_a_second_interrupt_leaves_at_once_whatever_a_thread_is_doing(run_file: Path, tmp_path: Path) -> None:
    done = run_script(INTERRUPTED, run_file, tmp_path)
    assert done.returncode == 130, done.stderr
    assert TRACEBACK not in done.stderr
    assert time.time() - float(done.stdout.split()[1]) < 5


SWALLOWING = """
import os, signal
from flows.command import read_command_line, run_flow

def check(config):
    try:  # as imports of optional packages do
        os.kill(os.getpid(), signal.SIGTERM)
    except:
        pass

async def flow(**_):
    print("the flow began", flush=True)

run_flow(flow, read_command_line("train", ""), check=check)
"""


def test_a_stop_request_before_the_flow_is_not_swallowed_by_what_is_imported(run_file: Path, tmp_path: Path) -> None:
    done = run_script(SWALLOWING, run_file, tmp_path)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout == ""


SERVING = """
import os, sys, time
from flows.local_server import LocalServer

server = LocalServer()
server.wait()
with open(sys.argv[1], "w") as file:
    print(server._child.pid, server.api, file=file)
time.sleep(100)
"""


def test_the_temporary_server_needs_no_output_and_dies_with_a_killed_command(tmp_path: Path) -> None:
    script, found, log = tmp_path / "script.py", tmp_path / "found", tmp_path / "log"
    script.write_text(SERVING)
    environment = clean_environment(tmp_path / "prefect") | {"PYTHONPATH": str(ROOT)}
    with process(["sh", "-c", f"exec {sys.executable} {script} {found} >&-"], environment, log) as child:
        wait_for("the server", lambda: found.is_file() and found.read_text().endswith("\n"), child, log)
        server, api = found.read_text().split()
        assert httpx.get(f"{api}/health").status_code == 200
        child.kill()
        child.wait(10)
        end = time.monotonic() + 10
        while Path(f"/proc/{server}").exists() and time.monotonic() < end:
            time.sleep(0.1)
    assert not Path(f"/proc/{server}").exists(), log.read_text()


@pytest.mark.parametrize(
    "place, number",
    [("file", errno.EEXIST), ("file", errno.ENOTDIR), ("", errno.EACCES), ("file/runs/mlflow.db.lock", errno.EROFS)],
)
def test_a_place_of_runs_that_cannot_be_used_is_one_line(place: str, number: int, tmp_path: Path) -> None:
    config = fakes.make_config(tmp_path, tmp_path / "target", places={"runs": str(tmp_path / "file" / "runs")})
    words = command._bad_input(OSError(number, os.strerror(number), str(tmp_path / place)), config)
    assert words.startswith(f"places.runs '{tmp_path}/file/runs': {os.strerror(number)}: {tmp_path / place}")
    for other in ("elsewhere", "file/runs/tiny/metrics.jsonl"):
        with pytest.raises(OSError, match=other):
            command._bad_input(OSError(number, os.strerror(number), str(tmp_path / other)), config)


def test_a_run_that_vanishes_is_not_taken_for_a_bad_place_of_runs(tmp_path: Path) -> None:
    config = fakes.make_config(tmp_path, tmp_path / "target", places={"runs": str(tmp_path / "runs")})
    with pytest.raises(FileNotFoundError):
        command._bad_input(FileNotFoundError(errno.ENOENT, "gone", str(tmp_path / "runs" / "tiny")), config)


def test_a_server_that_cannot_be_reached_is_one_line(run_file: Path, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path / "prefect") | {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = run_command(environment, "train", "--config", str(run_file))
    assert done.returncode == 2
    assert TRACEBACK not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: Failed to reach API at http://127.0.0.1:9/api")
    assert "unset PREFECT_API_URL" in done.stderr


def test_a_full_disk_is_one_line_and_any_other_error_of_the_system_stays_itself(tmp_path: Path) -> None:
    config = fakes.make_config(tmp_path, tmp_path / "target", places={"runs": str(tmp_path / "not" / "made")})
    words = command._bad_input(OSError(errno.ENOSPC, "No space left on device"), config)
    assert str(tmp_path / "not" / "made") in words
    assert "\n" not in words
    with pytest.raises(PermissionError):
        command._bad_input(PermissionError(errno.EACCES, "Permission denied"), config)


def test_verification_says_whether_there_was_a_manifest_to_compare_with(run_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(str(run_file))
    run = open_run(config)
    preparation.prepare(config, run)
    verify(config, directory=str(run.shards))
    assert "(sizes, checksums and rows)" in caplog.text
    (run.shards / "manifest.json").unlink()
    verify(config, directory=str(run.shards))
    assert "(rows alone, no manifest.json to compare with)" in caplog.text


def test_a_drafter_that_not_every_engine_serves_is_exit_code_1(
    run_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export = write_export(tmp_path / "export", fakes.make_drafter().state_dict(), fakes.make_shape(), target="some/target")
    check(load_config(str(run_file)), directory=str(export))
    assert '"num_speculative_tokens": 3}' in caplog.text
    assert "--speculative-num-draft-tokens 4" in caplog.text
    assert f"{export}: every engine would serve what was trained" in caplog.text
    values = json.loads((export / "config.json").read_text())
    values.pop("rope_theta")
    (export / "config.json").write_text(json.dumps(values))
    done = run_command(clean_environment(tmp_path / "prefect"), "evaluate", "--check-export", str(export))
    assert done.returncode == 1
    assert "MLX and older loaders: differs: rope_theta only inside rope_parameters" in done.stdout
    assert "1 finding above; not every engine would serve what was trained" in done.stdout
    assert done.stderr == ""
