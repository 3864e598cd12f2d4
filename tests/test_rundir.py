"""Running the same config again: new, resume, finished, another experiment, fresh, in use."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.config import Config, experiment
from dflash_core.rundir import RunDirectory, config_fingerprint, hold, open_run
from tests.fakes import make_config

HOLDER = """
import sys
from pathlib import Path
from dflash_core.rundir import RunDirectory, hold
with hold(RunDirectory(root=Path(sys.argv[1]), state="new")):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path, "target")


def changed(config: Config, **changes: object) -> Config:
    return config.model_copy(update=changes)


def test_a_new_run_records_its_experiment(config: Config, tmp_path: Path) -> None:
    run = open_run(config)
    assert run == RunDirectory(root=tmp_path / "runs" / "tiny", state="new")
    stored = json.loads((run.root / "run.json").read_text())
    assert stored == {"experiment": experiment(config), "config_fingerprint": config_fingerprint(config)}
    assert [path.name for path in run.root.iterdir()] == ["run.json"]


def test_again_is_resume_and_with_a_report_finished(config: Config) -> None:
    assert [open_run(config).state for _ in range(3)] == ["new", "resume", "resume"]
    run = open_run(config)
    run.report.write_text("{}")
    assert open_run(config) == RunDirectory(root=run.root, state="finished")


def test_places_and_pipeline_may_change_between_runs(config: Config) -> None:
    open_run(config)
    other = changed(config, pipeline=config.pipeline.model_copy(update={"readers": 7}))
    assert open_run(other).state == "resume"


def test_another_experiment_of_the_same_name_is_refused_with_old_and_new(config: Config) -> None:
    run = open_run(config)
    before = (run.root / "run.json").read_bytes()
    other = changed(config, seed=5, training=config.training.model_copy(update={"learning_rate": 0.5}))
    with pytest.raises(ValueError, match="belongs to another experiment") as error:
        open_run(other)
    assert "seed: 0 -> 5; training.learning_rate: 0.0006 -> 0.5" in str(error.value)
    assert "--fresh" in str(error.value)
    assert (run.root / "run.json").read_bytes() == before


def test_fresh_sets_the_old_run_aside_each_time(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    run = open_run(config)
    (run.root / "kept").write_text("one")
    assert open_run(changed(config, seed=5), fresh=True).state == "new"
    (run.root / "kept").write_text("two")
    assert open_run(config, fresh=True).state == "new"
    runs = run.root.parent
    assert {path.name for path in runs.iterdir()} == {"tiny", "tiny.old-1", "tiny.old-2"}
    assert [(runs / f"tiny.old-{i}" / "kept").read_text() for i in (1, 2)] == ["one", "two"]
    assert caplog.messages == [f"the older run is kept in {runs}/tiny.old-{i}" for i in (1, 2)]
    assert not (run.root / "kept").exists()
    assert open_run(config).state == "resume"


def test_fresh_without_an_old_run_is_just_new(config: Config) -> None:
    run = open_run(config, fresh=True)
    assert run.state == "new"
    assert [path.name for path in run.root.parent.iterdir()] == ["tiny"]


def test_a_foreign_directory_is_never_taken_over(config: Config, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "tiny"
    root.mkdir(parents=True)
    (root / "thesis.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(ValueError, match=r"not empty and no run of this tool.*choose another name"):
            open_run(config, fresh=fresh)
    assert [path.name for path in root.iterdir()] == ["thesis.txt"]


def test_an_empty_directory_is_taken(config: Config, tmp_path: Path) -> None:
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert open_run(config).state == "new"


def test_a_kill_while_the_record_was_written_leaves_a_usable_name(config: Config, tmp_path: Path) -> None:
    root = tmp_path / "runs" / "tiny"
    root.mkdir(parents=True)
    (root / "run.json.partial").write_text('{"experi')
    assert open_run(config).state == "new"


def test_runs_under_a_relative_place_have_absolute_paths(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = open_run(changed(config, places=config.places.model_copy(update={"runs": "here"})))
    assert run.root == tmp_path / "here" / "tiny"


def test_paths_of_a_run_lie_in_it(tmp_path: Path) -> None:
    run = RunDirectory(root=tmp_path, state="new")
    names = [
        path.relative_to(tmp_path).as_posix()
        for path in (
            run.shards,
            run.checkpoints,
            run.export,
            run.metrics,
            run.timeline,
            run.training,
            run.report,
            run.report_text,
        )
    ]
    assert names == [
        *("shards", "checkpoints", "export", "metrics.jsonl", "timeline.json", "training.json", "report.json", "report.md")
    ]


def test_a_run_in_use_by_another_process_is_neither_held_nor_set_aside(config: Config) -> None:
    run = open_run(config)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"in use by another process; wait for it or choose another name"), hold(run):
            pass
        with pytest.raises(ValueError, match="in use by another process"):
            open_run(config, fresh=True)
        assert run.root.is_dir()
    finally:
        child.kill()
        child.communicate()
    with hold(run):  # a killed holder leaves no lock behind
        pass
    assert open_run(config, fresh=True).state == "new"


def test_a_run_can_be_held_again_after_it_was_let_go(config: Config) -> None:
    run = open_run(config)
    for _ in range(2):
        with hold(run), pytest.raises(ValueError, match="in use"), hold(run):
            pass


def test_a_run_that_may_not_begin_leaves_nothing(config) -> None:
    with pytest.raises(ValueError, match="no such run; train first"):
        open_run(config, begin=False)
    assert not Path(config.places.runs).exists()
    open_run(config)
    assert open_run(config, begin=False).state == "resume"
