"""Exports that must not be measured: of another target, cut short, not finite."""

import json
from pathlib import Path

import pytest
import torch

from dflash_core.decoding.export import write_export
from dflash_core.decoding.fit import check_fit, export_fault
from dflash_core.modeling.target import read_facts
from dflash_core.records import TargetFacts
from tests.fakes import make_drafter, make_shape


@pytest.fixture
def facts(target_dir: Path) -> TargetFacts:
    return read_facts(str(target_dir))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    drafter = make_drafter()
    return write_export(tmp_path / "export", drafter.state_dict(), drafter.shape, target="heron")


def test_a_good_export_has_no_fault(export: Path, facts: TargetFacts) -> None:
    assert export_fault(export, facts) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size 64, the target has 32"),
        ({"vocab_size": 301}, "vocab_size 301, the target has 300"),
        ({"num_target_layers": 6}, "num_target_layers 6, the target has 4"),
        ({"target_layer_ids": (1, 5)}, r"target_layer_ids \[5\], the target has layers 0..3"),
        ({"mask_token_id": 300}, "mask_token_id 300, the target has 300 embedding rows"),
    ],
)
def test_a_drafter_of_another_target_is_named(changes: dict[str, int], message: str, facts: TargetFacts) -> None:
    with pytest.raises(ValueError, match=rf"here: a drafter of another target: {message}"):
        check_fit(make_shape(**changes), facts, export="here")


@pytest.mark.parametrize("kept", [0, 7, 500, -1])
def test_a_file_cut_short_is_a_fault(kept: int, export: Path, facts: TargetFacts) -> None:
    weights = export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert export_fault(export, facts)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_a_fault(name: str, export: Path, facts: TargetFacts) -> None:
    (export / name).unlink()
    assert name in str(export_fault(export, facts))


def test_a_config_that_is_no_json_is_a_fault(export: Path, facts: TargetFacts) -> None:
    (export / "config.json").write_text('{"block_size": ')
    assert export_fault(export, facts)
    config = {"architectures": ["LlamaForCausalLM"]}
    (export / "config.json").write_text(json.dumps(config))
    assert "is this a DFlash drafter?" in str(export_fault(export, facts))


def test_numbers_that_are_not_finite_are_a_fault(tmp_path: Path, facts: TargetFacts) -> None:
    drafter = make_drafter()
    with torch.no_grad():
        drafter.norm.weight[3] = float("nan")
    export = write_export(tmp_path / "export", drafter.state_dict(), drafter.shape, target="heron")
    assert export_fault(export, facts) == f"{export}: values that are not finite in norm.weight"
