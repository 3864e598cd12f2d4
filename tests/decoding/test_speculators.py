"""The speculators format holds the same weights, the target's ends, and layers counted one higher."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_core import assembly
from dflash_core.decoding.export import parse_shape
from dflash_core.decoding.layouts import open_drafter, read_weights
from dflash_core.decoding.speculators import speculators_config, write_speculators
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import read_facts
from dflash_core.records import TrainState
from dflash_core.rundir import open_run
from dflash_core.sizes import resolve
from dflash_core.training.checkpoint import save_checkpoint
from tests.decoding.directories import speculators as by_hand
from tests.fakes import VOCAB, make_config, make_shape, save_target


@pytest.mark.parametrize("tied", [True, False])
def test_read_back_it_is_the_same_drafter_with_copies_of_the_targets_ends(tied: bool, export: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", tie_word_embeddings=tied)
    written = write_speculators(export, tmp_path / "other", target=str(target))
    files = open_drafter(written)
    weights, ours = read_weights(files), load_file(export / "model.safetensors")
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[name], ours[name].float()) for name in ours)
    assert set(files.skipped) == {"embed_tokens.weight", "lm_head.weight"}
    assert parse_shape({**files.config, "num_target_layers": 4}, "here") == make_shape()
    stored, whole = load_file(written / "model.safetensors"), load_file(target / "model.safetensors")
    embedding = whole["model.embed_tokens.weight"].to(torch.bfloat16)
    head = embedding if tied else whole["lm_head.weight"].to(torch.bfloat16)
    assert torch.equal(stored["embed_tokens.weight"], embedding)
    assert torch.equal(stored["lm_head.weight"], head)
    assert torch.equal(embedding, head) == tied
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_its_config_by_hand() -> None:
    config = speculators_config(make_shape(block_size=16, target_layer_ids=(1, 2)), "Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])
    sizes = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": 16,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [2, 3],
        "draft_vocab_size": VOCAB,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 15}],
            "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    assert {key: sizes[key] for key in ("model_type", "hidden_size", "head_dim", "rope_theta", "vocab_size")} == {
        "model_type": "qwen3", "hidden_size": 32, "head_dim": 8, "rope_theta": 10000.0, "vocab_size": VOCAB,
    }  # fmt: skip
    assert sizes["layer_types"] == ["full_attention", "full_attention"]
    assert not {"architectures", "block_size", "dflash_config", "num_target_layers"} & sizes.keys()


def test_it_says_what_others_write_by_hand(export: Path, tmp_path: Path, target_dir: Path) -> None:
    written = open_drafter(write_speculators(export, tmp_path / "other", target=str(target_dir)))
    by_hand(export)
    theirs = open_drafter(export)
    keys = ("hidden_size", "num_hidden_layers", "head_dim", "block_size", "rope_theta", "dflash_config")
    assert {key: written.config[key] for key in keys} == {key: theirs.config[key] for key in keys}


def test_another_targets_ends_are_refused(export: Path, tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", hidden_size=64)
    with pytest.raises(ValueError, match=r"has 300 x 32, embed_tokens.weight of .* is \[300, 64\]; this is a drafter of another"):
        write_speculators(export, tmp_path / "other", target=str(target))
    assert not (tmp_path / "other").exists()


def test_a_run_writes_it_where_it_is_asked_for_and_once(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    weights = new_drafter(resolve(config, read_facts(str(target_dir))), 0).state_dict()
    save_checkpoint(run.checkpoints, TrainState(step=1, position=1, weights=weights, moments={}), depends_on={})
    assembly.export(config, run)
    assert not run.export_speculators.exists()
    asked = make_config(tmp_path, target_dir, export={"speculators": True})
    assert open_run(asked).state == "resume"  # the same experiment
    assembly.export_formats(asked, run)
    first = (run.export_speculators / "config.json").stat().st_mtime_ns
    assembly.export_formats(asked, run)
    assert (run.export_speculators / "config.json").stat().st_mtime_ns == first
    assembly.export(asked, run)
    assert (run.export_speculators / "config.json").stat().st_mtime_ns > first
    verifier = json.loads((run.export_speculators / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target_dir), "architectures": ["Qwen3ForCausalLM"]}
