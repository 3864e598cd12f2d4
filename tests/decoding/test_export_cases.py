"""Cases H1 to H11 of exporting, and E16 of the mask token: what went wrong silently elsewhere.

H7, windows served as full attention, is in test_serving: what each engine makes of sliding layers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core import assembly
from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.export import export_config, load_export, read_shape, write_export
from dflash_core.decoding.layouts import open_drafter, read_weights
from dflash_core.decoding.serving import check_export
from dflash_core.decoding.speculators import write_speculators
from dflash_core.modeling.anchors import draw_blocks
from dflash_core.modeling.blocks import block_states
from dflash_core.modeling.drafter import Drafter, new_drafter, tensor_shapes
from dflash_core.modeling.target import TargetEnds, read_facts
from dflash_core.records import DrafterShape, TrainState
from dflash_core.rundir import open_run
from dflash_core.sizes import resolve
from dflash_core.training.checkpoint import save_checkpoint
from tests.decoding.directories import edit_config, speculators
from tests.fakes import END_OF_TEXT, IM_END, MASK, VOCAB, make_batch, make_config, make_drafter, make_shape, save_target

PUBLISHED = DrafterShape(  # z-lab/Qwen3-8B-DFlash-b16
    num_layers=5, hidden_size=4096, intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=151936,
    rms_norm_eps=1e-6, rope_theta=1e6, max_positions=40960, block_size=16, mask_token_id=151669,
    target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36,
)  # fmt: skip
LAYER = {
    "input_layernorm": [4096],
    "post_attention_layernorm": [4096],
    "self_attn.q_proj": [4096, 4096],
    "self_attn.k_proj": [1024, 4096],
    "self_attn.v_proj": [1024, 4096],
    "self_attn.o_proj": [4096, 4096],
    "self_attn.q_norm": [128],
    "self_attn.k_norm": [128],
    "mlp.gate_proj": [12288, 4096],
    "mlp.up_proj": [12288, 4096],
    "mlp.down_proj": [4096, 12288],
}


def wrong(directory: Path) -> list[str]:
    return [finding.engine for finding in check_export(directory) if finding.level != "note"]


def test_h1_every_tensor_is_the_trainers_none_is_left_at_its_start_and_dtype_is_what_the_config_says(
    overfitted: tuple[Any, Any, Drafter], tmp_path: Path
) -> None:
    """Neither embedding nor head is shipped; strict loading in a clean process is in test_export."""
    drafter = overfitted[2]
    export = write_export(tmp_path / "export", drafter.state_dict(), drafter.shape, target="heron")
    stored, config = load_file(export / "model.safetensors"), json.loads((export / "config.json").read_text())
    start = new_drafter(drafter.shape, 0).state_dict()
    assert stored.keys() == drafter.state_dict().keys()
    for name, value in drafter.state_dict().items():
        assert torch.equal(stored[name], value.to(torch.bfloat16)), name
        assert not torch.equal(stored[name], start[name].to(torch.bfloat16)), name
    assert (
        {str(tensor.dtype).removeprefix("torch.") for tensor in stored.values()} == {config["dtype"]} == {config["torch_dtype"]}
    )
    assert not any("embed" in name or "head" in name for name in stored)


def test_h2_the_exported_model_drafts_what_the_trainer_drafts(
    overfitted: tuple[list[int], tuple[int, ...], Drafter], target: DecodingTarget, model: Any, tmp_path: Path
) -> None:
    """Five prefixes of the text that the drafter knows by heart: a loop written here, block after block, against all blocks at once."""
    prompt, answer, trained = overfitted
    text, size = [*prompt, *answer], trained.shape.block_size
    export = write_export(tmp_path / "export", trained.state_dict(), trained.shape, target="heron")
    drafter, ends = load_export(export), TargetEnds(model)
    shape, _ = read_shape(export)
    target.start(1)
    with torch.no_grad():
        _, taps = target.forward([text])
        batch = make_batch([(text, [0] * len(prompt) + [1] * len(answer))])
        blocks = draw_blocks(batch, block_size=size, mask_token_id=MASK, num_anchors=64, gamma=1.0, seed=0)
        states = block_states(trained, ends.embed, trained.context(taps), blocks)
        training = {
            int(anchor): ends.head(row[1:]).argmax(-1).tolist()
            for anchor, row in zip(blocks.anchor_positions[0], states[0], strict=True)
        }
        anchors = [place for place in sorted(training) if place + size <= len(text)][::8][:5]
        assert len(anchors) == 5
        for anchor in anchors:
            block = torch.tensor([[text[anchor], *[shape.mask_token_id] * (shape.block_size - 1)]])
            places = torch.arange(anchor, anchor + shape.block_size).unsqueeze(0)
            out = drafter.denoise(ends.embed(block), places, drafter.context(taps[:, :anchor]))
            drafts = ends.head(out[0, 1:]).argmax(-1).tolist()
            assert drafts == training[anchor] == text[anchor + 1 : anchor + size]  # slot k: the token at anchor + k


def test_h2_the_card_states_the_layout_and_the_number_of_speculative_tokens(export: Path) -> None:
    text = (export / "README.md").read_text()
    assert "slot k predicts the token at anchor + k" in text
    assert "(`num_speculative_tokens` 3)" in text


@pytest.mark.parametrize("key", ["target_layer_ids", "mask_token_id"])
def test_h3_taps_and_mask_are_explicit_and_their_absence_is_an_error(key: str, export: Path) -> None:
    nested = json.loads((export / "config.json").read_text())["dflash_config"]
    assert nested.keys() == {"target_layer_ids", "mask_token_id", "block_size"}
    fc = load_file(export / "model.safetensors")["fc.weight"]
    assert len(nested["target_layer_ids"]) * 32 == fc.shape[1]
    assert "(0-based; the output of that decoder layer)" in (export / "README.md").read_text()
    edit_config(export, lambda c: c["dflash_config"].pop(key))
    with pytest.raises(ValueError, match="dflash_config with mask_token_id and target_layer_ids is missing"):
        load_export(export)
    assert wrong(export) == ["all"]


def test_h5_block_size_is_in_both_places_and_two_values_are_an_error(tmp_path: Path) -> None:
    shape = make_shape(block_size=8)
    export = write_export(tmp_path / "export", new_drafter(shape, 0).state_dict(), shape, target="t")
    config = json.loads((export / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == read_shape(export)[0].block_size == 8
    edit_config(export, lambda c: c["dflash_config"].update(block_size=16))
    for read in (load_export, lambda directory: read_weights(open_drafter(directory))):
        with pytest.raises(ValueError, match=r"block_size 8 and dflash_config\.block_size 16"):
            read(export)
    assert wrong(export) == ["all"]


def test_h6_names_and_shapes_are_those_of_a_published_checkpoint() -> None:
    found = {name: list(shape) for name, shape in tensor_shapes(PUBLISHED).items()}
    expected = {f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in LAYER.items()}
    assert found == {**expected, "fc.weight": [4096, 5 * 4096], "hidden_norm.weight": [4096], "norm.weight": [4096]}
    assert len(found) == 58
    config = export_config(PUBLISHED, "Qwen/Qwen3-8B")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["num_target_layers"] == 36


@pytest.mark.parametrize("layout", ["ours", "speculators"])
def test_h6_an_export_named_as_the_target_is_refused_with_a_hint(layout: str, export: Path, tmp_path: Path) -> None:
    """transformers would open it as a Qwen3 with random embedding and head."""
    if layout == "speculators":
        speculators(export)
    with pytest.raises(ValueError, match=r"target\.path '.*export' is a DFlash drafter, not a standalone model.*some/target"):
        assembly.check(make_config(tmp_path, export))


def test_h10_each_format_is_read_by_its_own_readers_and_the_default_is_ours(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir, export={"speculators": True})
    run = open_run(config)
    weights = make_drafter(num_layers=1, intermediate_size=64).state_dict()
    save_checkpoint(run.checkpoints, TrainState(step=1, position=1, weights=weights, moments={}), depends_on={})
    assembly.export(config, run)
    assert not make_config(tmp_path, target_dir).export.speculators
    assert wrong(run.export) == []
    assert wrong(run.export_speculators) == ["transformers (z-lab), SGLang"]  # vLLM's format
    assert load_file(run.export / "model.safetensors").keys() == weights.keys()  # nothing is renamed for the other
    ours, theirs = (read_weights(open_drafter(place)) for place in (run.export, run.export_speculators))
    assert all(torch.equal(ours[name], theirs[name]) for name in weights)


def test_h11_no_attention_setting_travels_with_an_export(tmp_path: Path, target_dir: Path) -> None:
    """What computes attention is of the machine that evaluates: a drafter trained with FlexAttention on CUDA opens on a CPU."""
    config = make_config(tmp_path, target_dir, training={"attention": "flex"}, pipeline={"drafter": "cuda:0"})
    shape = resolve(config, read_facts(str(target_dir)))
    export = write_export(tmp_path / "export", new_drafter(shape, 0).state_dict(), shape, target=str(target_dir))
    stored = (export / "config.json").read_text()
    assert not [word for word in ("flex", "attn_implementation", "cuda") if word in stored]
    drafter = load_export(export)
    with torch.no_grad():
        context = drafter.context(torch.randn(1, 5, 3 * 32))
        assert torch.isfinite(drafter.denoise(torch.randn(1, 4, 32), torch.arange(5, 9).unsqueeze(0), context)).all()


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (None, r"mask_token_id is not set: name a reserved token"),
        (-1, f"mask_token_id -1: outside the target's {VOCAB} embedding rows"),
        (VOCAB, f"mask_token_id {VOCAB}: outside the target's {VOCAB} embedding rows"),
        (IM_END, f"mask_token_id {IM_END} is the target's eos token"),
        (END_OF_TEXT, f"mask_token_id {END_OF_TEXT} is the target's pad token"),
        (1, "mask_token_id 1 is the target's bos token"),
    ],
)
def test_e16_a_mask_token_that_text_can_hold_is_refused(mask: int | None, words: str, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", bos_token_id=1)
    with pytest.raises(ValueError, match=words):
        assembly.check(make_config(tmp_path, target, drafter={"mask_token_id": mask}))


def test_e16_the_same_mask_token_lands_in_the_export(tmp_path: Path, target_dir: Path, export: Path) -> None:
    """One place says it, the config; a drafter to start from with another is refused, with that other id as the remedy."""
    config = make_config(tmp_path, target_dir, drafter={"mask_token_id": 7})
    shape = resolve(config, read_facts(str(target_dir)))
    assert export_config(shape, "t")["dflash_config"]["mask_token_id"] == 7
    started = make_config(
        tmp_path, target_dir, drafter={"num_layers": 2, "intermediate_size": 48, "mask_token_id": 7},
        training={"warm_start": str(export)},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"mask_token_id 3, here 7: set drafter\.mask_token_id"):
        assembly.check(started)


def test_h10_the_speculators_writer_refuses_what_is_no_export(tmp_path: Path, target_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json, so this is no exported drafter"):
        write_speculators(tmp_path / "nowhere", tmp_path / "other", target=str(target_dir))
