"""How many parameters a target has and where, from its config alone: one layer of each kind is built without memory.

config.json --read_census--> Census: what a token costs in the layers up to the last tap, and what a replica weighs
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_core.modeling.target import read_config


@dataclass(frozen=True, kw_only=True)
class Census:
    """Parameters of a target. Layers by number; `active` counts of a layer's experts only those that a token meets."""

    embedding: int
    head: int  # as many as the embedding where it is tied to it, though stored once
    tied: bool
    layers: tuple[int, ...]
    active: tuple[int, ...]
    attends: tuple[bool, ...]  # whether the layer looks at all earlier tokens, so that its cost grows with the length
    attention_width: int  # heads x head size


def read_census(path: str) -> Census:
    """The census of `config.json`; no weights are looked for. Raises ValueError as `read_config`."""
    return census(read_config(path))


def census(config: Any) -> Census:
    """The census of a transformers config."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    named = [(kind, number in dense) for number, kind in enumerate(kinds)]
    distinct = list(dict.fromkeys(named))
    small = copy.deepcopy(text)
    small.num_hidden_layers = len(distinct)
    if getattr(text, "layer_types", None):
        small.layer_types = [kind for kind, _ in distinct]
    if dense:
        small.mlp_only_layers = [place for place, (_, is_dense) in enumerate(distinct) if is_dense]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    counted = dict(zip(distinct, map(_count, model.get_decoder().layers), strict=True))
    share = _expert_share(text)
    attending = text.per_layer_config[kinds.index("full_attention")] if getattr(text, "is_heterogeneous", False) else text
    heads = attending.num_attention_heads
    return Census(
        embedding=_count(model.get_input_embeddings())[0],
        head=_count(model.get_output_embeddings())[0],
        tied=bool(text.tie_word_embeddings),
        layers=tuple(counted[name][0] for name in named),
        active=tuple(round(counted[name][0] - (1 - share) * counted[name][1]) for name in named),
        attends=tuple(kind == "full_attention" for kind in kinds),
        attention_width=heads * (getattr(attending, "head_dim", None) or text.hidden_size // heads),
    )


def _count(module: nn.Module) -> tuple[int, int]:
    """(all parameters, those of experts that are chosen token by token)."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if "experts" in name and "shared_expert" not in name)


def _expert_share(config: Any) -> float:
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return config.num_experts_per_tok / experts if experts else 1.0
