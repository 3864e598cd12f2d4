"""What engines would do with drafter directories of ours, of other trainers, and with one thing wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.decoding.card import sglang_command, vllm_command
from dflash_core.decoding.export import write_export
from dflash_core.decoding.serving import check_export
from dflash_core.decoding.speculators import write_speculators
from tests.decoding.directories import LAYOUTS, edit_config, edit_tensors
from tests.fakes import VOCAB, make_drafter, make_shape

OLDER = "MLX and older loaders"
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
UP = "layers.1.mlp.up_proj.weight"


def wrong(directory: Path) -> list[tuple[str, str, str]]:
    """(engine, level, text) of everything that is not a note."""
    return [(f.engine, f.level, f.text) for f in check_export(directory) if f.level != "note"]


def notes(directory: Path) -> list[tuple[str, str]]:
    return [(f.engine, f.text) for f in check_export(directory) if f.level == "note"]


def test_our_own_export_is_served_as_trained_by_all(export: Path) -> None:
    assert wrong(export) == []
    assert notes(export) == [
        ("transformers (z-lab)", "no auto_map: opened by z-lab's own class, not by AutoModel; the other engines need none"),
        (
            "transformers generate",
            "takes it from load_export of this package; opened by AutoModel it would be a Qwen3 with random embedding and head",
        ),
        ("vLLM", f"block_size is not read, the option counts: {vllm_command('some/target', str(export), 4)}"),
        ("SGLang", f"counts the anchor, too: {sglang_command('some/target', str(export), 4)}"),
    ]
    assert '"num_speculative_tokens": 3}' in notes(export)[2][1]
    assert "--speculative-num-draft-tokens 4" in notes(export)[3][1]


def scaled(config: dict[str, Any], *, older: float) -> None:
    """A rotary schema in both spellings, with the factor of the older one."""
    config["rope_parameters"].update(rope_type="yarn", factor=4.0)
    config["rope_scaling"] = {"rope_type": "yarn", "factor": older}


def test_a_schema_that_both_spellings_say_is_right(export: Path) -> None:
    edit_config(export, lambda c: scaled(c, older=4.0))
    assert wrong(export) == []


Change = Callable[[dict[str, Any]], Any]
CONFIGS: list[tuple[Change, str, str, str]] = [
    (lambda c: c["dflash_config"].pop("target_layer_ids"), "all", "differs", "target_layer_ids is missing"),
    (lambda c: c["dflash_config"].pop("mask_token_id"), "all", "differs", "mask_token_id is missing"),
    (lambda c: c["dflash_config"].update(mask_token_id=None), "all", "differs", "mask_token_id is missing"),
    (lambda c: c["dflash_config"].update(mask_token_id=VOCAB), "all", "refused", f"{VOCAB} is outside the vocabulary of {VOCAB}"),
    (lambda c: c["dflash_config"].update(mask_token_id=-1), "all", "refused", "-1 is outside the vocabulary"),
    (lambda c: c.update(mask_token_id=9), "all", "differs", "mask_token_id 9 and dflash_config.mask_token_id 3 contradict"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1]), "all", "refused", r"2 tapped layers of 32 need \[32, 64\]"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 3]), "all", "differs", r"the last layer \(3\)"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 4]), "all", "refused", r"\[4\]: the target has layers 0\.\.3"),
    (lambda c: c["dflash_config"].update(target_layer_ids=[-1, 1, 2]), "all", "refused", r"\[-1\]: the target has layers"),
    (
        lambda c: c.update(target_layer_ids=[1, 2, 3]),
        "all",
        "differs",
        r"\[1, 2, 3\] and dflash_config.target_layer_ids \[0, 1, 2\]",
    ),
    (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]), "vLLM", "differs", "counted one higher"),
    (lambda c: c["dflash_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]), "vLLM", "differs", "counted one higher"),
    (lambda c: c.update(architectures=["DFlashModel"]), "vLLM, SGLang", "refused", "they know DFlashDraftModel"),
    (lambda c: c.update(model_type="dflash"), "vLLM, SGLang", "refused", "model_type dflash; their config loaders know qwen3"),
    (lambda c: c.update(hidden_act="gelu"), "SGLang", "refused", "hidden_act gelu"),
    (lambda c: c["dflash_config"].update(projector_type="domino"), "vLLM", "differs", "its head is left out"),
    (lambda c: c.pop("num_target_layers"), "transformers (z-lab)", "refused", "num_target_layers is missing"),
    (
        lambda c: c.pop("num_key_value_heads"),
        "all",
        "differs",
        "num_key_value_heads missing: engines take those of a plain Qwen3",
    ),
    (lambda c: c.pop("head_dim"), "all", "differs", "head_dim missing"),
    (lambda c: [c.pop("rope_theta"), c.pop("rope_parameters")], "all", "differs", "no rope_theta"),
    (lambda c: c.pop("rope_theta"), OLDER, "differs", "only inside rope_parameters"),
    (lambda c: c.update(rope_theta=1e6), "all", "differs", "contradict each other"),
    (
        lambda c: c.update(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "all",
        "differs",
        "rope_scaling .* contradict each",
    ),
    (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), "all", "differs", "a part of each head"),
    (lambda c: c["rope_parameters"].update(rope_type="yarn", factor=4.0), OLDER, "differs", "yarn scaling only inside"),
    (lambda c: c.update(rope_scaling={"type": "yarn", "factor": 4.0}), "all", "differs", "rope_scaling .*yarn.* contradict each"),
    (lambda c: scaled(c, older=2.0), "all", "differs", "rope_scaling .*2.0.* and rope_parameters .*4.0"),
    (lambda c: c.update(layer_types=["full_attention"]), "all", "refused", "1 entries for 2 layers"),
    (lambda c: c.pop("layer_types"), "transformers (z-lab)", "refused", "layer_types is missing"),
    (lambda c: c.update(layer_types=["full_attention", "chunked"]), "all", "refused", "layer_types chunked; engines know"),
    (lambda c: c.update(SLIDING), "transformers (z-lab)", "differs", "under sdpa"),
    (lambda c: c.update(SLIDING, is_causal=False), "SGLang", "differs", "always causal"),
    (lambda c: c["dflash_config"].update(use_swa=True), "SGLang, transformers (z-lab)", "differs", "become full attention"),
    (lambda c: c.update(is_causal=True), "SGLang, transformers (z-lab)", "differs", "is_causal is not read"),
    (lambda c: [c.pop("block_size"), c["dflash_config"].pop("block_size")], "all", "differs", "SGLang takes 16"),
    (lambda c: c.pop("block_size"), "transformers (z-lab)", "refused", "missing at the top level"),
    (lambda c: c.update(block_size=8), "all", "differs", "block_size 8 and dflash_config.block_size 4"),
    (lambda c: c.update(sample_from_anchor=True), "all", "differs", "from-anchor layout"),
    (lambda c: c["dflash_config"].update(shift_label=True), "all", "differs", "from-anchor layout"),
]


@pytest.mark.parametrize(("change", "engine", "level", "text"), CONFIGS)
def test_one_wrong_setting_is_found_and_nothing_else(export: Path, change: Change, engine: str, level: str, text: str) -> None:
    edit_config(export, change)
    ((found_engine, found_level, found_text),) = wrong(export)
    assert (found_engine, found_level) == (engine, level)
    assert re.search(text, found_text)


TENSORS: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (lambda t: t.update({UP: t[UP].T}), r"layers\.1\.mlp\.up_proj\.weight is \[32, 48\]; the config asks for \[48, 32\]"),
    (
        lambda t: t.update({"fc.weight": t["fc.weight"][:, :64]}),
        r"fc\.weight is \[32, 64\]; 3 tapped layers of 32 need \[32, 96\]",
    ),
    (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), "tensors are F8_E4M3, and nothing says how to read them"),
]


@pytest.mark.parametrize(("change", "text"), TENSORS)
def test_one_wrong_tensor_is_found_and_nothing_else(export: Path, change: Callable[[dict[str, Tensor]], Any], text: str) -> None:
    edit_tensors(export, change)
    ((engine, level, found),) = wrong(export)
    assert (engine, level) == ("all", "refused")
    assert re.search(text, found)


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
    edit_tensors(export, lambda t: t.update({"layers.1.mlp.up_projection.weight": t.pop(UP)}))
    assert wrong(export) == [
        ("SGLang", "differs", f"missing tensors stay random, silently: {UP}"),
        ("vLLM, transformers (z-lab)", "refused", f"missing tensors: {UP}"),
        ("SGLang", "differs", "unknown tensors are left out, silently: layers.1.mlp.up_projection.weight"),
        ("vLLM", "refused", "unknown tensors: layers.1.mlp.up_projection.weight"),
    ]


def test_copies_and_other_precisions_are_notes(export: Path) -> None:
    edit_tensors(export, lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, 32), UP: t[UP].float()}))
    assert wrong(export) == []
    assert {text for engine, text in notes(export) if engine == "all"} == {
        "dtype says bfloat16, the tensors are BF16, F32: engines convert them",
        "not the drafter's own: lm_head.weight, a copy of the target's head",
    }


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("older", set()),
        ("sharded", set()),
        ("prefix", {("all", "refused")}),
        ("encoder", {("all", "refused")}),
        ("model-optimizer", {("all", "refused")}),
        ("torchspec", {("all", "refused"), ("all", "differs"), ("vLLM, SGLang", "refused"), ("vLLM, transformers (z-lab)", "refused"),
                       ("transformers (z-lab)", "refused")}),
        ("speculators", {("transformers (z-lab), SGLang", "refused")}),
    ],
)  # fmt: skip
def test_other_layouts_are_understood_and_each_engine_judged(layout: str, expected: set[tuple[str, str]], export: Path) -> None:
    LAYOUTS[layout](export)
    assert {(engine, level) for engine, level, _ in wrong(export)} == expected


def test_other_names_are_listed_as_stored(export: Path) -> None:
    edit_tensors(
        export, lambda t: t.update({"context_proj.weight": t.pop("fc.weight"), "final_norm.weight": t.pop("norm.weight")})
    )
    assert ("all", "refused") in {(engine, level) for engine, level, _ in wrong(export)}
    assert any(text.endswith("context_proj.weight, final_norm.weight") for _, _, text in wrong(export))


# ---- the speculators format ------------------------------------------------------------------------------------------


@pytest.fixture
def speculators(export: Path) -> Path:
    LAYOUTS["speculators"](export)
    return export


VLLM_ALONE = (
    "transformers (z-lab), SGLang",
    "refused",
    "speculators format, which vLLM alone reads; MLX does not know it either",
)


def test_our_own_of_the_speculators_format_is_served_by_vllm(export: Path, tmp_path: Path, target_dir: Path) -> None:
    written = write_speculators(export, tmp_path / "other", target=str(target_dir))
    assert wrong(written) == [VLLM_ALONE]
    assert [engine for engine, _ in notes(written)] == ["transformers generate", "vLLM"]


@pytest.mark.parametrize(
    ("change", "engine", "level", "text"),
    [
        (lambda c: c.update(aux_hidden_state_layer_ids=[1, 2]), "all", "refused", r"2 tapped layers of 32 need \[32, 64\]"),
        (lambda c: c.update(aux_hidden_state_layer_ids=[0, 1, 2]), "all", "refused", r"\[-1\]: the target has layers 0\.\.\?"),
        (lambda c: c.pop("aux_hidden_state_layer_ids"), "all", "differs", "target_layer_ids is missing"),
        (lambda c: c.update(sliding_window_non_causal=False), "vLLM", "differs", "every layer is causal inside the block"),
        (lambda c: c.update(sample_from_anchor=True), "all", "differs", "from-anchor layout"),
        (lambda c: c["transformer_layer_config"].update(rope_theta=1.0), "all", "differs", "rope_theta 1.0 and rope_parameters"),
    ],
)
def test_one_wrong_setting_of_the_speculators_format(
    speculators: Path, change: Change, engine: str, level: str, text: str
) -> None:
    edit_config(speculators, change)
    own = [finding for finding in wrong(speculators) if finding != VLLM_ALONE]
    ((found_engine, found_level, found_text),) = own
    assert (found_engine, found_level) == (engine, level)
    assert re.search(text, found_text)


def test_a_reduced_vocabulary_needs_its_map_and_vllm(speculators: Path) -> None:
    edit_config(speculators, lambda c: c.update(draft_vocab_size=128))
    expected = (
        "SGLang, transformers (z-lab)",
        "differs",
        f"a vocabulary of 128 of {VOCAB} tokens is not read: drafts are other tokens",
    )
    assert set(wrong(speculators)) == {VLLM_ALONE, expected}
    edit_tensors(speculators, lambda t: t.pop("d2t"))
    assert ("vLLM", "refused", "a reduced vocabulary without d2t") in wrong(speculators)


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_windows_that_engines_see_otherwise(export: Path) -> None:
    edit_config(export, lambda c: c.update(SLIDING, sliding_window=None))
    assert ("all", "differs", "sliding layers without sliding_window: each engine takes another width, or none") in wrong(export)
    edit_config(export, lambda c: [c.update(SLIDING), c["dflash_config"].update(swa_window_size=32)])
    assert ("vLLM", "differs", "dflash_config.swa_window_size 32 goes before sliding_window 64") in wrong(export)
    edit_config(export, lambda c: [c.update(MIXED), c["dflash_config"].pop("swa_window_size")])
    assert ("vLLM", "full and sliding layers together need VLLM_USE_V2_MODEL_RUNNER=1") in notes(export)
    assert [engine for engine, _, _ in wrong(export)] == ["transformers (z-lab)"]


# ---- what is no drafter directory ------------------------------------------------------------------------------------


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


def test_remote_code_is_a_note(export: Path) -> None:
    edit_config(export, lambda c: c.update(auto_map={"AutoModel": "dflash.DFlashDraftModel"}))
    assert wrong(export) == []
    assert any("auto_map names code" in text for _, text in notes(export))
    assert json.loads((export / "config.json").read_text())["auto_map"]
