"""Every common layout of a drafter directory gives the same drafter; what ours cannot have is refused in words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_core.decoding.export import parse_shape
from dflash_core.decoding.layouts import open_drafter, our_name, read_weights
from tests.decoding.directories import LAYOUTS, edit_config, edit_tensors, sharded
from tests.fakes import VOCAB, make_shape

TARGETS = "the target's own"
EMBEDDING, HEAD, MAP = (
    "a copy of the target's embedding",
    "a copy of the target's head",
    "a map of the vocabulary, which is the target's",
)
SKIPPED: dict[str, dict[str, str]] = {
    "torchspec": {"embed_tokens.weight": EMBEDDING},
    "speculators": {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD, "t2d": MAP, "d2t": MAP},
    "model-optimizer": {
        "model.layers.0.self_attn.q_proj.weight": TARGETS,
        "model.norm.weight": TARGETS,
        "lm_head.weight": TARGETS,
        "dflash_module.rotary_emb.inv_freq": "a table of rotary positions, which rope_theta gives",
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_tensors_and_names_what_it_leaves_out(
    layout: str, export: Path, masters: dict[str, Tensor]
) -> None:
    LAYOUTS[layout](export)
    files = open_drafter(export)
    weights = read_weights(files)
    assert weights.keys() == masters.keys()
    for name, value in masters.items():
        assert weights[name].dtype == torch.float32
        assert torch.equal(weights[name], value.to(torch.bfloat16).float()), name
    assert files.skipped == SKIPPED.get(layout, {})
    assert files.layout == (layout if layout in ("torchspec", "speculators") else "dflash")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_the_same_sizes(layout: str, export: Path) -> None:
    """A speculators config does not say how many layers the target has, one of TorchSpec not the block size."""
    LAYOUTS[layout](export)
    config = open_drafter(export).config
    absent = {"speculators": {"num_target_layers": 4}, "torchspec": {"block_size": 4}}.get(layout, {})
    assert not absent.keys() & config.keys()
    assert parse_shape({**config, **absent}, "here") == make_shape()


def test_taps_of_torchspec_that_are_not_written_follow_from_its_counts(export: Path) -> None:
    """Five taps of a target of 36 layers."""
    LAYOUTS["torchspec"](export)
    edit_config(export, lambda c: [c.pop("target_layer_ids"), c.update(num_target_layers=5, target_num_hidden_layers=36)])
    config = open_drafter(export).config
    assert config["dflash_config"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert config["num_target_layers"] == 36


def test_rotary_base_of_a_schema_by_kind_of_layer(export: Path) -> None:
    schema = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    edit_config(export, lambda c: [c.pop("rope_theta"), c.update(rope_parameters=schema)])
    assert open_drafter(export).config["rope_theta"] == 1e6


def test_a_setting_that_is_null_is_not_said(export: Path) -> None:
    edit_config(export, lambda c: c["dflash_config"].update(mask_token_id=None, block_size=None))
    config = open_drafter(export).config
    assert config["dflash_config"] == {"target_layer_ids": [0, 1, 2], "block_size": 4}  # the top level says that, too
    edit_config(export, lambda c: c.update(mask_token_id=5))
    assert open_drafter(export).config["dflash_config"]["mask_token_id"] == 5


def test_names() -> None:
    assert our_name("dflash_module.layers.3.mlp.up_proj.weight") == "layers.3.mlp.up_proj.weight"
    assert our_name("model.final_norm.weight") == "norm.weight"
    assert our_name("layers.0.final_norm.weight") == "layers.0.final_norm.weight"  # only as a beginning


ConfigChange, TensorChange = Callable[[dict[str, Any]], Any], Callable[[dict[str, Tensor]], Any]
UP = "layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"layers.0.self_attn.q_proj.bias": torch.zeros(32)}), r"biases: layers.0.self_attn.q_proj.bias"),
        (lambda t: t.update({"layers.0.self_attn.qkv_proj.weight": torch.zeros(64, 32)}), r"have to be split first: layers.0"),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), rf"no BF16, F16, F32: {UP} F8_E4M3"),
    ],
)
def test_tensors_that_ours_cannot_have_are_refused(export: Path, change: TensorChange, message: str) -> None:
    edit_tensors(export, change)
    with pytest.raises(ValueError, match=message):
        read_weights(open_drafter(export))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(draft_vocab_size=128), f"a vocabulary of 128 of the target's {VOCAB} tokens"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act gelu, not silu"),
        (lambda c: c.update(block_size=8), "block_size 8 and dflash_config.block_size 4 contradict each other"),
        (lambda c: c.update(mask_token_id=7), "mask_token_id 7 and dflash_config.mask_token_id 3 contradict"),
        (
            lambda c: c.update(target_layer_ids=[1, 2]),
            r"target_layer_ids \[1, 2\] and dflash_config.target_layer_ids \[0, 1, 2\]",
        ),
        (lambda c: c.update(rope_theta=1e6), r"rope_theta 1000000.0 and rope_parameters.rope_theta 10000.0 contradict"),
    ],
)
def test_settings_that_ours_cannot_have_are_refused(export: Path, change: ConfigChange, message: str) -> None:
    edit_config(export, change)
    with pytest.raises(ValueError, match=message):
        read_weights(open_drafter(export))


def test_pickled_weights_are_not_opened(export: Path) -> None:
    torch.save(load_file(export / "model.safetensors"), export / "pytorch_model.bin")
    (export / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors file; other formats can run code.*save the weights as"):
        open_drafter(export)


def test_two_names_of_one_tensor_are_refused(export: Path) -> None:
    edit_tensors(export, lambda t: t.update({"model.norm.weight": torch.zeros(32)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight and norm\.weight are both norm\.weight"):
        open_drafter(export)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / "model-00002-of-00002.safetensors").unlink(),
            "index.json names model-00002-of-00002.safetensors, which is not",
        ),
        (lambda d: (d / "config.json").write_text('{"block_size": '), "config.json: no JSON"),
        (lambda d: (d / "config.json").unlink(), "no config.json, so this is no drafter directory"),
    ],
)
def test_a_directory_that_is_not_whole_says_what_is_missing(export: Path, damage: Callable[[Path], Any], message: str) -> None:
    sharded(export)
    damage(export)
    with pytest.raises(ValueError, match=message):
        open_drafter(export)


def test_a_tensor_that_only_the_index_has_is_named(export: Path) -> None:
    sharded(export)
    path = export / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layers.2.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names tensors that its files do not hold: layers\.2\.mlp\.up_proj\.weight"):
        open_drafter(export)
