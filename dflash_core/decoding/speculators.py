"""The export once more, in the format of the speculators library: `export.speculators: true`.

    export/ + the target's embedding and head --write_speculators--> export-speculators/      read back by decoding.layouts

vLLM alone reads it. Sizes stand under `transformer_layer_config`, tapped layers are counted one higher than ours, and the frozen
embedding and head are copied in, so that the directory is complete without the target.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_core.decoding.export import CONFIG, WEIGHTS, export_config, read_shape
from dflash_core.files import replaced_directory
from dflash_core.modeling.target import load_ends
from dflash_core.records import DrafterShape

OUTSIDE = {  # keys that are no layer's
    "architectures", "block_size", "dflash_config", "num_target_layers", "target_model", "sample_from_anchor", "is_causal",
}  # fmt: skip


def speculators_config(shape: DrafterShape, target: str, architectures: list[str]) -> dict[str, Any]:
    """`config.json` of the speculators format; `architectures` are the target's.

    `sliding_window_non_causal` is true where no layer slides, too: vLLM makes every layer causal inside the block without it.
    """
    own = export_config(shape, target)
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layer_ids],
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": None,
        "sample_from_anchor": shape.sample_from_anchor,
        "sliding_window_non_causal": not (shape.sliding_layers and shape.sliding_causal),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {key: value for key, value in own.items() if key not in OUTSIDE},
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": shape.block_size - shape.first_slot}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }


def write_speculators(export: Path, directory: Path, *, target: str) -> Path:
    """The drafter of `export` in `directory`, which is replaced as a whole. Raises ValueError where it is not this target's."""
    from transformers import AutoConfig

    shape, _ = read_shape(export)
    ends = load_ends(target, dtype="bfloat16", device="cpu", attention="auto")
    copies = {}
    for name, module in (("embed_tokens.weight", ends.embed), ("lm_head.weight", ends.head)):
        weight = next(module.parameters()).detach()
        if tuple(weight.shape) != (shape.vocab_size, shape.hidden_size):
            raise ValueError(
                f"{export}: the drafter has {shape.vocab_size} x {shape.hidden_size}, {name} of {target} is {list(weight.shape)}; "
                "this is a drafter of another target"
            )
        copies[name] = weight.to(torch.bfloat16).clone()  # tied ends are one tensor, which the file may hold once only
    config = speculators_config(shape, target, AutoConfig.from_pretrained(target).architectures or [])
    with replaced_directory(directory) as place:
        save_file({**load_file(export / WEIGHTS), **copies}, place / WEIGHTS, metadata={"format": "pt"})
        (place / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory
