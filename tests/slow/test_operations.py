"""Real Prefect, MLflow and S3 servers and a process worker: the scheduled chain, and what happens when things are cancelled and killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from mlflow import MlflowClient

from dflash_core.rundir import open_run
from dflash_core.training.metrics import MetricsFile
from flows import mlflow_tracker
from flows.mlflow_tracker import BEHIND, MlflowTracker
from tests import fakes
from tests.data.faulty_proxy import faulty_proxy
from tests.slow.stack import Stack, descendants, has_ended, kill, running_stack, wait_until

pytestmark = pytest.mark.slow
ENDLESS = {"epochs": 100_000, "checkpoint_every": 50}
STEPS, STEP_S = 400, 0.025


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left_behind(stack: Stack) -> Iterator[None]:
    """Runs of a test that failed would keep the queue of those after it."""
    yield
    unfinished = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "SCHEDULED"]}}}}
    for found in stack.ask("flow_runs/filter", unfinished):
        stack.ask(f"flow_runs/{found['id']}/set_state", {"state": {"type": "CANCELLING"}})
        stack.final(found["id"])


@pytest.fixture
def overrides(tmp_path: Path) -> dict[str, Any]:
    """A name of its own for the run of a test."""
    return {"name": f"run-{uuid4().hex[:8]}", "places": {"runs": str(tmp_path / "runs")}}


@pytest.fixture
def run(tmp_path: Path, overrides: dict[str, Any]) -> Path:
    return tmp_path / "runs" / overrides["name"]


@pytest.fixture
def config(tmp_path: Path, target_dir: Path) -> str:
    return str(fakes.save_config(fakes.make_config(tmp_path, target_dir), tmp_path / "tiny.yaml"))


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def has_checkpoint(run: Path) -> bool:
    return (run / "checkpoints").is_dir() and any(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())


def start_training(stack: Stack, config: str, overrides: dict[str, Any], run: Path, deployment: str = "train/train") -> str:
    """An endless training that has saved once, and goes on."""
    before = len(steps(run))
    run_id = stack.start(deployment, config=config, overrides=overrides | {"training": ENDLESS})
    wait_until(lambda: has_checkpoint(run) and len(steps(run)) > before)
    return run_id


def log_lines(stack: Stack, run_ids: list[str]) -> str:
    return "\n".join(line["message"] for line in stack.ask("logs/filter", {"logs": {"flow_run_id": {"any_": run_ids}}}))


def test_full_run_from_conversations_to_a_registered_drafter_and_again(
    stack: Stack, config: str, overrides: dict[str, Any], run: Path
) -> None:
    overrides |= {"promotion": {"model": overrides["name"]}}
    out = stack.prefect(
        "deployment", "run", "full-run/full-run", "-p", f"config={config}", "-p", f"overrides={json.dumps(overrides)}", "--watch"
    )
    assert "Completed" in out
    (chain,) = stack.ask("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 1, "flows": {"name": {"any_": ["full-run"]}}})
    assert {child["state"]["name"] for child in stack.children(chain["id"])} == {"Completed"}
    assert len(stack.children(chain["id"])) == 3, "prepare, train, promote"
    shown = {row["key"]: row["data"] for row in stack.ask("artifacts/latest/filter", {})}
    assert set(shown) >= {"training", "report", "acceptance", "data", "mlflow", "promotion"}
    assert f"# Drafter `{overrides['name']}`" in shown["report"]

    client = MlflowClient(tracking_uri=stack.environment["DFLASH_MLFLOW_URI"])
    tracked = client.get_run((run / "mlflow_run.txt").read_text().strip())
    assert tracked.info.status == "FINISHED"
    report = json.loads((run / "report.json").read_text())
    assert tracked.data.metrics["acceptance_length"] == pytest.approx(report["acceptance_length"])
    assert tracked.data.metrics["step"] == report["training"]["step"]
    assert chain["id"][:8] in log_lines(stack, [chain["id"]]) or tracked.data.tags["prefect_flow_run"].startswith("http")
    (version,) = client.search_model_versions(f"name = '{overrides['name']}'")
    assert version.run_id == tracked.info.run_id
    aliases = {"promoted": ["champion"], "refused": []}  # whether so small a target gains is not the question here
    assert client.get_model_version(version.name, version.version).aliases == aliases[version.tags["decision"]]
    objects = _objects(stack, "mlflow")
    for name in ("model.safetensors", "config.json", "report.json", "data.png"):
        assert [key for key in objects if key.endswith(name)], name

    trained = (run / "metrics.jsonl").stat().st_mtime_ns
    again = stack.start("full-run/full-run", config=config, overrides=overrides)
    assert stack.final(again)["type"] == "COMPLETED"
    logged = log_lines(stack, [child["id"] for child in stack.children(again)])
    assert "preparation skipped" in logged
    assert "finished before" in logged
    assert (run / "metrics.jsonl").stat().st_mtime_ns == trained


def _objects(stack: Stack, bucket: str) -> list[str]:
    import s3fs

    client = s3fs.S3FileSystem(
        key=stack.environment["AWS_ACCESS_KEY_ID"], secret=stack.environment["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=stack.environment["AWS_ENDPOINT_URL"], skip_instance_cache=True,
    )  # fmt: skip
    return client.find(bucket)


def test_cancelling_the_chain_saves_and_leaves_no_process(
    stack: Stack, config: str, overrides: dict[str, Any], run: Path
) -> None:
    chain = start_training(stack, config, overrides, run, "full-run/full-run")
    processes = descendants(stack.process_of(chain)) + [stack.process_of(chain)]
    stack.ask(f"flow_runs/{chain}/set_state", {"state": {"type": "CANCELLING"}})
    start = time.monotonic()
    gone = wait_until(lambda: all(has_ended(pid) for pid in processes))
    state = stack.final(chain)
    print(f"\ncancelled: processes gone after {gone:.1f} s, final state after {time.monotonic() - start:.1f} s: {state['name']}")
    assert gone < 30
    assert state["type"] == "CANCELLED"
    children = stack.children(chain)
    assert sorted(child["state"]["type"] for child in children) == ["CANCELLED", "COMPLETED"], "train, prepare"
    saved = max(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").iterdir())
    assert saved >= steps(run)[-1], "the last step that was made is saved"
    assert not (run / "export").exists()


@pytest.fixture
def impatient(stack: Stack) -> Iterator[float]:
    """The automation for silent runs waits for three heartbeats and a little, as long as a test can wait; yields the seconds."""
    found = next(row for row in stack.ask("automations/filter", {}) if "heartbeat" in row["name"])
    path = f"{stack.api}/automations/{found['id']}"
    body = {
        key: found[key]
        for key in ("name", "description", "enabled", "trigger", "actions", "actions_on_trigger", "actions_on_resolve")
    }
    httpx.put(path, json=body | {"trigger": found["trigger"] | {"within": 100.0}}, timeout=60).raise_for_status()
    yield 100.0
    httpx.put(path, json=body, timeout=60).raise_for_status()


def test_a_killed_run_ends_its_slot_frees_and_the_next_resumes(
    stack: Stack, config: str, overrides: dict[str, Any], run: Path, impatient: float
) -> None:
    first = start_training(stack, config, overrides, run)
    kill(stack.process_of(first))
    start = time.monotonic()
    assert stack.final(first)["type"] == "CRASHED"
    print(f"\nflow process killed: Crashed after {time.monotonic() - start:.1f} s")

    before = steps(run)[-1]
    second = start_training(stack, config, overrides, run)
    wait_until(lambda: steps(run)[-1] > before + 60)
    made = steps(run)
    assert made == list(range(1, made[-1] + 1)), "resumed: no step is missing, none twice"

    flow, worker = stack.process_of(second), stack.pid("worker")
    kill(worker)
    for pid in [*descendants(flow), flow]:
        kill(pid)
    start = time.monotonic()
    assert stack.state(second)["type"] == "RUNNING"
    state = stack.final(second)
    print(f"worker and flow process killed: {state['name']} after {time.monotonic() - start:.1f} s, window {impatient:.0f} s")
    assert state["type"] == "CRASHED"
    assert "heartbeat" in state["message"].lower()
    stack.local("start", "worker")
    before = steps(run)[-1]
    third = start_training(stack, config, overrides, run)
    assert max(steps(run)) >= before - ENDLESS["checkpoint_every"]
    stack.ask(f"flow_runs/{third}/set_state", {"state": {"type": "CANCELLING"}})
    assert stack.final(third)["type"] == "CANCELLED"


def test_a_drained_worker_ends_when_its_run_has(stack: Stack, config: str, overrides: dict[str, Any], run: Path) -> None:
    run_id = stack.start("train/train", config=config, overrides=overrides | {"training": {"epochs": 200}})
    wait_until(lambda: len(steps(run)) > 0)
    worker = stack.pid("worker")
    start = time.monotonic()
    stack.command("infra/drain", str(worker))
    drained = time.monotonic() - start
    assert stack.state(run_id)["type"] == "COMPLETED", "nothing was cut off"
    print(f"\ndrained: the worker left after {drained:.1f} s, when its run had ended")
    assert has_ended(worker)
    assert not stack.ask("work_pools/dflash")["is_paused"]
    stack.local("start", "worker")
    assert (run / "report.json").is_file()


@pytest.mark.parametrize("seconds", [40, 300])
def test_training_goes_on_while_the_server_is_away_and_its_end_is_told_after(
    seconds: float, stack: Stack, config: str, overrides: dict[str, Any], run: Path
) -> None:
    run_id = start_training(stack, config, overrides, run)
    flow = stack.process_of(run_id)
    stack.local("stop", "prefect")
    away = time.monotonic()
    before = steps(run)[-1]
    time.sleep(seconds / 2)
    assert steps(run)[-1] > before + 50, "it went on"
    os.kill(flow, signal.SIGTERM)  # and ends while nobody can be told
    time.sleep(seconds / 2)
    assert not has_ended(stack.pid("worker")), "the worker waits too"
    stack.local("start", "prefect")
    back = time.monotonic()
    state = stack.final(run_id)
    print(f"\nserver away for {back - away:.0f} s: {state['name']} {time.monotonic() - back:.1f} s after it came back")
    assert state["type"] == "CANCELLED"
    assert state["message"].startswith("stopped at step ")
    assert has_checkpoint(run)


def seconds_writing(path: Path) -> float:
    """Of STEPS steps of STEP_S, the seconds in which they write their numbers."""
    file, waited = MetricsFile(path, 0), 0.0
    for step in range(1, STEPS + 1):
        time.sleep(STEP_S)
        began = time.monotonic()
        file.write(fakes.make_metrics(step))
        waited += time.monotonic() - began
    file.close()
    return waited


@pytest.mark.parametrize("trouble", ["slow", "failing", "away"])
def test_training_does_not_wait_for_mlflow(
    trouble: str, stack: Stack, tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of MLflow takes 100 ms more, fails, or finds nobody: the step that writes its numbers does not notice."""
    monkeypatch.setattr(mlflow_tracker, "FLUSH_S", 60.0 if trouble == "slow" else 5.0)
    address = stack.environment["DFLASH_MLFLOW_URI"]
    share, delay_s = (1 / 3, 0.0) if trouble == "failing" else (0.0, 0.1)
    with faulty_proxy(address, share=share, delay_s=delay_s) as (proxy, counts):
        uri = "http://127.0.0.1:9" if trouble == "away" else proxy
        config = fakes.make_config(tmp_path, target_dir, name=f"run-{uuid4().hex[:8]}", places={"mlflow_uri": uri})
        run = open_run(config)
        alone = seconds_writing(tmp_path / "alone.jsonl")
        tracker = MlflowTracker(config, run)
        waited = seconds_writing(run.metrics)
        tracker.close("FINISHED")
    more = (waited - alone) / (STEPS * STEP_S)
    print(
        f"\n{trouble}: {STEPS} lines in {waited:.3f} s, without MLflow in {alone:.3f} s: {more:.2%} of the run; {sum(counts.values())} requests"
    )
    assert waited < 0.05 * STEPS * STEP_S
    assert more < 0.01
    if trouble == "slow":
        run_id = (run.root / "mlflow_run.txt").read_text().strip()
        points = MlflowClient(tracking_uri=address).get_metric_history(run_id, "train/loss")
        assert [point.step for point in points] == list(range(1, STEPS + 1))
        assert sum(counts.values()) < 100, "many points a call"
    else:
        assert (run.root / BEHIND).read_text().startswith(f"{STEPS} steps")
