"""Drafter directories as other trainers write them, made from an export of ours by hand; every one holds the same drafter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fakes import VOCAB

Tensors = dict[str, Tensor]


def edit_config(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    """Changes model.safetensors in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")


def rename(directory: Path, new_name: Callable[[str], str], *, more: Tensors | None = None) -> None:
    """Gives every tensor another name, and adds others."""
    path = directory / "model.safetensors"
    save_file({**{new_name(name): value for name, value in load_file(path).items()}, **(more or {})}, path)


def copies() -> Tensors:
    """Embedding and head, as trainers that freeze copies of them write."""
    return {"embed_tokens.weight": torch.zeros(VOCAB, 32), "lm_head.weight": torch.ones(VOCAB, 32)}


def prefixed(directory: Path) -> None:
    rename(directory, lambda name: f"model.{name}")


def encoder(directory: Path) -> None:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    rename(directory, lambda name: names.get(name, name))


def model_optimizer(directory: Path) -> None:
    """A training checkpoint: the drafter is a module beside the target, whose tensors have names like the drafter's."""
    target = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 32), "model.norm.weight": torch.zeros(32)}
    table = {"dflash_module.rotary_emb.inv_freq": torch.zeros(4)}
    rename(directory, lambda name: f"dflash_module.{name}", more={**target, **table, "lm_head.weight": torch.zeros(VOCAB, 32)})


def torchspec(directory: Path) -> None:
    """Taps are counted by num_target_layers, settings stand at the top, head_dim follows from the hidden size."""
    names = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    rename(
        directory,
        lambda name: f"{names.get(name.split('.')[0], name.split('.')[0])}.{name.split('.', 1)[1]}",
        more={"embed_tokens.weight": torch.zeros(VOCAB, 32)},
    )

    def change(config: dict[str, Any]) -> None:
        own = config.pop("dflash_config")
        for key in ("head_dim", "rope_parameters", "layer_types", "block_size"):
            config.pop(key)
        config.update(
            architectures=["DFlashDraftModel"], model_type="dflash", target_num_hidden_layers=config["num_target_layers"]
        )
        config.update(num_target_layers=3, target_layer_ids=own["target_layer_ids"], mask_token_id=own["mask_token_id"])

    edit_config(directory, change)


def speculators(directory: Path) -> None:
    """Layers counted one higher, sizes nested, copies of the target's ends, and maps of the whole vocabulary."""
    maps = {"t2d": torch.ones(VOCAB, dtype=torch.bool), "d2t": torch.zeros(VOCAB, dtype=torch.int64)}
    rename(directory, str, more={**copies(), **maps})
    sizes = json.loads((directory / "config.json").read_text())
    own = sizes.pop("dflash_config")
    for key in ("block_size", "num_target_layers", "architectures"):
        sizes.pop(key)
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": own["block_size"],
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "draft_vocab_size": VOCAB,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "dtype": "bfloat16",
        "transformer_layer_config": sizes,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": own["block_size"] - 1}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    (directory / "config.json").write_text(json.dumps(config))


def sharded(directory: Path) -> None:
    """Two files and an index of who is where."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    places: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[:7], sorted(tensors)[7:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file)
        places |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def older(directory: Path) -> None:
    """Before the settings were nested twice: block_size at the top alone, one spelling of the rotary base."""

    def change(config: dict[str, Any]) -> None:
        config["dflash_config"].pop("block_size")
        for key in ("rope_parameters", "target_model", "dtype"):
            config.pop(key)

    edit_config(directory, change)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "ours": lambda directory: None,
    "older": older,
    "prefix": prefixed,
    "encoder": encoder,
    "model-optimizer": model_optimizer,
    "torchspec": torchspec,
    "speculators": speculators,
    "sharded": sharded,
}
