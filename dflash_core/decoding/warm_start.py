"""Training that starts with the weights of another drafter: `training.warm_start`.

    DIR --open_drafter--> its settings beside the run's --> weights by our names, every tensor left out logged by name

What decides the meaning of the weights must agree; what training adapts to may differ, and is logged.
"""

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_core.decoding.export import check_tensors, export_config
from dflash_core.decoding.layouts import DrafterFiles, check_carried, open_drafter, read_weights
from dflash_core.records import DrafterShape

LOG = logging.getLogger(__name__)
OTHER_TARGET = "that is a drafter of another target"
FIXED = {  # keys of config.json that must agree: how
    "hidden_size": OTHER_TARGET,
    "num_target_layers": OTHER_TARGET,
    "num_hidden_layers": "set drafter.num_layers",
    "intermediate_size": "set drafter.intermediate_size",
    "num_attention_heads": "set drafter.num_heads",
    "num_key_value_heads": "set drafter.num_kv_heads",
    "head_dim": "set drafter.head_dim",
    "dflash_config.target_layer_ids": "set drafter.target_layer_ids",
    "dflash_config.mask_token_id": "set drafter.mask_token_id",
    "sample_from_anchor": "its slot k predicts the token after anchor + k",
    "dflash_config.shift_label": "its slot k predicts the token after anchor + k",
}
SAID = ("dflash_config.target_layer_ids", "dflash_config.mask_token_id")  # weights without them can mean anything
ADAPTED = (
    "block_size", "rope_theta", "rope_scaling", "layer_types", "sliding_window", "is_causal", "dflash_config.use_swa",
    "dflash_config.final_logit_softcapping", "rms_norm_eps", "max_position_embeddings", "vocab_size",
)  # fmt: skip


def check_start(directory: Path, shape: DrafterShape) -> DrafterFiles:
    """The drafter to start from, its weights not read yet. Raises ValueError, with every difference, where it does not fit `shape`."""
    files = open_drafter(directory)
    check_carried(files)
    theirs, ours = _settings(files.config), _settings(export_config(shape, ""))
    if silent := [key for key in SAID if key not in theirs]:
        raise ValueError(
            f"training.warm_start {directory}: its config.json does not say {', '.join(silent)}; write what it was trained with"
        )
    wrong = [
        f"{key} {theirs[key]}, here {ours.get(key)}: {remedy}"
        for key, remedy in FIXED.items()
        if key in theirs and (theirs[key] or None) != (ours.get(key) or None)
    ]
    if wrong:
        raise ValueError(f"training.warm_start {directory} does not fit this run: {'; '.join(wrong)}")
    try:
        check_tensors({name: tensor.shape for name, tensor in files.tensors.items()}, shape)
    except ValueError as error:
        raise ValueError(f"training.warm_start {directory}: {error}") from error
    return files


def start_weights(directory: Path, shape: DrafterShape) -> dict[str, Tensor]:
    """Its weights in fp32. Raises ValueError as `check_start`; logs what differs, and each tensor that is left out."""
    files = check_start(directory, shape)
    weights = read_weights(files)
    LOG.info("training starts from %s: %d tensors, %s layout", directory, len(weights), files.layout)
    for reason in sorted(set(files.skipped.values())):
        names = sorted(name for name, why in files.skipped.items() if why == reason)
        LOG.warning("%s: left out, %s: %s", directory, reason, ", ".join(names))
    theirs, ours = _settings(files.config), _settings(export_config(shape, ""))
    for key in ADAPTED:
        if key in theirs and (theirs[key] or None) != (ours.get(key) or None):
            LOG.warning("%s has %s %s, this run %s: training has to adapt to it", directory, key, theirs[key], ours.get(key))
    return weights


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of a config.json, those of dflash_config with their prefix; a window only where a layer has one.

    What no format writes where it is not so, the from-anchor layout, is always there.
    """
    nested = config.get("dflash_config", {})
    flat = {"sample_from_anchor": nested.get("sample_from_anchor"), **config}
    flat |= {f"dflash_config.{key}": value for key, value in nested.items()}
    if "sliding_attention" not in (flat.get("layer_types") or ()):
        for key in ("sliding_window", "is_causal"):
            flat.pop(key, None)
    return flat
