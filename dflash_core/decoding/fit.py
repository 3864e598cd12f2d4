"""Whether an exported drafter can be measured and served with a target: sizes, taps, tensors, finite numbers."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError

from dflash_core.decoding.export import load_export
from dflash_core.records import DrafterShape, TargetFacts


def check_fit(shape: DrafterShape, facts: TargetFacts, *, export: str) -> None:
    """Raises ValueError where the drafter in `export` was made for another target than `facts` describe."""
    wanted = {
        "hidden_size": (shape.hidden_size, facts.hidden_size),
        "vocab_size": (shape.vocab_size, facts.vocab_size),
        "num_target_layers": (shape.num_target_layers, facts.num_layers),
    }
    wrong = [f"{name} {own}, the target has {its}" for name, (own, its) in wanted.items() if own != its]
    if outside := [layer for layer in shape.target_layer_ids if not 0 <= layer < facts.num_layers]:
        wrong.append(f"target_layer_ids {outside}, the target has layers 0..{facts.num_layers - 1}")
    if not 0 <= shape.mask_token_id < facts.vocab_size:
        wrong.append(f"mask_token_id {shape.mask_token_id}, the target has {facts.vocab_size} embedding rows")
    if wrong:
        raise ValueError(f"{export}: a drafter of another target: {'; '.join(wrong)}")


def export_fault(directory: Path, facts: TargetFacts) -> str | None:
    """What is wrong with an export, None where it loads as a server would load it, holds finite numbers and fits the target."""
    try:
        drafter = load_export(directory)
        check_fit(drafter.shape, facts, export=str(directory))
    except (ValueError, TypeError, KeyError, OSError, SafetensorError, json.JSONDecodeError) as error:
        return str(error) or type(error).__name__
    broken = [name for name, tensor in drafter.state_dict().items() if not torch.isfinite(tensor).all()]
    return f"{directory}: values that are not finite in {', '.join(broken)}" if broken else None
