"""What makes one drafter of the same sizes another model, as `config.json` of an export says it, and back.

    DrafterShape --declared--> top-level keys, keys of dflash_config        --read_variants--> the same fields of DrafterShape
                 --notes-----> what must be known to serve it, some of which no engine does (unserved)

Kinds of layers, rotary schema, label layout, bounded logits. What all engines take for granted is not written: they make sliding
layers causal within the block and full ones not, and one `is_causal` for both kinds would change one of them.
"""

from typing import Any

from dflash_core.modeling.rope import drafter_rope
from dflash_core.records import DrafterShape

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = "vLLM serves layers of both kinds with VLLM_USE_V2_MODEL_RUNNER=1"
NOT_CAUSAL = "sliding layers see their whole block (`is_causal` false): vLLM serves that, SGLang does not read it and serves another drafter"
FROM_ANCHOR = (
    "slot k predicts the token at anchor + k + 1 (`sample_from_anchor`): engines read slot k of a DFlash drafter as the token at "
    "anchor + k and would accept next to nothing; vLLM's newer runner refuses it and has the layout in its dspark method only"
)
NOT_READ_BY_ALL = {
    "partial_rotary_factor": 1.0,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
}  # and no effect


def declared(shape: DrafterShape) -> tuple[dict[str, Any], dict[str, Any]]:
    """(top-level keys, keys of dflash_config) of an export."""
    top: dict[str, Any] = {
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rope_parameters": {**(shape.rope_scaling or {"rope_type": "default"}), "rope_theta": shape.rope_theta},
        "layer_types": [SLIDING if layer in shape.sliding_layers else FULL for layer in range(shape.num_layers)],
        "sliding_window": shape.sliding_window,
        "use_sliding_window": shape.sliding_window is not None,
        "max_window_layers": shape.num_layers,
    }
    nested: dict[str, Any] = {}
    if not shape.sliding_causal:
        top["is_causal"] = nested["causal"] = False
    if shape.sample_from_anchor:
        top["sample_from_anchor"] = nested["sample_from_anchor"] = True
    if shape.logit_softcap is not None:
        nested["final_logit_softcapping"] = shape.logit_softcap
    return top, nested


def unserved(shape: DrafterShape) -> list[str]:
    """What engines would serve otherwise than it was trained."""
    found = {NOT_CAUSAL: not shape.sliding_causal, FROM_ANCHOR: shape.sample_from_anchor}
    return [text for text, true in found.items() if true]


def notes(shape: DrafterShape) -> list[str]:
    """What who serves the drafter must know besides its sizes."""
    windows = f"layers {', '.join(map(str, shape.sliding_layers))} see the last {shape.sliding_window} tokens"
    mixed = 0 < len(shape.sliding_layers) < shape.num_layers
    found = {windows: bool(shape.sliding_layers), MIXED: mixed}
    return [*(text for text, true in found.items() if true), *unserved(shape)]


def read_variants(config: dict[str, Any], *, source: str) -> dict[str, Any]:
    """Those fields of DrafterShape from a `config.json`. Raises ValueError, naming `source`, where it contradicts itself.

    Windows are vLLM's: `dflash_config.use_swa` makes all layers slide where none is named, and these are not causal unless that is said.
    """
    nested, layers = config["dflash_config"], config["num_hidden_layers"]
    types, window = config.get("layer_types") or [FULL] * layers, nested.get("swa_window_size", config.get("sliding_window"))
    named = SLIDING in types
    if nested.get("use_swa") and not named:
        types = [SLIDING] * layers
    if len(types) != layers or set(types) - {FULL, SLIDING}:
        raise ValueError(f"{source}: layer_types {types} of {layers} layers; each must be {FULL} or {SLIDING}")
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
    if sliding and (window is None or window < config["block_size"]):
        raise ValueError(f"{source}: sliding layers with sliding_window {window}, below the block_size {config['block_size']}")
    causal = config.get("is_causal", nested.get("causal"))
    if causal and len(sliding) < layers:
        raise ValueError(
            f"{source}: is_causal true with full layers, which would be causal within the block; that is not supported"
        )
    return {
        "rope_scaling": _scaling(config, source),
        "logit_softcap": nested.get("final_logit_softcapping"),
        "sliding_layers": sliding,
        "sliding_window": window if sliding else None,
        "sliding_causal": not sliding or (named if causal is None else bool(causal)),
        "sample_from_anchor": bool(config.get("sample_from_anchor", nested.get("sample_from_anchor", False))),
    }


def _scaling(config: dict[str, Any], source: str) -> dict[str, Any] | None:
    """The rotary schema, which both spellings must agree on."""
    spellings = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    found = {key for own in spellings.values() for key, value in own.items() if value != NOT_READ_BY_ALL.get(key, value)}
    if found:
        raise ValueError(
            f"{source}: {', '.join(sorted(found))} in {spellings}; drafters turn whole heads, by the keys that all engines read"
        )
    read = [drafter_rope({"rope_theta": config["rope_theta"], **own}, source=source) for own in spellings.values()]
    if any(own != (config["rope_theta"], read[0][1]) for own in read):
        raise ValueError(f"{source}: rope_theta {config['rope_theta']} and {spellings} contradict each other")
    return read[0][1] if read else None
