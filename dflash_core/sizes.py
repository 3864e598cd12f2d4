"""What follows from a config and the target: taps, head sizes, the mask token, the bytes of a micro-batch, the steps of a run.

Config  +  TargetFacts (the target's own config)  --resolve--> DrafterShape      derived and checked here, and nowhere else
"""

import itertools
import math

from dflash_core.config import Config, DrafterConfig, TrainingConfig
from dflash_core.records import DrafterShape, TargetFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
MUON_STEPS = 5  # of Newton and Schulz an update
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # fp32 tensors like the parameter that it keeps
EVALUATED_BLOCKS = 64  # of a validation row, at most: their logits exist together while a snapshot is evaluated

# Loss decay of the DFlash paper (appendix A.1) by block size; other sizes take the nearest listed one.
PAPER_GAMMA = {7: 4.0, 8: 4.0, 10: 5.0, 16: 7.0}


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers tapped by the reference rule: first 1, last T-3, evenly spread, rounded half to even (z-lab/dflash)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def paper_gamma(block_size: int) -> float:
    """Decay constant of the paper for the nearest block size it names."""
    return PAPER_GAMMA[min(PAPER_GAMMA, key=lambda known: (abs(known - block_size), known))]


def resolve(config: Config, target: TargetFacts) -> DrafterShape:
    """The drafter's exact sizes for this target. Raises ValueError where the two do not fit."""
    drafter = config.drafter
    ids = drafter.target_layer_ids
    if ids is None:
        ids = default_target_layer_ids(target.num_layers, drafter.num_taps or drafter.num_layers)
    if fault := _tap_fault(ids, target.num_layers):
        by_rule = drafter.target_layer_ids is None
        remedy = "; the default rule does not suit this target, set drafter.target_layer_ids" if by_rule else ""
        raise ValueError(f"drafter.target_layer_ids {list(ids)}: {fault} (the target has {target.num_layers} layers){remedy}")
    _check_mask_token(drafter.mask_token_id, target)
    heads = drafter.num_heads or target.num_heads
    kv_heads = drafter.num_kv_heads or target.num_kv_heads
    if heads % kv_heads:
        raise ValueError(f"drafter.num_heads {heads} is no multiple of drafter.num_kv_heads {kv_heads}")
    if config.data.max_length > target.max_positions:
        raise ValueError(
            f"data.max_length {config.data.max_length} is above the target's {target.max_positions} positions; lower it"
        )
    sliding = _sliding_layers(drafter)
    shape = DrafterShape(
        num_layers=drafter.num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=drafter.intermediate_size or target.intermediate_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=drafter.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_positions=target.max_positions,
        block_size=drafter.block_size,
        mask_token_id=int(drafter.mask_token_id or 0),
        target_layer_ids=tuple(ids),
        num_target_layers=target.num_layers,
        rope_scaling=target.rope_scaling,
        logit_softcap=target.logit_softcap,
        sliding_layers=sliding,
        sliding_window=drafter.sliding_window,
        sliding_causal=drafter.sliding_causal,
        sample_from_anchor=drafter.sample_from_anchor,
    )
    check_ahead_bytes(config, shape)
    return shape


def _tap_fault(ids: tuple[int, ...], num_layers: int) -> str | None:
    last = num_layers - 1
    if not ids:
        return "empty, name at least one layer"
    if last in ids:
        return f"layer {last} is the last, seen by engines before and by transformers after the final norm; tap up to {last - 1}"
    if any(i < 0 or i > last for i in ids):
        return f"outside 0..{last - 1}"
    if any(a >= b for a, b in itertools.pairwise(ids)):
        return "not rising strictly"
    return None


def _sliding_layers(drafter: DrafterConfig) -> tuple[int, ...]:
    """Numbers of the layers with a window. Raises ValueError where kinds, number of layers and window do not fit."""
    types, window = drafter.layer_types or (), drafter.sliding_window
    if types and len(types) != drafter.num_layers:
        raise ValueError(
            f"drafter.layer_types names {len(types)} layers, drafter.num_layers is {drafter.num_layers}; name each layer"
        )
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")
    if sliding and window is None:
        raise ValueError(f"drafter.layer_types: layers {list(sliding)} slide without a window; set drafter.sliding_window")
    if not sliding and (window is not None or not drafter.sliding_causal):
        raise ValueError("drafter.sliding_window or sliding_causal without a sliding layer; name them in drafter.layer_types")
    if window is not None and window < drafter.block_size:
        raise ValueError(f"drafter.sliding_window {window} is below drafter.block_size {drafter.block_size}; raise it")
    return sliding


def _check_mask_token(mask: int | None, target: TargetFacts) -> None:
    if mask is None:
        raise ValueError("drafter.mask_token_id is not set: name a reserved token of the target's vocabulary (Qwen3: 151669)")
    if not 0 <= mask < target.vocab_size:
        raise ValueError(f"drafter.mask_token_id {mask}: outside the target's {target.vocab_size} embedding rows")
    for role, ids in (("eos", target.eos_ids), ("pad", target.pad_ids), ("bos", target.bos_ids)):
        if mask in ids:
            raise ValueError(f"drafter.mask_token_id {mask} is the target's {role} token; name a token that text never holds")


def batch_bytes(shape: DrafterShape, tokens: int, dtype: str, *, teacher: bool = False) -> int:
    """Bytes of the tapped hidden states of `tokens` padded positions, with `teacher` also those of the last layer."""
    return tokens * (len(shape.target_layer_ids) + teacher) * shape.hidden_size * DTYPE_BYTES[dtype]


def needs_teacher(training: TrainingConfig) -> bool:
    """Whether the loss compares with the target's distribution, so that targets run to their end."""
    return training.loss.keys() != {"ce"}


def check_ahead_bytes(config: Config, shape: DrafterShape) -> None:
    """One credit gate feeds all replicas: fewer than N + 2 of the largest micro-batches could starve it."""
    largest = batch_bytes(shape, config.training.tokens_per_batch, config.target.dtype, teacher=needs_teacher(config.training))
    needed = (len(config.pipeline.targets) + 2) * largest
    if config.pipeline.ahead_bytes < needed:
        raise ValueError(
            f"pipeline.ahead_bytes {config.pipeline.ahead_bytes} is below {needed}: {len(config.pipeline.targets)} replicas "
            f"+ 2 micro-batches of {largest} bytes; raise it or lower training.tokens_per_batch"
        )


def loss_gamma(config: Config) -> float:
    """The decay constant this run trains with; infinite, so that all slots weigh the same, where others weigh or none does."""
    if config.training.loss_weights != "decay":
        return math.inf
    return config.training.loss_decay_gamma or paper_gamma(config.drafter.block_size)


def total_steps(training: TrainingConfig, micro_batches: int) -> int:
    """Optimizer steps of a run with so many micro-batches over all epochs; the last may hold fewer than `accumulate`."""
    by_data = math.ceil(micro_batches / training.accumulate)
    return min(by_data, training.max_steps or by_data)
