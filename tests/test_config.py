"""One Config, complete and checked once: what is refused and how it says so, the identity of an experiment."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dflash_core.config import Config, differences, experiment, fingerprint
from dflash_core.rundir import config_fingerprint
from tests.fakes import make_config


def config(tmp_path: Path, **sections: Any) -> Config:
    return make_config(tmp_path, "target", **sections)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("drafter", "block_size", 1),
        ("drafter", "block_size", 257),
        ("drafter", "head_dim", 7),
        ("training", "learning_rate", "nan"),
        ("training", "learning_rate", float("inf")),
        ("training", "learning_rate", 0),
        ("training", "betas", [0.9, 1.0]),
        ("training", "betas", [0.9, float("nan")]),
        ("training", "clip", float("inf")),
        ("training", "warmup", 1.5),
        ("training", "loss_decay_gamma", 0),
        ("training", "accumulate", 0),
        ("training", "epochs", 0),
        ("training", "learnin_rate", 1e-3),
        ("data", "min_kept", -0.1),
        ("data", "shard_tokens", 2**31),
        ("pipeline", "targets", []),
        ("pipeline", "stall_s", float("nan")),
        ("places", "run", "x"),
    ],
)
def test_wrong_value_or_key_is_one_error_that_names_it(tmp_path: Path, section: str, key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        config(tmp_path, **{section: {key: value}})
    assert {item["loc"][:2] for item in error.value.errors()} == {(section, key)}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "-x", "a b", "x\n"])
def test_a_name_that_is_no_directory_below_runs_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValidationError) as error:
        config(tmp_path, name=name)
    assert error.value.errors()[0]["loc"] == ("name",)


@pytest.mark.parametrize(
    "endpoints, words",
    [
        (["localhost:8000"], "no http(s) address"),
        (["http:///v1"], "no http(s) address"),
        (["http://me:secret@host/v1"], "api_key_env"),
        (["http://a/v1", "http://b/v1", "http://a/v1"], "named twice"),
    ],
)
def test_wrong_endpoints_are_refused_and_no_password_is_repeated(tmp_path: Path, endpoints: list[str], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        config(tmp_path, regeneration={"endpoints": endpoints})
    assert words in str(error.value)
    assert "secret" not in str(error.value)


def test_endpoints_lose_their_last_slash(tmp_path: Path) -> None:
    made = config(tmp_path, regeneration={"endpoints": ["http://a:8000/v1/", "https://b/v1"]})
    assert made.regeneration.endpoints == ("http://a:8000/v1", "https://b/v1")


def test_unknown_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="trainig"):
        config(tmp_path, trainig=3)


def test_rows_and_anchors_must_fit_a_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"tokens_per_batch 100 is below data\.max_length 128.*raise the one or lower"):
        config(tmp_path, training={"tokens_per_batch": 100})
    with pytest.raises(ValidationError, match=r"anchors_per_batch 3 is below training\.anchors_per_row 4"):
        config(tmp_path, training={"anchors_per_batch": 3})
    assert config(tmp_path, training={"tokens_per_batch": 128, "anchors_per_batch": 4}).training.tokens_per_batch == 128


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    run = config(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        run.training.learning_rate = 1.0  # type: ignore[misc]


SAME = [
    {"name": "other"},
    {"places": {"runs": "elsewhere"}},
    {"places": {"mlflow_uri": "http://x"}},
    {"places": {"copies": "s3://bucket/runs"}},
    {"pipeline": {"readers": 3}},
    {"pipeline": {"targets": ["cpu", "cpu"]}},
    {"regeneration": {"temperature": 0.5}},
    {"during_training": {"eval_every": 100}},
    {"export": {"speculators": True}},
]

OTHER = [
    {"seed": 1},
    {"target": {"path": "else"}},
    {"data": {"max_length": 64}},
    {"drafter": {"block_size": 5}},
    {"training": {"learning_rate": 0.5}},
    {"evaluation": {"max_new_tokens": 13}},
]


@pytest.mark.parametrize("change", SAME, ids=str)
def test_identity_leaves_out_name_places_pipeline_and_regeneration(tmp_path: Path, change: dict[str, Any]) -> None:
    assert config_fingerprint(config(tmp_path, **change)) == config_fingerprint(config(tmp_path))


@pytest.mark.parametrize("change", OTHER, ids=str)
def test_identity_holds_everything_else_and_the_difference_names_it(tmp_path: Path, change: dict[str, Any]) -> None:
    old, new = experiment(config(tmp_path)), experiment(config(tmp_path, **change))
    assert fingerprint(old) != fingerprint(new)
    (line,) = differences(old, new)
    ((section, value),) = change.items()
    key, leaf = next(iter(value.items())) if isinstance(value, dict) else ("", value)
    assert line.startswith(f"{section}.{key}".strip("."))
    assert line.endswith(f"-> {leaf!r}")


def test_differences_of_nested_dictionaries() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": {"e": 1}}, "gone": "x"}
    new = {"a": 1, "b": {"c": [1, 3], "d": {"e": 2}}, "came": True}
    assert differences(old, new) == [
        "b.c: [1, 2] -> [1, 3]",
        "b.d.e: 1 -> 2",
        "came: None -> True",
        "gone: 'x' -> None",
    ]
    assert differences(old, old) == []


def test_fingerprint_is_canonical() -> None:
    assert fingerprint({"a": 1, "b": [1.5, None]}) == fingerprint({"b": [1.5, None], "a": 1})
    assert fingerprint({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_copies_go_to_s3_and_nowhere_else(tmp_path: Path) -> None:
    for given, place in (("s3://b/k", "s3://b/k"), ("S3://b/k/", "s3://b/k"), ("s3://b", "s3://b"), (None, None)):
        assert config(tmp_path, places={"copies": given}).places.copies == place
    for given in ("b/k", "/b/k", "file:///b/k", "s3:/b/k", "s3://", "gs://b/k", ""):
        with pytest.raises(ValidationError, match=r"no place on S3; write s3://bucket/prefix, or leave it out"):
            config(tmp_path, places={"copies": given})
