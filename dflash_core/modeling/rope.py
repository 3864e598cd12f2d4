"""The drafter's rotary schema, from the target's, and its frequencies.

    target's rope_parameters --drafter_rope--> theta, scaling        {"rope_type": "yarn", "factor": 4.0, ...}; None: plain rotary
    head_dim, theta, scaling --frequencies--> inverse frequencies, factor of cos and sin

Queries and keys of the drafter meet each other only, so that serving must turn them as training did, not as the target turns its own.
The drafter turns whole heads, in one dimension, whatever share of its own the target turns, and by the keys that all engines read.
"""

from typing import Any

OPTIONAL = {"beta_fast", "beta_slow", "truncate"}
SCALED = {  # schemas whose frequencies are the same for every length of text: the keys that decide them
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}
PLAIN = {"default", "mrope", "proportional"}  # plain once whole heads are turned by one position


def drafter_rope(rope: dict[str, Any], *, source: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) for a target with these `rope_parameters`, of its full-attention layers where kinds of layers differ.

    Raises ValueError, naming `source`, for a schema that depends on the length of the text (dynamic, longrope) or is not known.
    """
    kinds = {name: own for name, own in rope.items() if isinstance(own, dict)}
    if kinds and "full_attention" not in kinds:
        raise ValueError(f"{source}: rope_parameters of {', '.join(kinds)}, none of full_attention, which the drafter follows")
    own = kinds.get("full_attention", rope)
    kind = own.get("rope_type") or own.get("type") or "default"
    if kind not in PLAIN | SCALED.keys():
        raise ValueError(f"{source}: rope_type {kind} is not supported; {', '.join(sorted(PLAIN | SCALED.keys()))} are")
    scaling = {key: own[key] for key in SCALED.get(kind, ()) if own.get(key) is not None}
    needed = {"rope_theta": own.get("rope_theta"), **{key: scaling.get(key) for key in SCALED.get(kind, ())}}
    if missing := [key for key, value in needed.items() if value is None and key not in OPTIONAL]:
        raise ValueError(f"{source}: rope_parameters {own} without {', '.join(missing)}")
    return float(own["rope_theta"]), {"rope_type": kind, **scaling} if scaling else None


def frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[tuple[float, ...], float]:
    """(inverse frequencies [head_dim / 2] in fp32, factor of cos and sin), as transformers computes those of a Qwen3 model.

    Plain numbers, so that they stay fp32 whatever precision or device the drafter is moved to.
    """
    import torch  # the rest is settings, which flows read without it

    with torch.device("cpu"):
        if scaling is None:
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return tuple((theta**-exponents).tolist()), 1.0
        from transformers import Qwen3Config
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = Qwen3Config(head_dim=head_dim, rope_parameters={**scaling, "rope_theta": theta})
        inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
        return tuple(inverse.float().tolist()), float(factor)
