"""flows.copies: a run on S3 is what it is here, and another machine goes on with it."""

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from dflash_core import assembly, copies, preparation
from dflash_core.config import Config
from dflash_core.data import cache as cache_module
from dflash_core.data import storage
from dflash_core.data.remote import COPY, list_files
from dflash_core.data.storage import fetch_shards, forget_clients, open_remote
from dflash_core.files import file_sha256
from dflash_core.records import StepMetrics, TrainResult
from dflash_core.rundir import RunDirectory
from dflash_core.training.checkpoint import latest
from flows import copies as flow_copies
from flows.copies import working_in
from flows.running import opened
from tests.data.faulty_proxy import faulty_proxy
from tests.data.test_remote import through
from tests.fakes import make_config

STEPS = 12
TRAINING = {"epochs": 40, "max_steps": STEPS, "accumulate": 1, "checkpoint_every": 3, "tokens_per_batch": 256}
SLOW = pytest.mark.slow  # on a busy machine
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_copies, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(cache_module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(storage, "REQUEST_ATTEMPTS", 1)


@pytest.fixture
def make(tmp_path: Path, target_dir: Path, s3: str) -> Callable[..., Config]:
    """`make("machine", name="tiny")`: the config of a run whose directories are that machine's own."""

    def config(machine: str = "here", *, copied: bool = True, **sections: Any) -> Config:
        places = {"runs": str(tmp_path / machine), "copies": s3 if copied else None}
        return make_config(tmp_path, target_dir, seed=11, training=TRAINING, places=places, **sections)

    return config


def work(config: Config, *, stop_at: int = 0, fail_at: int = 0, fresh: bool = False, export: bool = True) -> TrainResult | None:
    """Prepares, trains and exports as the flow does; a stop request, or an error, at a step."""

    async def main() -> TrainResult:
        stop = anyio.Event()

        def on_step(metrics: StepMetrics, total: int) -> None:
            if metrics.step == stop_at:
                anyio.from_thread.run_sync(stop.set)
            if metrics.step == fail_at:
                raise RuntimeError("the machine is gone")

        async with working_in(config, stop, fresh=fresh) as run:
            if preparation.prepared(config, run) is None:
                preparation.prepare(config, run)
            result = await assembly.train(config, run, stop, on_step)
            if export and not result.stopped:
                assembly.export(config, run)
            return result

    return anyio.run(main)


def root(config: Config) -> Path:
    return Path(config.places.runs) / config.name


def weights(config: Config) -> str:
    path = latest(root(config) / "checkpoints")
    assert path is not None
    return file_sha256(path / "weights.safetensors") + file_sha256(path / "moments.safetensors")


def steps(config: Config) -> list[int]:
    return [json.loads(line)["step"] for line in (root(config) / "metrics.jsonl").read_text().splitlines()]


def here(config: Config) -> dict[str, str]:
    """sha256 of every file of the run that is worth a copy."""
    names = (path.relative_to(root(config)) for path in root(config).rglob("*") if path.is_file())
    left_out = (".lock", ".copied.json")
    return {
        name.as_posix(): file_sha256(root(config) / name)
        for name in names
        if name.name not in left_out and name.parts[0] != "index"
    }


def there(config: Config) -> dict[str, str]:
    """sha256 of every object of the run's copy, its lists left out."""
    place = copies.place_of(config)
    client, path = open_remote(place)
    names = [name for name in list_files(place) if not name.endswith(COPY)]
    return {name: hashlib.sha256(client.cat_file(f"{path}/{name}")).hexdigest() for name in names}


def test_the_copy_is_the_run(make: Callable[..., Config], s3: str, s3_server: dict[str, str], monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    config = make(pipeline={"keep_checkpoints": 2}, export={"speculators": True})
    work(config)
    assert (root(config) / "export-speculators").is_dir()
    found = there(config)
    assert found == here(config)
    assert f"copied to            {s3}/tiny" in caplog.text
    assert not (root(config) / copies.BEHIND).exists()
    on_disk = {path.name for path in (root(config) / "checkpoints").iterdir()}
    assert {name.split("/")[1] for name in found if name.startswith("checkpoints/")} == on_disk, "retention, there too"
    assert fetch_shards(f"{s3}/tiny/shards", storage.ShardCache(directory=root(config) / "c", limit=2**24, evict=True)).files
    shutil.rmtree(root(config) / "c")
    with through(s3_server, monkeypatch) as counts:
        with_stop(config)
    assert "PUT" not in counts, "all is there"
    (root(config) / copies.SENT).unlink()
    with through(s3_server, monkeypatch) as counts:
        with_stop(config)
    assert "PUT" not in counts, "also where nothing is remembered"


def with_stop(config: Config, inside: Callable[[RunDirectory], None] = lambda run: None, **how: Any) -> None:
    """The run is opened and closed again."""

    async def main() -> None:
        async with working_in(config, anyio.Event(), **how) as run:
            inside(run)

    anyio.run(main)


# ---- another machine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> str:
    """The weights of a run that nothing interrupted, with no place for copies."""
    config = make_config(tmp_path_factory.mktemp("straight"), target_dir, seed=11, training=TRAINING)
    work(config)
    return weights(config)


@pytest.mark.parametrize("end", [pytest.param("stopped", marks=SLOW), "failed"])
def test_another_machine_ends_where_an_unbroken_run_does(
    make: Callable[..., Config], straight: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    if end == "stopped":
        work(make("first"), stop_at=7)
    else:
        with pytest.raises(RuntimeError, match="the machine is gone"):
            work(make("first"), fail_at=7)
    other = make("other")
    result = work(other)
    assert "fetched to" in caplog.text
    assert result is not None
    assert (result.step, result.departures) == (STEPS, ())
    assert weights(other) == straight
    assert steps(other) == list(range(1, STEPS + 1))
    assert here(other).items() <= there(other).items()


@SLOW
def test_a_finished_run_is_there_with_its_export(make: Callable[..., Config]) -> None:
    work(make("first", export={"speculators": True}))
    other = make("other", export={"speculators": True})

    def look(run: RunDirectory) -> None:
        assert (run.export_speculators / "config.json").is_file()
        assert {name for name in there(other) if name not in here(other)} == {
            name for name in there(other) if name.startswith("checkpoints/") and f"step-{STEPS:08d}" not in name
        }, "all but the older checkpoints"
        assert here(other).items() <= there(other).items()
        assert run.state == "resume", "there is no report"
        assert json.loads(run.training.read_text())["step"] == STEPS

    with_stop(other, look, begin=False)


@pytest.mark.parametrize("fault", ["rewritten", pytest.param("no list", marks=SLOW)])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_older_one_used(
    make: Callable[..., Config], straight: str, s3: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    work(make("first"))
    client, path = open_remote(f"{s3}/tiny")
    newest = f"checkpoints/step-{STEPS:08d}"
    name = f"{newest}/{COPY if fault == 'no list' else 'weights.safetensors'}"
    if fault == "no list":
        client.rm_file(f"{path}/{name}")
    else:
        whole = client.cat_file(f"{path}/{name}")
        client.pipe_file(f"{path}/{name}", whole[:-9] + bytes(9))
    other = make("other")
    result = work(other)
    assert result is not None
    assert f"{newest} is not used: {s3}/tiny/{newest}" in caplog.text
    assert ("copy.json missing" if fault == "no list" else "its sha256") in caplog.text
    assert result.ledger["applied"] < STEPS, "it went on from an older checkpoint"
    assert result.ledger["applied"] > 0
    assert weights(other) == straight
    assert here(other).items() <= there(other).items(), "and what was damaged is mended"


def test_a_run_of_another_experiment_is_not_fetched(make: Callable[..., Config], s3: str) -> None:
    work(make("first"), stop_at=2)
    other = make("other", drafter={"num_layers": 2})
    with pytest.raises(ValueError, match=rf"{s3}/tiny belongs to another experiment.*drafter\.num_layers: 1 -> 2"):
        with_stop(other)
    assert not root(other).exists()


# ---- two runs --------------------------------------------------------------------------------------------------------


def test_two_runs_do_not_mix(make: Callable[..., Config]) -> None:
    one, two = make(name="tiny"), make(name="tiny-2", data={"max_rows": 12})
    work(one, stop_at=4)
    work(two, stop_at=4)
    assert there(one) == here(one)
    assert there(two) == here(two)
    assert there(one)["run.json"] != there(two)["run.json"]


def test_a_later_run_of_the_same_name_touches_nothing(
    make: Callable[..., Config], s3: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = make("first")
    work(first, stop_at=4)
    before = there(first)
    with pytest.raises(ValueError, match=rf"{s3}/tiny has an older run: --fresh would mix two runs there"):
        work(make("other"), fresh=True)
    work(make("other", copied=False), stop_at=4)
    work(make("other"))
    assert f"{s3}/tiny has another run of this name: nothing is copied" in caplog.text
    assert there(first) == before


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_a_store_that_is_away_costs_nothing_and_the_next_start_sends(
    make: Callable[..., Config], straight: str, s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make()
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setattr(cache_module, "ATTEMPTS", 2)
        forget_clients()
        work(config)
        forget_clients()
    assert weights(config) == straight
    behind = (root(config) / copies.BEHIND).read_text().split()
    assert {"shards", "export", "metrics.jsonl", f"checkpoints/step-{STEPS:08d}"} <= set(behind)
    assert f"{s3}/tiny did not take {len(behind)} files and directories (shards, checkpoints/step-{STEPS:08d}" in caplog.text
    assert list_files(f"{s3}/tiny") == {}
    with_stop(config)
    assert not (root(config) / copies.BEHIND).exists()
    assert there(config) == here(config)


@SLOW
def test_a_store_that_resets_and_slows_down_gets_everything(
    make: Callable[..., Config], straight: str, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make()
    with through(s3_server, monkeypatch, share=0.05) as counts:
        work(config)
    assert counts["cut"] + counts["half"] + counts["503"] > 3
    assert there(config) == here(config)
    assert weights(config) == straight


def test_a_stop_request_does_not_wait_for_a_slow_store(
    make: Callable[..., Config], s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow_copies, "STOP_S", 0.3)
    config = make()
    stop = anyio.Event()

    async def main() -> float:
        async with working_in(config, stop) as run:
            preparation.prepare(config, run)
            stop.set()
            started = time.monotonic()
        return time.monotonic() - started

    with through(s3_server, monkeypatch, delay_s=0.3):
        assert anyio.run(main) < 2
    assert "shards" in (root(config) / copies.BEHIND).read_text()


CHILD = """
import sys
from functools import partial
from pathlib import Path
import anyio
from dflash_core.config import Config
from flows import copies
copies.LOOK_EVERY_S = 0.05
async def main():
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    async with copies.working_in(config, anyio.Event()):
        await anyio.sleep(600)
anyio.run(main)
"""


@SLOW
def test_killed_amid_its_uploads_it_leaves_no_half_directory(
    make: Callable[..., Config], straight: str, tmp_path: Path, s3_server: dict[str, str]
) -> None:
    work(make(copied=False))
    config = make()
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    place = copies.place_of(config)
    with faulty_proxy(s3_server["AWS_ENDPOINT_URL"], share=0.0, delay_s=0.05) as (address, _):
        environment = {**os.environ, "AWS_ENDPOINT_URL": address}
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(file)], cwd=ROOT, env=environment)
        while not any(name.startswith("checkpoints/") for name in list_files(place)):
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
    found = list_files(place)
    assert f"checkpoints/step-{STEPS:08d}/{COPY}" not in found
    assert f"shards/{COPY}" in found
    with_stop(config)
    assert there(config) == here(config)
    assert weights(config) == straight


@SLOW
def test_a_machine_that_comes_back_is_told_that_another_is_further(
    make: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    first, other = make("first"), make("other")
    work(first, stop_at=2)
    work(other, export=False)
    with_stop(first)
    assert "is further (step-00000012) than this machine (step-0000000" in caplog.text


# ---- preparation -----------------------------------------------------------------------------------------------------


@SLOW
def test_processes_prepare_from_s3_and_the_shards_go_there(make: Callable[..., Config], s3: str) -> None:
    """This process has used S3 when the pool starts."""
    local = make("local", copied=False, data={"part_rows": 6})
    client, path = open_remote(f"{s3}/chats")
    client.put_file(str(local.data.conversations[0].path), f"{path}/conversations.jsonl")
    config = make(data={"conversations": f"{s3}/chats/*.jsonl", "part_rows": 6, "processes": 4})
    started = time.monotonic()
    for one in (config, local):
        with_stop(one, lambda run, one=one: preparation.prepare(one, run))  # type: ignore[misc]
    assert time.monotonic() - started < 60
    assert (root(config) / "shards" / "data-00000-of-00001.arrow").read_bytes() == (
        root(local) / "shards" / "data-00000-of-00001.arrow"
    ).read_bytes()
    assert there(config) == here(config)


def test_without_a_place_nothing_is_copied(make: Callable[..., Config], s3: str) -> None:
    config = make(copied=False)
    with_stop(config)
    assert {path.name for path in root(config).iterdir()} == {"run.json", ".lock"}
    assert list_files(s3) == {}
    with opened(config):
        pass


# ---- the flows -------------------------------------------------------------------------------------------------------


@SLOW
@pytest.mark.usefixtures("api")
def test_another_machine_evaluates_and_promotes(run_file: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.evaluate import evaluate
    from flows.promote import promote
    from flows.train import train

    monkeypatch.setenv("DFLASH_COPIES", s3)
    monkeypatch.setenv("DFLASH_MLFLOW_URI", f"sqlite:///{tmp_path}/mlflow.db")

    def call(flow: Any, machine: str) -> Any:
        monkeypatch.setenv("DFLASH_RUNS", str(tmp_path / machine))
        return anyio.run(partial(flow, config=str(run_file)))

    first = call(train, "first")
    mlflow_run = (tmp_path / "first" / "tiny" / "mlflow_run.txt").read_text()
    again = call(train, "second")
    assert again["acceptance_length"] == first["acceptance_length"]
    assert again["report"] == str(tmp_path / "second" / "tiny" / "report.json")
    assert (tmp_path / "second" / "tiny" / "mlflow_run.txt").read_text() == mlflow_run
    assert not (tmp_path / "second" / "tiny" / "copies_behind.txt").exists()
    assert call(evaluate, "third")["acceptance_length"] == first["acceptance_length"]
    promoted = call(promote, "fourth")
    assert promoted["version"] == "1"
