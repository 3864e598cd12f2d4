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


LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "truncate": False}
SLIDING = {"sliding_layers": (0,), "sliding_window": 8}
VARIANTS: list[dict[str, Any]] = [
    {"rope_scaling": LINEAR},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": YARN},
    SLIDING,
    {**SLIDING, "sliding_layers": (0, 1), "sliding_causal": False},
    {"sample_from_anchor": True, "logit_softcap": 30.0},
    {**SLIDING, "rope_scaling": YARN, "sample_from_anchor": True, "logit_softcap": 30.0},
]


def exported(directory: Path, **variant: Any) -> Path:
    return write_export(directory, make_drafter(**variant).state_dict(), make_shape(**variant), target="t")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_comes_back_as_it_went_in_and_computes_the_same(tmp_path: Path, variant: dict[str, Any]) -> None:
    directory = exported(tmp_path / "export", **variant)
    assert read_shape(directory)[0] == make_shape(**variant)
    assert load_export(directory).rotary.inverse == make_drafter(**variant).rotary.inverse


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_reads_windows_and_rotary_schema_of_a_variant(tmp_path: Path, variant: dict[str, Any]) -> None:
    from transformers import AutoConfig, Qwen3Model
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = AutoConfig.from_pretrained(exported(tmp_path / "export", **variant))
    assert config.layer_types == [
        "sliding_attention" if i in variant.get("sliding_layers", ()) else "full_attention" for i in (0, 1)
    ]
    assert config.sliding_window == variant.get("sliding_window")
    assert [layer.self_attn.sliding_window for layer in Qwen3Model(config).layers] == [
        8 if i in variant.get("sliding_layers", ()) else None for i in (0, 1)
    ]
    positions = torch.arange(0, 500, 7).unsqueeze(0)
    for theirs, ours in zip(
        Qwen3RotaryEmbedding(config)(torch.zeros(1), positions), make_drafter(**variant).rotary(positions), strict=True
    ):
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_windows_labels_and_bounds_are_declared_where_engines_look(tmp_path: Path) -> None:
    def said(directory: Path) -> dict[str, Any]:
        config = json.loads((directory / "config.json").read_text())
        nested = {f"dflash_config.{key}": value for key, value in config["dflash_config"].items()}
        keys = ("layer_types", "sliding_window", "use_sliding_window", "is_causal", "sample_from_anchor")
        inner = ("causal", "sample_from_anchor", "final_logit_softcapping")
        return {
            key: value for key, value in {**config, **nested}.items() if key in (*keys, *(f"dflash_config.{i}" for i in inner))
        }

    kinds = ["sliding_attention", "full_attention"]
    windows = {"layer_types": kinds, "sliding_window": 8, "use_sliding_window": True}
    assert said(exported(tmp_path / "causal", **SLIDING)) == windows
    not_causal = {"is_causal": False, "dflash_config.causal": False}
    assert said(exported(tmp_path / "not", **SLIDING, sliding_causal=False)) == {**windows, **not_causal}
    full = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
    anchor = {"sample_from_anchor": True, "dflash_config.sample_from_anchor": True}
    assert said(exported(tmp_path / "anchor", sample_from_anchor=True)) == {**full, **anchor}
    assert said(exported(tmp_path / "cap", logit_softcap=30.0)) == {**full, "dflash_config.final_logit_softcapping": 30.0}


def test_both_spellings_of_a_rotary_schema_are_written(tmp_path: Path) -> None:
    config = json.loads((exported(tmp_path / "export", rope_scaling=YARN, rope_theta=5e5) / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"], config["rope_parameters"]) == (5e5, YARN, {**YARN, "rope_theta": 5e5})


def test_what_engines_serve_otherwise_is_in_the_readme_and_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = (exported(tmp_path / "causal", **SLIDING) / "README.md").read_text()
    assert "- layers 0 see the last 8 tokens\n" in text
    assert not caplog.records
    text = (exported(tmp_path / "not", **SLIDING, sliding_causal=False) / "README.md").read_text()
    assert "SGLang does not read it and serves another drafter" in text
    assert "SGLang does not read it" in caplog.text
    text = (exported(tmp_path / "anchor", sample_from_anchor=True) / "README.md").read_text()
    assert "4 draft tokens a pass (`num_speculative_tokens` 4); slot k predicts the token at anchor + k + 1" in text
    assert "has the layout in its dspark method only" in text
    assert "--speculative" not in text
    assert "would accept next to nothing" in caplog.text


WRONG_VARIANTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c.update(num_hidden_layers=3), "layer_types .* of 3 layers"),
    (lambda c: c.update(layer_types=["full_attention", "linear_attention"]), "each must be full_attention or sliding_attention"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 2), "sliding_window None, below the block_size 4"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=3), "sliding_window 3, below the block_size 4"),
    (lambda c: c.update(is_causal=True), "is_causal true with full layers"),
    (lambda c: c["dflash_config"].update(causal=True), "is_causal true with full layers"),
    (lambda c: c.update(rope_theta=5e5), "rope_theta 500000.0 and .* contradict each other"),
    (lambda c: c.update(rope_scaling=LINEAR), "contradict each other"),
    (lambda c: c["rope_parameters"].update(rope_type="dynamic", factor=2.0), "config.json: rope_type dynamic is not supported"),
    (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), "partial_rotary_factor in .*; drafters turn whole heads"),
    (lambda c: c["rope_parameters"].update({**YARN, "mscale": 0.7}), "mscale in .* the keys that all engines read"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_VARIANTS)
def test_a_config_that_contradicts_itself_is_refused(export: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    config = json.loads((export / "config.json").read_text())
    change(config)
    (export / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_shape(export)


def test_settings_of_other_trainers_are_understood(export: Path) -> None:
    """Windows of all layers by use_swa, a schema in the old spelling alone, no kinds of layers at all."""
    path = export / "config.json"
    ours = json.loads(path.read_text())
    nested = {**ours["dflash_config"], "use_swa": True, "swa_window_size": 64, "causal": False}
    path.write_text(json.dumps({**ours, "dflash_config": nested}))
    shape = read_shape(export)[0]
    assert (shape.sliding_layers, shape.sliding_window, shape.sliding_causal) == ((0, 1), 64, False)
    nested.pop("causal")
    path.write_text(json.dumps({**ours, "dflash_config": nested}))
    assert read_shape(export)[0] == shape
    path.write_text(json.dumps({**ours, "dflash_config": {**nested, "causal": True}}))
    assert read_shape(export)[0].sliding_causal
    old = {key: value for key, value in ours.items() if key not in ("rope_parameters", "layer_types", "sliding_window")}
    path.write_text(json.dumps({**old, "rope_scaling": {"type": "linear", "factor": 2.0}}))
    assert read_shape(export)[0] == make_shape(rope_scaling=LINEAR)


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
        (lambda c: [c.update(num_hidden_layers=3), c.pop("layer_types")], r"missing \['layers.2"),
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
        expected = rounded.denoise(embeddings, positions, rounded.context(taps))
        assert torch.equal(loaded.denoise(embeddings, positions, loaded.context(taps)), expected)
