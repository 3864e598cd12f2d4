"""The drafter as serving engines load it: `config.json`, `model.safetensors` in bf16, `README.md`.

    weights (fp32 masters) --write_export--> DIR --load_export--> Drafter (strict: every tensor, no other)

The layout is z-lab's DFlash format, in the superset that transformers, vLLM and SGLang read: block size in both places, rope
base in both spellings, layer types spelled out. The target's embedding and head are not in it.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_core.decoding.card import CARD, card
from dflash_core.decoding.variants import declared, read_variants, unserved
from dflash_core.files import replaced_directory
from dflash_core.modeling.drafter import Drafter, tensor_shapes
from dflash_core.records import DrafterShape

LOG = logging.getLogger(__name__)
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SIZES = {  # field of DrafterShape: key of config.json
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_positions": "max_position_embeddings",
    "block_size": "block_size",
    "num_target_layers": "num_target_layers",
}


def export_config(shape: DrafterShape, target: str) -> dict[str, Any]:
    """`config.json` of an export."""
    top, nested = declared(shape)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            "block_size": shape.block_size,
            **nested,
        },
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        **top,
        "max_position_embeddings": shape.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "target_model": target,
    }


def write_export(directory: Path, weights: dict[str, Tensor], shape: DrafterShape, *, target: str) -> Path:
    """fp32 masters as a bf16 export; replaces an older one of the same name as a whole. Raises ValueError on a wrong tensor set."""
    check_tensors({name: tuple(tensor.shape) for name, tensor in weights.items()}, shape)
    narrow = {name: tensor.detach().cpu().to(torch.bfloat16).contiguous() for name, tensor in sorted(weights.items())}
    with replaced_directory(directory) as beside:
        save_file(narrow, beside / WEIGHTS, metadata={"format": "pt"})
        (beside / CONFIG).write_text(json.dumps(export_config(shape, target), indent=2) + "\n", encoding="utf-8")
        (beside / CARD).write_text(card(shape, target), encoding="utf-8")
    for note in unserved(shape):
        LOG.warning("%s: %s", directory, note)
    return directory


def check_tensors(found: dict[str, tuple[int, ...]], shape: DrafterShape) -> None:
    """Raises ValueError where names or shapes are not exactly the 11 L + 3 of the format."""
    wanted = tensor_shapes(shape)
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    wrong = [f"{name} is {list(found[name])}, not {list(size)}" for name, size in wanted.items() if found.get(name, size) != size]
    if missing or extra or wrong:
        raise ValueError(f"not the tensors of this drafter: missing {missing}, unknown {extra}, wrong shape {wrong}")


def read_shape(directory: Path) -> tuple[DrafterShape, str]:
    """(sizes, target) of an export. Raises ValueError where something a server needs is absent or contradicts itself."""
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(f"{directory}: no {CONFIG}, so this is no exported drafter")
    config = json.loads(path.read_text(encoding="utf-8"))
    return parse_shape(config, str(path)), config.get("target_model", "")


def parse_shape(config: dict[str, Any], path: str) -> DrafterShape:
    """Sizes from a config.json of our format. Raises ValueError as `read_shape`."""
    nested = config.get("dflash_config")
    if not isinstance(nested, dict) or {"mask_token_id", "target_layer_ids"} - nested.keys():
        raise ValueError(f"{path}: dflash_config with mask_token_id and target_layer_ids is missing; is this a DFlash drafter?")
    if absent := [key for key in SIZES.values() if key not in config]:
        raise ValueError(f"{path}: {', '.join(absent)} missing; is this a DFlash drafter?")
    if nested.get("block_size", config["block_size"]) != config["block_size"]:
        raise ValueError(f"{path}: block_size {config['block_size']} and dflash_config.block_size {nested['block_size']} differ")
    return DrafterShape(
        **{field: config[key] for field, key in SIZES.items()},
        mask_token_id=nested["mask_token_id"],
        target_layer_ids=tuple(nested["target_layer_ids"]),
        **read_variants(config, source=path),
    )


def load_export(directory: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Drafter:
    """The exported drafter, its bf16 values in `dtype`. Raises ValueError on any missing, unknown or misshapen tensor."""
    shape, _ = read_shape(directory)
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, shape)
    drafter = Drafter(shape)
    drafter.load_state_dict(tensors, strict=True)
    return drafter.to(device, dtype).eval().requires_grad_(False)
