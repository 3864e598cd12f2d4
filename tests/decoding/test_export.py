"""The export opens strictly elsewhere, holds the masters cast to bf16, and what does not fit is refused in words."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core.decoding.export import load_export, read_shape, write_export
from tests.fakes import make_drafter, make_shape

H, INNER, Q, KV, DIM, K = 32, 48, 32, 16, 8, 3
EXPECTED = {
    "fc.weight": [H, K * H],
    "hidden_norm.weight": [H],
    "norm.weight": [H],
    "layers.0.input_layernorm.weight": [H],
    "layers.0.post_attention_layernorm.weight": [H],
    "layers.0.self_attn.q_proj.weight": [Q, H],
    "layers.0.self_attn.k_proj.weight": [KV, H],
    "layers.0.self_attn.v_proj.weight": [KV, H],
    "layers.0.self_attn.o_proj.weight": [H, Q],
    "layers.0.self_attn.q_norm.weight": [DIM],
    "layers.0.self_attn.k_norm.weight": [DIM],
    "layers.0.mlp.gate_proj.weight": [INNER, H],
    "layers.0.mlp.up_proj.weight": [INNER, H],
    "layers.0.mlp.down_proj.weight": [H, INNER],
    "layers.1.input_layernorm.weight": [H],
    "layers.1.post_attention_layernorm.weight": [H],
    "layers.1.self_attn.q_proj.weight": [Q, H],
    "layers.1.self_attn.k_proj.weight": [KV, H],
    "layers.1.self_attn.v_proj.weight": [KV, H],
    "layers.1.self_attn.o_proj.weight": [H, Q],
    "layers.1.self_attn.q_norm.weight": [DIM],
    "layers.1.self_attn.k_norm.weight": [DIM],
    "layers.1.mlp.gate_proj.weight": [INNER, H],
    "layers.1.mlp.up_proj.weight": [INNER, H],
    "layers.1.mlp.down_proj.weight": [H, INNER],
}


@pytest.fixture
def masters() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in make_drafter().state_dict().items()}


@pytest.fixture
def export(tmp_path: Path, masters: dict[str, Tensor]) -> Path:
    return write_export(tmp_path / "export", masters, make_shape(), target="some/target")


CHILD = """
import json, sys
import torch
from pathlib import Path
from dflash_core.decoding.export import load_export
drafter = load_export(Path(sys.argv[1]), dtype=torch.bfloat16)
torch.save(drafter.state_dict(), sys.argv[2])
print(json.dumps({"training": drafter.training, "grad": any(p.requires_grad for p in drafter.parameters())}))
"""


def test_opens_strictly_in_a_clean_process(export: Path, masters: dict[str, Tensor], tmp_path: Path) -> None:
    out = tmp_path / "seen.pt"
    command = [sys.executable, "-c", CHILD, str(export), str(out)]
    child = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
    assert json.loads(child.stdout) == {"training": False, "grad": False}
    seen = torch.load(out)
    assert seen.keys() == masters.keys()
    for name, value in masters.items():
        assert seen[name].dtype == torch.bfloat16
        assert torch.equal(seen[name], value.to(torch.bfloat16)), name


def test_names_shapes_and_precision_of_the_file(export: Path, masters: dict[str, Tensor]) -> None:
    assert sorted(path.name for path in export.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    tensors = load_file(export / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == EXPECTED
    assert len(EXPECTED) == 11 * 2 + 3
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name], masters[name].to(torch.bfloat16)) for name in masters)


def test_config_says_what_every_engine_reads(export: Path) -> None:
    config = json.loads((export / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 4,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1, 2], "block_size": 4},
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    # would take priority over target_layer_ids in vLLM, with another counting
    assert "eagle_aux_hidden_state_layer_ids" not in config


def test_config_opens_as_a_transformers_config(export: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(export)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert (config.head_dim, config.num_hidden_layers, config.layer_types) == (8, 2, ["full_attention"] * 2)


def test_shape_comes_back_as_it_went_in(export: Path) -> None:
    assert read_shape(export) == (make_shape(), "some/target")


def test_readme_names_target_layers_and_draft_tokens(export: Path) -> None:
    text = (export / "README.md").read_text()
    assert "`some/target`, not a standalone model" in text
    assert "layers 0, 1, 2" in text
    assert '"num_speculative_tokens": 3}' in text
    assert "--speculative-num-draft-tokens 4\n" in text


def test_a_second_export_replaces_the_first_whole(export: Path, masters: dict[str, Tensor]) -> None:
    (export / "stray.bin").write_text("x")
    write_export(export, {name: value + 1 for name, value in masters.items()}, make_shape(), target="t")
    assert not (export / "stray.bin").exists()
    assert [path.name for path in export.parent.iterdir()] == ["export"]
    assert torch.equal(load_file(export / "model.safetensors")["norm.weight"], (masters["norm.weight"] + 1).to(torch.bfloat16))


Change = Callable[[dict[str, Tensor]], Any]
WRONG: list[tuple[Change, str]] = [
    (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"missing \['layers.1.mlp.up_proj.weight'\]"),
    (lambda t: t.update({"embed_tokens.weight": torch.zeros(2, 2)}), r"unknown \['embed_tokens.weight'\]"),
    (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"wrong shape \['fc.weight is \[32, 64\], not \[32, 96\]'\]"),
    (
        lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}),
        r"missing \['norm.weight'\], unknown \['model.norm.weight'\]",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_tensor_set_is_refused_when_written(
    tmp_path: Path, masters: dict[str, Tensor], change: Change, message: str
) -> None:
    change(masters)
    with pytest.raises(ValueError, match=message):
        write_export(tmp_path / "export", masters, make_shape(), target="t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_tensor_set_is_refused_when_read(export: Path, change: Change, message: str) -> None:
    tensors = load_file(export / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, export / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_export(export)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("dflash_config"), "dflash_config with mask_token_id and target_layer_ids is missing"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "dflash_config with mask_token_id and target_layer_ids is missing"),
        (lambda c: c["dflash_config"].update(block_size=8), r"block_size 4 and dflash_config.block_size 8 differ"),
        (lambda c: c.update(block_size=16), r"block_size 16 and dflash_config.block_size 4 differ"),
        (lambda c: c.pop("block_size"), "block_size missing"),
        (lambda c: [c.pop("head_dim"), c.pop("rope_theta")], "head_dim, rope_theta missing"),
        (lambda c: c.update(num_hidden_layers=3), r"missing \['layers.2"),
    ],
)
def test_a_wrong_config_is_refused(export: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    config = json.loads((export / "config.json").read_text())
    change(config)
    (export / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_export(export)


def test_a_directory_without_config_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config.json, so this is no exported drafter"):
        load_export(tmp_path)


def test_the_drafter_that_is_loaded_computes_what_was_trained(export: Path) -> None:
    """bf16 weights in fp32 arithmetic, against the masters rounded by hand."""
    rounded = make_drafter()
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
        taps, embeddings = torch.randn(1, 5, K * H), torch.randn(1, 4, H)
        positions = torch.arange(5, 9).unsqueeze(0)
        loaded = load_export(export)
        expected = rounded(embeddings, positions, rounded.context(taps))
        assert torch.equal(loaded(embeddings, positions, loaded.context(taps)), expected)
