"""flows.parameters: the form of a deployment says what the config says, and both ways of filling it in mean the same."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dflash_core.config import Config
from flows.parameters import Overrides, given
from flows.settings import known_keys, load_config


def shown(schema: dict[str, Any], dotted: str) -> dict[str, Any]:
    """The form's field of a dotted key."""
    field = schema
    for part in dotted.split("."):
        field = schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
        field = field["properties"][part]
    return field


def test_every_field_of_the_run_is_in_the_form_described_optional_and_without_null() -> None:
    schema = Overrides.model_json_schema()
    assert "required" not in str(schema["$defs"]["Training"])
    keys = list(known_keys())
    assert len(keys) > 80
    for key in keys:
        field, model = shown(schema, key), Config
        *sections, name = key.split(".")
        for section in sections:
            model = model.model_fields[section].annotation
        assert field.get("description") == model.model_fields[name].description, key
        assert "default" not in field
        assert "null" not in str(field), key
    assert shown(schema, "training.epochs")["minimum"] == 1
    assert shown(schema, "data.too_long")["enum"] == ["cut", "drop"]


@pytest.mark.parametrize(
    "form, dotted",
    [
        ({"training": {"epochs": 2, "clip": 0.5}}, {"training.epochs": 2, "training.clip": 0.5}),
        ({"name": "other", "training": {"max_steps": None}}, {"name": "other"}),
        ({"training": {"epochs": 3}, "training.max_steps": 9}, {"training.epochs": 3, "training.max_steps": 9}),
        ({}, {}),
    ],
)
def test_form_and_dotted_keys_give_the_same_run(form: dict[str, Any], dotted: dict[str, Any], run_file: Path) -> None:
    expected = load_config(str(run_file), dotted)
    assert load_config(str(run_file), Overrides.model_validate(form)) == expected
    assert load_config(str(run_file), given(Overrides.model_validate(form))) == expected


def test_null_behind_a_dotted_key_unsets(run_file: Path) -> None:
    values = {"training.max_steps": 5}
    assert load_config(str(run_file), Overrides.model_validate(values)).training.max_steps == 5
    run_file.write_text(run_file.read_text().replace("max_steps: null", "max_steps: 5"))
    assert load_config(str(run_file)).training.max_steps == 5
    assert load_config(str(run_file), Overrides.model_validate({"training": {"max_steps": None}})).training.max_steps == 5
    assert load_config(str(run_file), Overrides.model_validate({"training.max_steps": None})).training.max_steps is None


@pytest.mark.parametrize("form", [{"training": {"epoch": 2}}, {"training": {"epochs": 0}}, {"data": {"too_long": "shorten"}}])
def test_what_cannot_be_is_refused_before_a_run(form: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Overrides.model_validate(form)


def test_a_misspelt_dotted_key_names_the_nearest(run_file: Path) -> None:
    with pytest.raises(ValueError, match=r"training\.epoch: unknown key .*did you mean training\.epochs"):
        load_config(str(run_file), Overrides.model_validate({"training.epoch": 2}))
