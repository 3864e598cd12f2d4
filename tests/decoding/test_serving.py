"""What engines would do with drafter directories of ours, of other trainers, and with one thing wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_core.decoding.export import write_export
from dflash_core.decoding.serving import check_export
from tests.fakes import VOCAB, make_drafter, make_shape


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return write_export(tmp_path / "export", make_drafter().state_dict(), make_shape(), target="some/target")


def wrong(directory: Path) -> list[tuple[str, str, str]]:
    """(engine, level, text) of everything that is not a note."""
    return [(f.engine, f.level, f.text) for f in check_export(directory) if f.level != "note"]


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")


def test_our_own_export_is_served_as_trained_by_all(export: Path) -> None:
    assert wrong(export) == []
    notes = {finding.engine: finding.text for finding in check_export(export)}
    assert notes == {
        "vLLM": 'serve with {"method": "dflash", "num_speculative_tokens": 3}',
        "SGLang": "serve with --speculative-algorithm DFLASH --speculative-num-draft-tokens 4",
    }


Change = Callable[[dict[str, Any]], Any]
CONFIGS: list[tuple[Change, str, str, str]] = [
    (lambda c: c["dflash_config"].pop("target_layer_ids"), "all", "differs", "target_layer_ids is missing"),
    (lambda c: c["dflash_config"].pop("mask_token_id"), "all", "differs", "mask_token_id is missing"),
    (lambda c: c["dflash_config"].update(mask_token_id=VOCAB), "all", "refused", f"{VOCAB} is outside the vocabulary of {VOCAB}"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]), "all", "refused", r"2 tapped layers of 32 need \[32, 64\]"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 3]), "all", "differs", r"the last layer \(3\)"),
    (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "vLLM", "differs", "counted one higher"),
    (lambda c: c.update(architectures=["DFlashModel"]), "vLLM, SGLang", "refused", "they know DFlashDraftModel"),
    (lambda c: c.pop("num_target_layers"), "transformers (z-lab)", "refused", "num_target_layers is missing"),
    (lambda c: [c.pop("rope_theta"), c.pop("rope_parameters")], "all", "differs", "no rope_theta"),
    (lambda c: c.pop("rope_theta"), "MLX and older loaders", "differs", "only inside rope_parameters"),
    (lambda c: c.update(rope_theta=1e6), "all", "differs", "contradict each other"),
    (
        lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "all",
        "differs",
        "rope_scaling .* contradict each",
    ),
    (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), "all", "differs", "a part of each head"),
    (lambda c: c.update(layer_types=["full_attention"]), "all", "refused", "1 entries for 2 layers"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 2), "transformers (z-lab)", "differs", "under sdpa"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 2, is_causal=False), "SGLang", "differs", "always causal"),
    (lambda c: c["dflash_config"].update(use_swa=True), "SGLang", "differs", "become full attention"),
    (lambda c: c.update(is_causal=True), "SGLang", "differs", "is_causal is not read"),
    (lambda c: [c.pop("block_size"), c["dflash_config"].pop("block_size")], "all", "differs", "SGLang takes 16"),
    (lambda c: c.pop("block_size"), "transformers (z-lab)", "refused", "missing at the top level"),
    (lambda c: c.update(block_size=8), "all", "differs", "block_size 8 and dflash_config.block_size 4"),
    (lambda c: c.update(sample_from_anchor=True), "all", "differs", "from-anchor layout"),
]


@pytest.mark.parametrize(("change", "engine", "level", "text"), CONFIGS)
def test_one_wrong_setting_is_found_and_nothing_else(export: Path, change: Change, engine: str, level: str, text: str) -> None:
    edit(export, change)
    ((found_engine, found_level, found_text),) = wrong(export)
    assert (found_engine, found_level) == (engine, level)
    assert re.search(text, found_text)


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "logit_softcap": 30.0}, []),
        ({"sliding_layers": (0,), "sliding_window": 8}, [("transformers (z-lab)", "see the whole context and block under sdpa")]),
        ({"sliding_layers": (0,), "sliding_window": 8, "sliding_causal": False}, [("SGLang", "always causal inside the block")]),
        ({"sample_from_anchor": True}, [("all", "slot k predicts the token after anchor")]),
    ],
)
def test_our_variants_are_served_as_trained_but_where_it_is_said(
    tmp_path: Path, variant: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    shape = make_shape(**variant)
    directory = write_export(tmp_path / "export", make_drafter(**variant).state_dict(), shape, target="some/target")
    said = wrong(directory)
    assert [engine for engine, _, _ in said] == [engine for engine, _ in found]
    assert all(words in text for (_, _, text), (_, words) in zip(said, found, strict=True))


def test_missing_and_unknown_tensors_are_named_by_engine(export: Path) -> None:
    edit_tensors(export, lambda t: t.update({"layers.1.mlp.up_projection.weight": t.pop("layers.1.mlp.up_proj.weight")}))
    assert wrong(export) == [
        ("SGLang", "differs", "missing tensors stay random, silently: layers.1.mlp.up_proj.weight"),
        ("vLLM, transformers", "refused", "missing tensors: layers.1.mlp.up_proj.weight"),
        ("SGLang", "differs", "unknown tensors are left out, silently: layers.1.mlp.up_projection.weight"),
        ("vLLM", "refused", "unknown tensors: layers.1.mlp.up_projection.weight"),
    ]


def test_another_trainers_names_are_understood_and_refused(export: Path) -> None:
    edit_tensors(
        export, lambda t: t.update({"context_proj.weight": t.pop("fc.weight"), "final_norm.weight": t.pop("norm.weight")})
    )
    ((engine, level, text),) = wrong(export)
    assert (engine, level) == ("all", "refused")
    assert text.endswith("context_proj.weight, final_norm.weight")


def test_the_speculators_format_is_understood(export: Path) -> None:
    """Its layer ids are counted one higher and its sizes are nested; embedding and head are copies of the target's."""
    sizes = json.loads((export / "config.json").read_text())
    aux = {"aux_hidden_state_layer_ids": [1, 2, 3], "mask_token_id": 3, "block_size": 4, "dtype": "bfloat16"}
    config = {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "transformer_layer_config": sizes, **aux}
    (export / "config.json").write_text(json.dumps(config))
    edit_tensors(export, lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, 32, dtype=torch.bfloat16)}))
    assert wrong(export) == [
        ("transformers (z-lab)", "refused", "speculators format; z-lab's loader, SGLang and MLX do not know it")
    ]
    edit(export, lambda c: c.update(aux_hidden_state_layer_ids=[1, 2]))
    assert "2 tapped layers of 32 need [32, 64]" in wrong(export)[0][2]


def test_a_damaged_file_is_named(export: Path) -> None:
    weights = export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged or incomplete"):
        check_export(export)


def test_what_is_no_drafter_directory_is_refused(tmp_path: Path, export: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        check_export(tmp_path)
    (export / "model.safetensors").rename(export / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no .safetensors file; other formats can run code"):
        check_export(export)
