"""One run is one `Config`: frozen, complete, checked once.

Sections hold what a user writes. What follows from a section *and* the target (taps, head sizes, the mask token, the bytes
of a micro-batch) is derived here, by `resolve`, and nowhere else:

    Config (YAML, environment for `places`, command line)  +  TargetFacts (the target's own config)  ->  DrafterShape
"""

import hashlib
import itertools
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_core.records import DrafterShape, TargetFacts

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
Dtype = Literal["float32", "bfloat16"]

# Loss decay of the DFlash paper (appendix A.1) by block size; other sizes take the nearest listed one.
PAPER_GAMMA = {7: 4.0, 8: 4.0, 10: 5.0, 16: 7.0}


class Section(BaseModel):
    """A part of the run: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetConfig(Section):
    """The frozen model whose output is preserved."""

    path: str = Field(description="Directory of a transformers checkpoint, or a hub id.")
    dtype: Dtype = Field("bfloat16", description="Precision of the target's forward passes.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="auto: flash-attn where it is importable and the device is CUDA, else sdpa."
    )


class DataConfig(Section):
    """Conversations and how they become token rows."""

    conversations: str = Field(description="JSONL file, one object a line: {id, messages: [{role, content}]}.")
    max_length: Count = Field(4096, description="Tokens a row; what is longer follows `too_long`.")
    too_long: Literal["cut", "drop"] = Field("cut", description="cut keeps the first max_length tokens; both are counted.")
    shard_tokens: Annotated[int, Field(ge=1, le=2**30)] = Field(
        50_000_000, description="A shard is closed when it holds this many tokens (Arrow's list offsets are 32-bit)."
    )
    min_kept: Share = Field(0.9, description="Preparation fails when a smaller share of the conversations is kept.")


class DrafterConfig(Section):
    """The small model to train. Sizes left out follow the target."""

    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2, le=256)] = Field(16, description="Slots of a block, the anchor included.")
    target_layer_ids: tuple[int, ...] | None = Field(
        None, description="0-based layers whose output is tapped; None: the rule of the DFlash reference for num_taps."
    )
    num_taps: Count | None = Field(None, description="How many layers the rule picks; None: num_layers.")
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    intermediate_size: Count | None = None
    mask_token_id: int | None = Field(None, description="Reserved token of the target's vocabulary for the unknown slots.")


class TrainingConfig(Section):
    """Objective and optimisation."""

    epochs: Count = 6
    max_steps: Count | None = Field(None, description="Stop after this many optimizer steps.")
    tokens_per_batch: Count = Field(16_384, description="Padded tokens of a micro-batch, at most.")
    anchors_per_row: Count = Field(512, description="Blocks trained a row, at most.")
    anchors_per_batch: Count = Field(4096, description="rows x anchors of a micro-batch, at most.")
    accumulate: Count = Field(1, description="Micro-batches an optimizer step.")
    learning_rate: PositiveFloat = 6e-4
    warmup: Share = Field(0.04, description="Share of all steps that the learning rate rises.")
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    clip: PositiveFloat = Field(1.0, description="Largest gradient norm.")
    loss_decay_gamma: PositiveFloat | None = Field(None, description="None: the paper's value for the block size.")
    target_features: Literal["tapped", "zero"] = Field(
        "tapped",
        description="zero: an ablation, the drafter never sees the target; its zero-feature acceptance is the honest floor.",
    )
    autocast: Literal["none", "bfloat16"] = Field("none", description="Precision of the drafter's matrix products.")
    checkpoint_every: Count = Field(500, description="Optimizer steps between checkpoints.")
    max_skipped: Share = Field(
        0.1, description="Training fails when a larger share of the micro-batches is skipped: not finite, or without an anchor."
    )


class PipelineConfig(Section):
    """Who works where, and how far ahead."""

    targets: tuple[str, ...] = Field(("cpu",), min_length=1, description="One device a target replica.")
    drafter: str = Field("cpu", description="Device of the drafter.")
    readers: Count = 1
    ahead_bytes: Count = Field(8 * 2**30, description="Bytes of hidden states between reading and the end of the step.")
    stop_deadline_s: PositiveFloat = Field(20.0, description="A stop request saves if the measured save time fits.")
    stall_s: PositiveFloat = Field(600.0, description="No micro-batch for so long: all stacks are printed, the run fails.")


class EvaluationConfig(Section):
    """Acceptance by real decoding with the exported drafter."""

    prompts: str = Field(description='JSONL file, one object a line: {"turns": ["..."]}.')
    num_prompts: Count | None = Field(None, description="None: all of the file.")
    processes: Count = Field(1, description="Fresh processes that share the prompts; each loads the target.")
    max_new_tokens: Count = 256
    dtype: Dtype = Field("bfloat16", description="Precision of the target while decoding; losslessness is exact in float32.")
    ngram_order: Annotated[int, Field(ge=2)] = 3


class Places(Section):
    """Directories and addresses: the only section that the environment may set (DFLASH_RUNS, DFLASH_MLFLOW_URI)."""

    runs: str = Field("runs", description="Directory of all run directories.")
    mlflow_uri: str | None = Field(
        None, description="MLflow tracking address; unset: sqlite in <runs>/mlflow.db; none: no tracking."
    )


class Config(Section):
    """A complete run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = Field(description="Directory under places.runs.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    evaluation: EvaluationConfig
    places: Places = Places()

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.training.tokens_per_batch < self.data.max_length:
            raise ValueError(
                f"training.tokens_per_batch {self.training.tokens_per_batch} is below data.max_length "
                f"{self.data.max_length}: the longest row fits no micro-batch; raise the one or lower the other"
            )
        if self.training.anchors_per_batch < self.training.anchors_per_row:
            raise ValueError(
                f"training.anchors_per_batch {self.training.anchors_per_batch} is below training.anchors_per_row "
                f"{self.training.anchors_per_row}: one row fits no micro-batch"
            )
        return self


def experiment(config: Config) -> dict[str, Any]:
    """What decides the result: not the name, not `places`, and not `pipeline`, on which the weights do not depend."""
    return config.model_dump(mode="json", exclude={"places", "name", "pipeline"})


def fingerprint(value: Any) -> str:
    """sha256 of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every leaf that differs between two nested dictionaries."""
    found: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return found


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


def _check_mask_token(mask: int | None, target: TargetFacts) -> None:
    if mask is None:
        raise ValueError("drafter.mask_token_id is not set: name a reserved token of the target's vocabulary (Qwen3: 151669)")
    if not 0 <= mask < target.vocab_size:
        raise ValueError(f"drafter.mask_token_id {mask}: outside the target's {target.vocab_size} embedding rows")
    for role, ids in (("eos", target.eos_ids), ("pad", target.pad_ids), ("bos", target.bos_ids)):
        if mask in ids:
            raise ValueError(f"drafter.mask_token_id {mask} is the target's {role} token; name a token that text never holds")


def batch_bytes(shape: DrafterShape, tokens: int, dtype: str) -> int:
    """Bytes of the tapped hidden states of `tokens` padded positions."""
    return tokens * len(shape.target_layer_ids) * shape.hidden_size * DTYPE_BYTES[dtype]


def check_ahead_bytes(config: Config, shape: DrafterShape) -> None:
    """One credit gate feeds all replicas: fewer than N + 2 of the largest micro-batches could starve it."""
    largest = batch_bytes(shape, config.training.tokens_per_batch, config.target.dtype)
    needed = (len(config.pipeline.targets) + 2) * largest
    if config.pipeline.ahead_bytes < needed:
        raise ValueError(
            f"pipeline.ahead_bytes {config.pipeline.ahead_bytes} is below {needed}: {len(config.pipeline.targets)} replicas "
            f"+ 2 micro-batches of {largest} bytes; raise it or lower training.tokens_per_batch"
        )


def loss_gamma(config: Config) -> float:
    """The decay constant this run trains with."""
    return config.training.loss_decay_gamma or paper_gamma(config.drafter.block_size)


def total_steps(training: TrainingConfig, micro_batches: int) -> int:
    """Optimizer steps of a run with so many micro-batches over all epochs; the last may hold fewer than `accumulate`."""
    by_data = math.ceil(micro_batches / training.accumulate)
    return min(by_data, training.max_steps or by_data)
