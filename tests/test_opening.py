"""Training from directories that were there before: the same drafter as from the run's own shards, and refusals before the first step."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from dflash_core import assembly, opening, preparation
from dflash_core.config import Config
from dflash_core.data.shards import read_manifest
from dflash_core.data.storage import push_shards
from dflash_core.files import file_sha256
from dflash_core.records import StepMetrics, TrainResult
from dflash_core.rundir import RunDirectory, open_run
from dflash_core.training.checkpoint import latest
from tests.data.test_verification import damage_ids
from tests.fakes import make_config

TRAINING = {"epochs": 2, "accumulate": 2, "tokens_per_batch": 256}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> RunDirectory:
    """A run with shards of its own, trained."""
    config = make_config(
        tmp_path_factory.mktemp("own"), target_dir, seed=3, training=TRAINING, data={"shard_tokens": 300, "max_length": 128}
    )
    run = open_run(config)
    preparation.prepare(config, run)
    train(config, run)
    return run


def from_shards(root: Path, target_dir: Path, places: list[Path | str], **data: Any) -> Config:
    """The same experiment on existing directories; nothing else of `data` is given."""
    values = make_config(root, target_dir, seed=3, training=TRAINING, name="existing").model_dump(mode="json")
    values["data"] = {"shards": [str(place) for place in places], "max_length": 128, **data}
    return Config.model_validate(values)


def train(config: Config, run: RunDirectory) -> TrainResult:
    def on_step(metrics: StepMetrics, total: int) -> None:
        pass

    assembly.check(config)
    return anyio.run(partial(assembly.train, config, run, anyio.Event(), on_step))


def weights(run: RunDirectory) -> str:
    path = latest(run.checkpoints)
    assert path is not None
    return file_sha256(path / "weights.safetensors")


def resave(source: Path, directory: Path) -> Path:
    """As a user may have it: other types, other names, three files of several record batches."""
    import datasets

    rows = datasets.load_from_disk(str(source))[:]
    features = datasets.Features({"ids": datasets.List(datasets.Value("int64")), "mask": datasets.List(datasets.Value("bool"))})
    columns = {"ids": rows["input_ids"], "mask": rows["loss_mask"]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(directory), num_shards=3)
    return directory


def test_existing_directories_train_the_same_drafter(own: RunDirectory, tmp_path: Path, target_dir: Path) -> None:
    theirs = resave(own.shards, tmp_path / "theirs")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in theirs.iterdir()}
    for name, place, columns in (("ours", own.shards, ("input_ids", "loss_mask")), ("theirs", theirs, ("ids", "mask"))):
        (tmp_path / f"run-{name}").mkdir()
        config = from_shards(tmp_path / f"run-{name}", target_dir, [place], ids_column=columns[0], mask_column=columns[1])
        run = open_run(config)
        train(config, run)
        assert weights(run) == weights(own), name
        assert not run.shards.exists()
    assert {path: (path.stat().st_mtime_ns, path.stat().st_mode) for path in theirs.iterdir()} == before


def test_shards_on_s3_train_the_same_drafter(own: RunDirectory, tmp_path: Path, target_dir: Path, s3: str) -> None:
    push_shards(own.shards, s3)
    config = from_shards(tmp_path, target_dir, [s3])
    run = open_run(config)
    train(config, run)
    assert weights(run) == weights(own)
    cached = {path.stem for path in Path(config.places.runs, ".cache").glob("*.arrow")}
    assert cached == {shard.sha256 for shard in read_manifest(own.shards).shards}


def test_evaluation_and_report_know_the_existing_directory(own: RunDirectory, tmp_path: Path, target_dir: Path) -> None:
    theirs = resave(own.shards, tmp_path / "theirs")
    config = from_shards(tmp_path, target_dir, [theirs, own.shards], ids_column="ids", mask_column="mask")
    run = open_run(config)
    train(config, run)
    assembly.export(config, run)
    acceptance = anyio.run(assembly.evaluate, config, run, anyio.Event())
    report = assembly.write_report(config, run, acceptance)
    manifest = read_manifest(own.shards)
    assert report["data"] == {
        "rows": 2 * 24,
        "tokens": 2 * manifest.tokens,
        "supervised": 2 * manifest.supervised,
        "shards": 3 + len(manifest.shards),
    }
    assert report["ledger"]["conversations"]["kept"] == 2 * 24
    assert report["data_fingerprint"] == opening.data_manifest(config, run).fingerprint != manifest.fingerprint
    assert report["acceptance_length_ngram"] >= 1, "the n-gram reference was fitted on the same rows"


def test_a_shard_rewritten_after_the_first_start_ends_the_next_one(own: RunDirectory, tmp_path: Path, target_dir: Path) -> None:
    theirs = shutil.copytree(own.shards, tmp_path / "theirs")
    (theirs / "manifest.json").unlink()
    config = from_shards(tmp_path, target_dir, [theirs])
    run = open_run(config)
    train(config, run)
    path = sorted(theirs.glob("*.arrow"))[2]
    damage_ids(path, 5)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ValueError, match=rf"{path.name}: its sha256 is not the one it had when this run first read it"):
        train(config, run)


def test_a_rewritten_shard_ends_training_with_its_name(own: RunDirectory, tmp_path: Path, target_dir: Path) -> None:
    copy = shutil.copytree(own.shards, tmp_path / "copy")
    path = sorted(copy.glob("*.arrow"))[1]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    config = from_shards(tmp_path, target_dir, [copy])
    run = open_run(config)
    with pytest.raises(ValueError, match=rf"{path.name}: its sha256 is not the manifest's"):
        train(config, run)


def test_shards_of_another_tokenizer_are_refused_with_both_names(own: RunDirectory, tmp_path: Path, target_dir: Path) -> None:
    other = shutil.copytree(target_dir, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = from_shards(tmp_path, other, [own.shards])
    with pytest.raises(ValueError, match=rf"tokenized for {target_dir}, this run's target is {other}: .*\(tokenizer\.json\)"):
        train(config, open_run(config))


@pytest.mark.parametrize("data", [{}, {"conversations": "a.jsonl", "shards": ["b"]}])
def test_exactly_one_origin(tmp_path: Path, target_dir: Path, data: dict[str, Any]) -> None:
    values = make_config(tmp_path, target_dir).model_dump(mode="json")
    with pytest.raises(ValueError, match=r"exactly one of data\.conversations and data\.shards must be given, (none|both)"):
        Config.model_validate({**values, "data": data})


@pytest.mark.parametrize(
    ("place", "words"),
    [("nowhere/data", "nowhere/data: no such directory"), ("gs://b/k", "gs://b/k: the scheme gs:// is not supported")],
)
def test_places_are_checked_before_anything_is_written(tmp_path: Path, target_dir: Path, place: str, words: str) -> None:
    config = from_shards(tmp_path, target_dir, [place])
    with pytest.raises(ValueError, match=words):
        assembly.check(config)
    assert not Path(config.places.runs).exists()
