"""flows.tracking: MLflow gets what metrics.jsonl holds, once, and never holds a training up."""

import json
import logging
import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anyio
import mlflow
import pytest
from mlflow import MlflowClient

from dflash_core.config import Config
from dflash_core.data.shards import write_shards
from dflash_core.rundir import RunDirectory, config_fingerprint, open_run
from dflash_core.training.metrics import MetricsFile
from dflash_core.training.timeline import write_timeline
from flows import mlflow_tracker
from flows.metric_names import ACCURACY_BY_SLOT, REPORT, SKIPPED, STEP, SYSTEM, report_points, step_points
from flows.mlflow_run import HIDDEN, SECRET, flat_params, tracking_uri, without_password
from flows.mlflow_tracker import BEHIND, MlflowTracker
from flows.settings import config_yaml
from flows.tracking import send_rest
from tests import fakes
from tests.flows.conftest import ROOT


def write_steps(run: RunDirectory, first: int, last: int, **changes: Any) -> None:
    """Steps as a training (re)started at `first` writes them."""
    file = MetricsFile(run.metrics, first - 1)
    for step in range(first, last + 1):
        file.write(fakes.make_metrics(step, **changes))
    file.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests here: making its tables takes seconds."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def config(request: pytest.FixtureRequest, runs: Path, tmp_path: Path, target_dir: Path) -> Config:
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)
    return fakes.make_config(tmp_path, target_dir, name=name, places={"runs": str(runs)})


@pytest.fixture
def run(config: Config) -> RunDirectory:
    return open_run(config)


@pytest.fixture(autouse=True)
def no_stray_runs() -> Iterator[None]:
    yield
    assert mlflow.active_run() is None


def client(config: Config) -> MlflowClient:
    return MlflowClient(tracking_uri=tracking_uri(config))


def run_id(run: RunDirectory) -> str:
    return (run.root / "mlflow_run.txt").read_text().strip()


def history(config: Config, run: RunDirectory, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client(config).get_metric_history(run_id(run), name)]


def test_default_store_is_beside_the_runs(config: Config, runs: Path) -> None:
    assert tracking_uri(config) == f"sqlite:///{runs}/mlflow.db"


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns"])
def test_file_store_is_refused_at_once(uri: str, config: Config) -> None:
    places = config.places.model_copy(update={"mlflow_uri": uri})
    with pytest.raises(ValueError, match="use sqlite:///PATH"):
        tracking_uri(config.model_copy(update={"places": places}))


def test_none_tracks_nothing(config: Config) -> None:
    places = config.places.model_copy(update={"mlflow_uri": "none"})
    assert tracking_uri(config.model_copy(update={"places": places})) is None


def test_steps_params_and_tags_arrive(config: Config, run: RunDirectory, runs: Path) -> None:
    tracker = MlflowTracker(config, run)
    write_steps(run, 1, 5)
    tracker.close("FINISHED")
    found = client(config).get_run(run_id(run))
    assert found.info.status == "FINISHED"
    assert found.info.run_name == config.name
    assert history(config, run, "train/loss") == [(step, 10.0 / step / 2.0) for step in range(1, 6)]
    assert history(config, run, "train/accuracy_by_slot/01") == [(step, 0.5) for step in range(1, 6)]
    assert found.data.params == flat_params(config)
    assert found.data.params["training.epochs"] == "1"
    assert found.data.tags["config_fingerprint"] == config_fingerprint(config)
    assert found.info.artifact_uri.startswith((runs / "mlartifacts").as_uri())
    assert (Path(found.info.artifact_uri.removeprefix("file://")) / "config.yaml").is_file()


def test_steps_arrive_while_training_goes_on(config: Config, run: RunDirectory) -> None:
    tracker = MlflowTracker(config, run)
    file = MetricsFile(run.metrics, 0)
    file.write(fakes.make_metrics(1))
    end = time.monotonic() + 60
    while not (run.root / "mlflow_run.txt").is_file() or not history(config, run, "step"):
        assert time.monotonic() < end
        time.sleep(0.2)
    file.write(fakes.make_metrics(2))
    file.close()
    tracker.close("FINISHED")
    assert history(config, run, "step") == [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("ending", ["KILLED", "unended"])
def test_resumed_training_goes_on_in_the_same_run_and_sends_nothing_twice(ending: str, config: Config, run: RunDirectory) -> None:
    """The last checkpoint is step 4; steps 5 and 6 were sent, then trained again."""
    first = MlflowTracker(config, run)
    write_steps(run, 1, 6)
    if ending == "KILLED":
        first.close("KILLED")
    else:  # a killed process: what was sent was sent, and nobody ended the run
        first._closing.set()
        first._thread.join()
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    (run.checkpoints / "step-00000004" / "state.json").write_text("{}")
    identity = run_id(run)
    assert client(config).get_run(identity).info.status == "KILLED" or ending == "unended"
    second = MlflowTracker(config, run)
    write_steps(run, 5, 9)
    second.close("FINISHED")
    assert run_id(run) == identity
    assert client(config).get_run(identity).info.status == "FINISHED"
    assert [step for step, _ in history(config, run, "train/loss")] == list(range(1, 10))
    assert client(config).get_run(identity).data.tags["resumed_after_step.4"] == "steps 5-6 made again"


def test_changed_params_are_left_as_they_were(config: Config, run: RunDirectory) -> None:
    MlflowTracker(config, run).close("KILLED")
    changed = config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"readers": 3})})
    MlflowTracker(changed, run).close("FINISHED")
    found = client(config).get_run(run_id(run))
    assert found.data.params["pipeline.readers"] == "1"
    assert "readers: 3" in (Path(found.info.artifact_uri.removeprefix("file://")) / "config.yaml").read_text()


def test_values_that_are_not_finite_are_counted_not_sent(
    config: Config, run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MlflowTracker(config, run)
    write_steps(run, 1, 2, gradient_norm=math.inf, loss_sum=math.nan)
    with caplog.at_level(logging.WARNING):
        tracker.close("FINISHED")
    assert "4 metric values were not finite" in caplog.text
    assert client(config).get_run(run_id(run)).data.tags["not_finite_points"] == "4"
    assert history(config, run, "train/gradient_norm") == []
    assert len(history(config, run, "train/tokens")) == 2


def test_more_points_than_one_call_takes(config: Config, run: RunDirectory) -> None:
    write_steps(run, 1, 300)
    MlflowTracker(config, run).close("FINISHED")
    assert [step for step, _ in history(config, run, "train/loss")] == list(range(1, 301))


def test_two_trainings_in_one_process_keep_apart(config: Config, runs: Path, tmp_path: Path, target_dir: Path) -> None:
    configs = [config, fakes.make_config(tmp_path, target_dir, name="it's-other".replace("'", "-"), places={"runs": str(runs)})]
    opened = [open_run(each) for each in configs]
    trackers = [MlflowTracker(each, run) for each, run in zip(configs, opened, strict=True)]
    for tokens, run in enumerate(opened):
        write_steps(run, 1, 3, tokens=tokens)
    for tracker in trackers:
        tracker.close("FINISHED")
    assert [value for _, value in history(configs[0], opened[0], "train/tokens")] == [0, 0, 0]
    assert [value for _, value in history(configs[1], opened[1], "train/tokens")] == [1, 1, 1]


def test_runs_of_one_name_in_other_places_are_other_runs(config: Config, run: RunDirectory, tmp_path: Path) -> None:
    """The store is asked for the id that the run directory keeps, never for a name."""
    uri = tracking_uri(config)
    other = config.model_copy(
        update={"places": config.places.model_copy(update={"runs": str(tmp_path / "o'ther"), "mlflow_uri": uri})}
    )
    twin = open_run(other)
    for each, where, last in ((config, run, 2), (other, twin, 3), (config, run, 2), (other, twin, 3)):
        tracker = MlflowTracker(each, where)
        if not where.metrics.exists():
            write_steps(where, 1, last)
        tracker.close("FINISHED")
    assert run_id(run) != run_id(twin)
    assert [len(history(each, where, "step")) for each, where in ((config, run), (other, twin))] == [2, 3]


def finished(run: RunDirectory) -> dict[str, Any]:
    """The report and the export of a run that was measured at step 7."""
    report = dict.fromkeys(REPORT, 2.5) | {"training": {"step": 7}, "name": "drafter"}
    report |= {"acceptance_interval": {"low": 2.25, "high": 2.75}, "sets": {"chat": {"acceptance_length": 3.5, "speedup": 1.5}}}
    for file in (run.report, run.report_text):
        file.write_text(json.dumps(report))
    write_timeline(run.timeline, [])
    run.export.mkdir()
    (run.export / "config.json").write_text("{}")
    return report


LOGGING = """
import sys
from dflash_core.config import Config
from dflash_core.rundir import open_run
from flows.mlflow_tracker import MlflowTracker
from tests.flows.test_tracking import write_steps

config = Config.model_validate_json(open(sys.argv[1], encoding="utf-8").read())
run = open_run(config)
tracker = MlflowTracker(config, run)
write_steps(run, 1, 500)
tracker.close("FINISHED")
"""


@pytest.mark.slow
def test_four_processes_with_one_store_lose_no_point(config: Config, tmp_path: Path, runs: Path) -> None:
    configs = [config.model_copy(update={"name": f"{config.name}-{i}"}) for i in range(4)]
    children = []
    for each in configs:
        file = tmp_path / f"{each.name}.json"
        file.write_text(each.model_dump_json())
        children.append(subprocess.Popen([sys.executable, "-c", LOGGING, str(file)], cwd=ROOT))
    assert [child.wait(900) for child in children] == [0] * 4
    for each in configs:
        found = history(each, open_run(each, begin=False), "train/loss")
        assert found == [(step, 10.0 / step / 2.0) for step in range(1, 501)]


def test_report_and_drafter_are_published_once(config: Config, run: RunDirectory) -> None:
    report = finished(run)
    for _ in range(2):
        tracker = MlflowTracker(config, run)
        tracker.publish(report)
        tracker.close("FINISHED")
    assert set(history(config, run, "acceptance_length")) == {(7, 2.5)}
    assert set(history(config, run, "acceptance_length_low")) == {(7, 2.25)}
    assert set(history(config, run, "acceptance_length/chat")) == {(7, 3.5)}
    assert {item.path for item in client(config).list_artifacts(run_id(run))} >= {
        "report.json",
        "report.md",
        "timeline.json",
        "timeline.png",
    }
    found = client(config).get_run(run_id(run))
    models = client(config).search_logged_models([found.info.experiment_id], filter_string="name = 'drafter'")
    (model,) = [each for each in models if each.source_run_id == run_id(run)]
    assert model.status.value == "READY"
    assert {(metric.key, metric.value) for metric in model.metrics} >= {("acceptance_length", 2.5)}
    assert found.data.tags["drafter"] == f"{model.tags['export_sha256']} {model.model_id}"
    assert [each.model_id for each in found.outputs.model_outputs] == [model.model_id]
    place = Path(model.artifact_location.removeprefix("file://"))
    assert (place / "config.json").read_text() == "{}"


def test_data_machine_and_versions_are_shown_and_every_metric_is_documented(config: Config, run: RunDirectory) -> None:
    manifest = write_shards(run.shards, [], shard_tokens=10, fingerprint="f" * 64, ingredients={}, ledger={"validation_rows": 0})
    tracker = MlflowTracker(config, run)
    write_steps(run, 1, 2)
    report = finished(run)
    tracker.publish(report)
    tracker.close("FINISHED")
    found = client(config).get_run(run_id(run))
    (shown,) = found.inputs.dataset_inputs
    assert (shown.dataset.name, shown.dataset.digest) == (config.name, "f" * 36)
    assert json.loads(shown.dataset.profile)["rows"] == manifest.rows
    assert config.data.conversations[0].path in shown.dataset.source
    assert {tag.key: tag.value for tag in shown.tags} == {"mlflow.data.context": "training"}
    assert found.data.tags["version.torch"] == version("torch")
    assert found.data.tags["devices"] == "cpu, cpu"
    slots = {ACCURACY_BY_SLOT.format(slot=slot) for slot in range(1, 4)}
    system = {name for name in SYSTEM if "gpu" not in name}
    assert {name for name in found.data.metrics if "gpu" not in name} == {
        "step", SKIPPED, *slots, *(f"train/{name}" for name in STEP), *dict(report_points(report)), *system,
    }  # fmt: skip
    assert 0 < found.data.metrics["system/system_memory_usage_percentage"] < 100


@pytest.mark.parametrize(
    "name, secret",
    [
        ("secret_key", True), ("hf_token", True), ("password", True), ("api_key", True), ("db_passwd", True),
        ("embedding_key", False), ("cache_key", False), ("mask_token_id", False), ("tokens", False), ("api_key_env", False),
    ],
)  # fmt: skip
def test_what_is_secret_by_its_name(name: str, secret: bool) -> None:
    assert bool(SECRET.search(name)) is secret


def test_no_parameter_of_a_run_is_mistaken_for_a_secret(config: Config) -> None:
    assert HIDDEN not in flat_params(config).values()


def test_what_could_not_be_sent_is_sent_at_the_next_start(config: Config, run: RunDirectory, monkeypatch, caplog) -> None:
    """Also of a run that is finished: nothing is trained again, MLflow only gets what it lacks."""
    report = finished(run)
    places = config.places.model_copy(update={"mlflow_uri": "http://127.0.0.1:9"})
    monkeypatch.setattr(mlflow_tracker, "FLUSH_S", 1.0)
    away = MlflowTracker(config.model_copy(update={"places": places}), run)
    write_steps(run, 1, 4)
    away.publish(report)
    away.close("FINISHED")
    assert (run.root / BEHIND).read_text().startswith("4 steps")
    monkeypatch.undo()
    anyio.run(send_rest, config, run, report)
    assert [step for step, _ in history(config, run, "train/loss")] == [1, 2, 3, 4]
    assert history(config, run, "acceptance_length") == [(7, 2.5)]
    assert client(config).get_run(run_id(run)).info.status == "FINISHED"
    assert not (run.root / BEHIND).exists()
    before = (run.root / "mlflow_run.txt").stat().st_mtime_ns
    anyio.run(send_rest, config, run, report)  # nothing is left: MLflow is not even asked
    assert (run.root / "mlflow_run.txt").stat().st_mtime_ns == before


def test_server_that_is_down_costs_a_warning(config: Config, run: RunDirectory, monkeypatch, caplog) -> None:
    with socket.socket() as held:  # bound, never listening: connections are refused
        held.bind(("127.0.0.1", 0))
        address = f"http://user:secret@127.0.0.1:{held.getsockname()[1]}"
        places = config.places.model_copy(update={"mlflow_uri": address})
        monkeypatch.setattr(mlflow_tracker, "FLUSH_S", 3.0)
        start = time.monotonic()
        tracker = MlflowTracker(config.model_copy(update={"places": places}), run)
        write_steps(run, 1, 3)
        assert time.monotonic() - start < 2
        with caplog.at_level(logging.WARNING):
            tracker.close("FAILED")
        assert time.monotonic() - start < 8
    points = sum(len(list(step_points(json.loads(line)))) for line in run.metrics.read_text().splitlines())
    assert f"did not take the last 3 steps ({points} points)" in caplog.text
    assert "secret" not in caplog.text


def test_long_values_and_passwords_do_not_reach_the_params(config: Config) -> None:
    places = config.places.model_copy(update={"mlflow_uri": "http://user:secret@host:5000"})
    target = config.target.model_copy(update={"path": "x" * 7000})
    params = flat_params(config.model_copy(update={"places": places, "target": target}))
    assert params["places.mlflow_uri"] == "http://user:***@host:5000"
    assert len(params["target.path"]) == 6000
    assert params["target.path"].endswith("(trimmed)")


def test_the_config_that_is_an_artifact_has_no_password(config: Config, run: RunDirectory) -> None:
    uri = str(tracking_uri(config)).replace("sqlite:///", "sqlite://user:secret@/")
    shown_uri = config.model_copy(update={"places": config.places.model_copy(update={"mlflow_uri": uri})})
    text = config_yaml(without_password(shown_uri))
    assert "user:***@" in text
    assert "secret" not in text
