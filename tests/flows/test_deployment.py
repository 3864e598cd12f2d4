"""infra/prefect.yaml on a real server with a process worker: runs complete, and a cancelled training is saved."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import fakes
from tests.flows.conftest import PATIENCE_S, ROOT, process

PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


def prefect(environment: dict[str, str], *arguments: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([*PREFECT, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def deploy(environment: dict[str, str], kind: str = "process") -> None:
    """`make deploy`, with this environment's prefect."""
    command = ["make", "deploy", f"KIND={kind}", f"BIN={Path(sys.executable).parent}", "-o", ".venv/.installed"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


def ask(environment: dict[str, str], path: str, body: dict[str, object] | None = None) -> Any:
    """An answer of Prefect's API: POST where a body is given, else GET."""
    answer = httpx.request("GET" if body is None else "POST", f"{environment['PREFECT_API_URL']}/{path}", json=body, timeout=60)
    answer.raise_for_status()
    return answer.json()


@pytest.fixture(scope="module")
def worker(prefect_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The deployments of infra/prefect.yaml and a worker for them; yields the environment of both."""
    place = tmp_path_factory.mktemp("worker")
    environment = {
        **prefect_server,
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "DFLASH_RUNS": str(place / "runs"),
        "DFLASH_MLFLOW_URI": "none",
    }
    prefect(environment, "work-pool", "create", "dflash", "--type", "process")
    prefect(environment, "deploy", "--all", "--prefect-file", "infra/prefect.yaml")
    command = [*PREFECT, "worker", "start", "--pool", "dflash", "--name", "test"]
    with process(command, environment, place / "worker.log", cwd=Path("/")):  # what it runs is where it was deployed from
        yield environment


def test_train_deployment_runs_to_completed(worker: dict[str, str], run_file: Path, tmp_path: Path) -> None:
    overrides = json.dumps({"name": "deployed", "training.epochs": 2})
    out = prefect(
        worker, "deployment", "run", "train/train", "-p", f"config={run_file}", "-p", f"overrides={overrides}", "--watch",
        cwd=tmp_path,
    )  # fmt: skip
    assert "Completed" in out
    newest = {"sort": "START_TIME_DESC", "limit": 1, "deployments": {"name": {"any_": ["train"]}}}
    (flow_run,) = ask(worker, "flow_runs/filter", newest)
    tasks = ask(worker, "task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
    stages = ["evaluate_export", "export_drafter", "report", "select", "shard", "tokenize", "train_drafter"]
    assert sorted(task["name"].partition("-")[0] for task in tasks) == stages, "tasks are whole stages, whatever the steps"
    lines = ask(worker, "logs/filter", {"limit": 200, "logs": {"flow_run_id": {"any_": [flow_run["id"]]}}})
    logged = "\n".join(line["message"] for line in lines)
    for text in ("cache key", "MissingContextError", "Traceback"):
        assert text not in logged
    assert "prepared: 24 rows" in logged
    found = {row["key"]: row for row in ask(worker, "artifacts/latest/filter", {})}
    others = {"data"}  # the preparing flow's: another test may have run it against this server
    assert set(found) - others == {"training", "training-curve", "report", "acceptance", "prompt-sets", "drafts"}
    assert found["training"]["type"] == "progress"
    assert found["training"]["data"] == 100
    assert "# Drafter `deployed`" in found["report"]["data"]
    assert "acceptance length, this drafter" in found["acceptance"]["data"]
    run = Path(worker["DFLASH_RUNS"]) / "deployed"
    report = json.loads((run / "report.json").read_text())
    assert report["acceptance_length"] >= 1
    assert (run / "export" / "model.safetensors").is_file()


def test_deployments_are_described_tagged_typed_and_limited(worker: dict[str, str]) -> None:
    found = {row["name"]: row for row in ask(worker, "deployments/filter", {})}
    assert set(found) >= {"prepare", "regenerate", "train", "evaluate"}
    for name, row in found.items():
        assert row["description"], name
        assert "dflash" in row["tags"], name
        assert row["enforce_parameter_schema"], name
        form = row["parameter_openapi_schema"]
        epochs = {"minimum": 1, "maximum": 2**53, "title": "epochs", "type": "integer"}
        assert form["definitions"]["Training"]["properties"]["epochs"] == epochs
        assert form["properties"]["config"]["description"].startswith("The run, a YAML file"), name
    assert found["train"]["work_queue_name"] == "gpu"
    assert found["prepare"]["global_concurrency_limit"]["limit"] == 1
    assert found["prepare"]["concurrency_options"]["collision_strategy"] == "ENQUEUE"


def test_the_server_refuses_a_form_that_cannot_be(worker: dict[str, str]) -> None:
    overrides = json.dumps({"training": {"epochs": 0}})
    with pytest.raises(AssertionError, match=r"(?s)epochs.*(minimum|greater)"):
        prefect(worker, "deployment", "run", "train/train", "-p", f"overrides={overrides}")


@pytest.mark.slow
def test_make_deploy_brings_pool_queues_and_automations_and_may_be_repeated(worker: dict[str, str]) -> None:
    deploy(worker)
    limits = {row["name"]: row["concurrency_limit"] for row in ask(worker, "work_pools/dflash/queues/filter", {})}
    assert limits == {"default": None, "gpu": 1}
    before = [sorted(row["name"] for row in ask(worker, f"{what}/filter", {})) for what in ("automations", "deployments")]
    deploy(worker)
    assert [sorted(row["name"] for row in ask(worker, f"{what}/filter", {})) for what in ("automations", "deployments")] == before
    assert before[0] == ["dflash runs without heartbeat are crashed", "evaluate an exported drafter"]


@pytest.mark.slow
def test_the_schedule_is_switched_on_and_the_queues_are_listed(worker: dict[str, str]) -> None:
    deploy(worker)
    assert "gpu" in prefect(worker, "work-queue", "ls", "--pool", "dflash")

    def schedule() -> dict[str, Any]:
        (found,) = ask(worker, "deployments/name/full-run/full-run")["schedules"]
        return found

    assert not schedule()["active"]
    assert schedule()["parameters"] == {"retrain": True}
    for verb, active in (("resume", True), ("pause", False)):
        prefect(worker, "deployment", "schedule", verb, "full-run/full-run", schedule()["id"])
        assert schedule()["active"] is active  # and Prefect's server has emptied its parameters: a scheduled run retrains without


@pytest.mark.slow
def test_an_export_that_was_not_measured_starts_its_evaluation(worker: dict[str, str], run_file: Path) -> None:
    overrides = json.dumps({"name": "unmeasured", "training": {"epochs": 1}})
    prefect(
        worker, "deployment", "run", "train/train", "-p", f"config={run_file}", "-p", f"overrides={overrides}", "-p", "measure=false",
        "--watch",
    )  # fmt: skip
    run = Path(worker["DFLASH_RUNS"]) / "unmeasured"
    assert (run / "export").is_dir()
    wait_until(lambda: (run / "report.json").is_file())


@pytest.mark.slow
def test_unknown_override_fails_with_its_reason(worker: dict[str, str], run_file: Path) -> None:
    run_id = start(worker, run_file, {"training.epoch": 2})
    state = final_state(worker, run_id)
    assert state["type"] == "FAILED"
    assert "training.epoch: unknown key" in state["message"]


@pytest.mark.slow
def test_cancelled_training_is_saved_and_reads_cancelled(worker: dict[str, str], run_file: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(run_file.read_text())
    values["training"] |= {"epochs": 100_000, "checkpoint_every": 100_000}
    endless = tmp_path / "endless.yaml"
    endless.write_text(yaml.safe_dump(values))
    run_id = start(worker, endless, {"name": "cancelled"})
    run = Path(worker["DFLASH_RUNS"]) / "cancelled"
    wait_until(lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0)
    prefect(worker, "flow-run", "cancel", run_id)
    state = final_state(worker, run_id)
    assert state["type"] == "CANCELLED"
    assert len(list((run / "checkpoints").iterdir())) == 1
    assert not (run / "export").exists()


def start(environment: dict[str, str], config: Path, overrides: dict[str, object]) -> str:
    parameters = fakes.write_jsonl(config.with_name("parameters.json"), [{"config": str(config), "overrides": overrides}])
    out = subprocess.run(
        [*PREFECT, "deployment", "run", "train/train", "--params", "-"],
        cwd=ROOT, env=environment, stdin=parameters.open(), capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    ).stdout  # fmt: skip
    return run_id_in(out)


def run_id_in(printed: str) -> str:
    """The id of the run that `prefect deployment run` says it made."""
    return next(line.split()[-1] for line in printed.splitlines() if "UUID" in line)


def final_state(environment: dict[str, str], run_id: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def is_final() -> bool:
        found.update(json.loads(prefect(environment, "flow-run", "inspect", run_id, "--output", "json"))["state"])
        return found["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    wait_until(is_final)
    return found


def wait_until(found) -> None:
    end = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.5)
