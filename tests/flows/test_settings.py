"""flows.settings and flows.command: file < environment (places only) < command line; unknown keys are errors in all three."""

import functools
import gc
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dflash_core.config import Config
from dflash_core.rundir import config_fingerprint
from flows.command import ENVIRONMENT_DEFAULTS, Command, read_command_line
from flows.settings import QUICKSTART, known_keys, load_config


@pytest.fixture(autouse=True)
def only_our_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("DFLASH_RUNS", "DFLASH_MLFLOW_URI", "DFLASH_COPIES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT_DEFAULTS.items():  # set by read_command_line; undone after the test
        monkeypatch.setenv(name, value)
    yield
    gc.enable()  # read_command_line leaves it off for the imports that follow


def command(run_file: Path, *options: str) -> Command:
    return read_command_line("train", "", fresh=True, arguments=["--config", str(run_file), *options])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        read_command_line("train", "", fresh=True, arguments=arguments)
    captured = capsys.readouterr()
    assert leaving.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_command_line_beats_environment_beats_file(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(str(run_file)).places.runs == str(run_file.parent / "runs")
    monkeypatch.setenv("DFLASH_RUNS", "/from/environment")
    monkeypatch.setenv("DFLASH_MLFLOW_URI", "")  # empty is not set
    monkeypatch.setenv("DFLASH_COPIES", "s3://bucket/runs")
    assert load_config(str(run_file)).places.copies == "s3://bucket/runs"
    assert load_config(str(run_file)).places.runs == "/from/environment"
    assert load_config(str(run_file)).places.mlflow_uri is None
    assert command(run_file, "--places.runs", "/from/options").config.places.runs == "/from/options"


def test_options_reach_every_kind_of_field(run_file: Path) -> None:
    got = command(
        run_file, "--training.learning_rate", "1e-3", "--training.max_steps", "null", "--drafter.target_layer_ids", "0,2",
        "--pipeline.targets", "cpu,cpu", "--training.betas=0.8,0.9", "--name", "other", "--fresh",
    )  # fmt: skip
    assert got.fresh
    assert got.overrides == {
        "training.learning_rate": 1e-3,
        "training.max_steps": None,
        "drafter.target_layer_ids": [0, 2],
        "pipeline.targets": ["cpu", "cpu"],
        "training.betas": [0.8, 0.9],
        "name": "other",
    }
    assert load_config(got.path, got.overrides) == got.config, "a deployment given these overrides runs the same"


@pytest.mark.parametrize("name", ["DFLASH_TRAINING__LEARNING_RATE", "DFLASH_RUNZ", "dflash_seed"])
def test_environment_sets_nothing_but_places(name: str, run_file: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv(name, "1")
    assert name in refused(capsys, "--config", str(run_file))


def test_misspelt_option_names_the_closest(run_file: Path, capsys) -> None:
    message = refused(capsys, "--config", str(run_file), "--training.learnin_rate", "1e-3")
    assert "--training.learnin_rate" in message
    assert "did you mean --training.learning_rate?" in message


def test_options_are_never_abbreviated(run_file: Path, capsys) -> None:
    assert "--training.learn" in refused(capsys, "--config", str(run_file), "--training.learn", "1")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("trainin: {epochs: 2}", "trainin: unknown key"),
        ("training: {epoch: 2}", "did you mean training.epochs?"),
        ("data: {conversations: [{path: a, wieght: 2}]}", "did you mean data.conversations.0.weight?"),
        ("training: {epochs: 2, epochs: 3}", "'epochs' is given twice"),
        ("training: [", "no valid YAML"),
        ("seed: 2020-99-99", "bad.yaml: no valid YAML: month must be in 1..12"),
        ("training: &t {loss: *t}", "bad.yaml: nested too deeply, or an anchor that holds itself"),
        (f"training: {'[' * 3000}{']' * 3000}", "bad.yaml: nested too deeply"),
        ("training: {epochs: true}", "training.epochs True (FILE): a number, not true or false"),
        (f"training: {{epochs: {10**400}}}", "less than or equal to 9007199254740992"),
        (f"name: {'n' * 101}", "at most 100 characters"),
        (
            "places: {runs: s3://bucket/runs}",
            "places.runs 's3://bucket/runs' (FILE): no directory of this machine; places.copies",
        ),
        ("- a", "must be a mapping"),
        ("training: 3", "training 3"),
        ("", "must be a mapping"),
        ("name: x", "target: not set"),
    ],
)
def test_bad_file_is_one_line(text: str, expected: str, tmp_path: Path, run_file: Path, capsys) -> None:
    values = "" if text in ("", "- a", "name: x") else run_file.read_text()
    section = text.split(":")[0]
    kept = {key: value for key, value in (yaml.safe_load(values) or {}).items() if key != section}
    bad = tmp_path / "bad.yaml"
    bad.write_text((yaml.safe_dump(kept) if kept else "") + text)
    assert expected.replace("FILE", str(bad)) in refused(capsys, "--config", str(bad))


def test_missing_file(tmp_path: Path, capsys) -> None:
    assert "nothing.yaml" in refused(capsys, "--config", str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1e-3", "fast"])
def test_learning_rate_is_a_positive_number(value: str, run_file: Path, capsys) -> None:
    message = refused(capsys, "--config", str(run_file), f"--training.learning_rate={value}")
    assert f"training.learning_rate '{value}' (command line)" in message


def test_unknown_override_of_a_deployment(run_file: Path) -> None:
    with pytest.raises(ValueError, match=r"^training\.epoch: unknown key \(overrides\) \(did you mean training\.epochs\?\)$"):
        load_config(str(run_file), {"training.epoch": 3})


def test_print_config_can_be_run_again(run_file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("DFLASH_RUNS", "/from/environment")
    with pytest.raises(SystemExit) as leaving:
        command(run_file, "--print-config", "--training.learning_rate", "0.5")
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    assert "learning_rate: 0.5  # command line\n" in shown
    assert "runs: /from/environment  # environment DFLASH_RUNS\n" in shown
    assert "  max_length: 128\n" in shown, "what the file says has no comment"
    monkeypatch.delenv("DFLASH_RUNS")
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    config = load_config(str(again))
    assert config.training.learning_rate == 0.5
    assert f"config_fingerprint: {config_fingerprint(config)}" in shown


def test_the_quickstart_file_is_complete() -> None:
    assert load_config(QUICKSTART).name == "quickstart"


def test_the_preset_of_a_fine_tuned_target_is_the_same_drafter_with_less_training() -> None:
    plain, again = (load_config(str(Path(QUICKSTART).parent / f"{name}.yaml")) for name in ("qwen3-8b", "retarget"))
    assert again.drafter == plain.drafter
    assert again.training.warm_start == f"runs/{plain.name}/export"
    assert again.training.learning_rate < plain.training.learning_rate
    assert again.training.epochs < plain.training.epochs


def test_a_config_whose_start_is_missing_is_one_line(run_file: Path, tmp_path: Path, capsys) -> None:
    assert "training.warm_start 'nowhere'" in refused(
        capsys, "--config", str(run_file), "--training.warm_start", "nowhere", "--print-config"
    )


def test_every_optional_field_may_be_left_out(run_file: Path, tmp_path: Path) -> None:
    """A run with every default written out, less one field or section: it still loads, or names what is required."""
    values = yaml.safe_load(run_file.read_text())
    least = {
        "name": "least",
        "target": {"path": values["target"]["path"]},
        "evaluation": {"prompts": values["evaluation"]["prompts"]},
    }
    whole = Config.model_validate(least | {"data": {"conversations": "c.jsonl"}}).model_dump(mode="json")
    less = tmp_path / "less.yaml"
    needed = {"name", "target", "target.path", "data", "data.conversations", "evaluation", "evaluation.prompts"}
    for key in (*known_keys(), *whole):
        values = json.loads(json.dumps(whole))
        *path, last = key.split(".")
        section = functools.reduce(dict.__getitem__, path, values)
        section.pop(last, None)
        less.write_text(yaml.safe_dump(values))
        if key in needed:
            with pytest.raises(ValueError, match=key):
                load_config(str(less))
        else:
            load_config(str(less))


def test_of_file_command_line_and_deployment_the_later_wins_and_is_shown(run_file: Path, capsys) -> None:
    """Three values, each different in every place."""
    values = yaml.safe_load(run_file.read_text())
    values["drafter"] |= {"mask_token_id": 3, "block_size": 5}
    values["training"]["learning_rate"] = 0.1
    run_file.write_text(yaml.safe_dump(values))
    config = load_config(str(run_file))
    assert (config.drafter.mask_token_id, config.drafter.block_size, config.training.learning_rate) == (3, 5, 0.1)
    deployed = load_config(
        str(run_file), {"drafter": {"mask_token_id": 4}, "drafter.block_size": 6, "training.learning_rate": 0.2}
    )
    assert (deployed.drafter.mask_token_id, deployed.drafter.block_size, deployed.training.learning_rate) == (4, 6, 0.2)
    options = ("--drafter.mask_token_id=7", "--drafter.block_size=8", "--training.learning_rate=0.3")
    with pytest.raises(SystemExit):
        command(run_file, *options, "--print-config")
    shown = capsys.readouterr().out
    for line in ("mask_token_id: 7", "block_size: 8", "learning_rate: 0.3"):
        assert f"{line}  # command line\n" in shown
