"""The package installed from its wheel, deployed in a user's own directory, with a worker that was started in `/`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import fakes
from tests.flows.conftest import ROOT, process
from tests.flows.test_deployment import PREFECT, ask, final_state, prefect, run_id_in, wait_until

pytestmark = pytest.mark.slow


def install_wheel(place: Path) -> Path:
    """Builds the wheel from a copy of the sources, and installs it into a directory of its own."""
    source, wheels, site = place / "source", place / "wheels", place / "site"
    for name in ("dflash_core", "flows"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source)], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(source)
    return site


@pytest.fixture(scope="module")
def elsewhere(
    prefect_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory, target_dir: Path
) -> Iterator[tuple[dict[str, str], Path]]:
    """The environment of the installed wheel and the directory that everything was deployed from: it has the run as tiny.yaml, with
    relative paths, and full-run scheduled for every minute, switched off."""
    place = tmp_path_factory.mktemp("elsewhere")
    work = place / "work"
    work.mkdir()
    values = fakes.make_config(work, target_dir).model_dump(mode="json")
    values["data"]["conversations"], values["evaluation"]["prompts"] = ["conversations.jsonl"], "prompts.jsonl"
    values["places"]["runs"] = "runs"
    (work / "tiny.yaml").write_text(yaml.safe_dump(values))
    deployments = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text())
    for each in deployments["deployments"]:
        each["parameters"] = {"config": "tiny.yaml"}
        for schedule in each.get("schedules", []):
            schedule["cron"] = "* * * * *"
    (work / "prefect.yaml").write_text(yaml.safe_dump(deployments))
    environment = {
        **prefect_server,
        "PYTHONPATH": str(install_wheel(place)),
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "DFLASH_MLFLOW_URI": f"sqlite:///{place}/mlflow.db",
    }
    prefect(environment, "work-pool", "create", "dflash", "--type", "process", "--overwrite", cwd=work)
    prefect(environment, "deploy", "--all", cwd=work)
    command = [*PREFECT, "worker", "start", "--pool", "dflash", "--name", "elsewhere"]
    with process(command, environment, place / "worker.log", cwd=Path("/")):
        yield environment, work


def test_all_deployments_load_and_run_where_they_were_deployed(elsewhere: tuple[dict[str, str], Path]) -> None:
    environment, work = elsewhere
    found = subprocess.run(
        [sys.executable, "-c", "import flows; print(flows.__file__)"], cwd="/", env=environment, capture_output=True, text=True
    ).stdout.strip()
    assert Path(found).is_relative_to(environment["PYTHONPATH"]), "the wheel's modules are what runs"
    names = {row["name"] for row in ask(environment, "deployments/filter", {})}
    assert names >= {"regenerate", "prepare", "train", "evaluate", "promote", "full-run"}
    assert "Completed" in prefect(environment, "deployment", "run", "prepare/prepare", "--watch", cwd=Path("/"))
    assert (work / "runs" / "tiny" / "shards" / "manifest.json").is_file()


def test_a_config_that_is_not_there_is_refused_with_the_directory(elsewhere: tuple[dict[str, str], Path]) -> None:
    environment, work = elsewhere
    out = prefect(environment, "deployment", "run", "prepare/prepare", "-p", "config=configs/none.yaml", cwd=Path("/"))
    state = final_state(environment, run_id_in(out))
    assert state["type"] == "FAILED"
    assert f"--config 'configs/none.yaml': No such file or directory in {work}" in state["message"]


def test_the_schedule_begins_a_new_run_for_new_data(elsewhere: tuple[dict[str, str], Path]) -> None:
    environment, work = elsewhere
    assert "Completed" in prefect(environment, "deployment", "run", "full-run/full-run", "--watch", cwd=Path("/"))
    assert (work / "runs" / "tiny" / "promotion.json").is_file()
    fakes.write_jsonl(work / "conversations.jsonl", fakes.chats(25))
    (schedule,) = ask(environment, "deployments/name/full-run/full-run")["schedules"]
    prefect(environment, "deployment", "schedule", "resume", "full-run/full-run", schedule["id"], cwd=work)
    second = work / "runs" / "tiny-2"
    wait_until(second.is_dir)
    prefect(environment, "deployment", "schedule", "pause", "full-run/full-run", schedule["id"], cwd=work)
    wait_until((second / "promotion.json").is_file)
    assert json.loads((second / "shards" / "manifest.json").read_text())["rows"] == 25
