"""One run is one `Config`: frozen, complete, checked once.

Sections hold what a user writes, from YAML, the environment (`places`) and the command line. What follows from them and the
target is derived in `sizes`.
"""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dflash_core.data_config import Beta, Count, DataConfig, PositiveFloat, RegenerationConfig, Section, Share

PREPARATION_WORK = {"part_rows", "processes", "task_runner", "scheduler"}  # of `data`: who does the work, which no row depends on
Dtype = Literal["float32", "bfloat16"]
LossTerm = Literal["ce", "soft_ce", "kl", "tv", "nla", "lk"]
LayerType = Literal["full_attention", "sliding_attention"]


class TargetConfig(Section):
    """The frozen model whose output is preserved."""

    path: str = Field(description="Directory of a transformers checkpoint, or a hub id.")
    dtype: Dtype = Field("bfloat16", description="Precision of the target's forward passes.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto",
        description="auto: flash-attn where it is importable and the device is CUDA, else sdpa; eager for a target without.",
    )


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
    sample_from_anchor: bool = Field(
        False,
        description="The anchor's slot drafts, too: slot k predicts the token at anchor + k + 1, a draft token more a block. No "
        "engine serves that as DFlash.",
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        None,
        description="One a layer: full_attention sees all, sliding_attention the last sliding_window tokens; None: all full.",
    )
    sliding_window: Count | None = Field(None, description="Tokens that a slot of a sliding layer sees, its own included.")
    sliding_causal: bool = Field(
        True,
        description="Slots of a sliding layer see no later slot of their block, as engines serve it; false: they do, and SGLang "
        "serves the drafter otherwise than it was trained.",
    )


class TrainingConfig(Section):
    """Objective and optimisation."""

    warm_start: str | None = Field(
        None, description="Directory of a drafter, in any common layout, with whose weights training starts; None: random ones."
    )
    epochs: Count = 6
    max_steps: Count | None = Field(None, description="Stop after this many optimizer steps.")
    tokens_per_batch: Count = Field(16_384, description="Padded tokens of a micro-batch, at most.")
    batching: Literal["padded", "equal", "packed"] = Field(
        "padded",
        description="padded: rows of like length, padded on the right. equal: only rows of one length together, for targets whose "
        "hidden states depend on padding. packed: the target reads a micro-batch as one row of documents, without padding.",
    )
    too_long: Literal["error", "cut"] = Field(
        "error", description="Rows of the shards above data.max_length: refused, or their first max_length tokens are read."
    )
    anchors_per_row: Count = Field(512, description="Blocks trained a row, at most.")
    anchors_per_batch: Count = Field(4096, description="rows x anchors of a micro-batch, at most.")
    accumulate: Count = Field(1, description="Micro-batches an optimizer step.")
    learning_rate: PositiveFloat = 6e-4
    warmup: Share = Field(0.04, description="Share of all steps that the learning rate rises.")
    schedule: Literal["cosine", "wsd"] = Field("wsd", description="Of the learning rate; wsd: constant, then down to zero.")
    decay: Share = Field(0.2, description="Share of all steps that the rate of wsd falls, linearly, at the end.")
    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="muon: for matrices; vectors stay with AdamW, at the same rate. adamw: for all."
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Decay of a running mean of the weights, such as 0.999, which is exported in place of the last ones."
    )
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    clip: PositiveFloat = Field(1.0, description="Largest gradient norm.")
    loss: dict[LossTerm, PositiveFloat] = Field(
        {"ce": 1.0},
        description="One term or shares of several, {ce: 0.1, tv: 0.9}. ce: the token itself. Against the target's distribution, so "
        "that every replica runs all layers: soft_ce, kl, tv (total variation), nla (-log of the acceptance), lk (kl and tv mixed).",
    )
    loss_weights: Literal["decay", "dpace", "none"] = Field(
        "decay", description="Weight of slot k: exp(-(k-1)/loss_decay_gamma); by what acceptance gains from it (D-PACE); or 1."
    )
    loss_decay_gamma: PositiveFloat | None = Field(None, description="None: the paper's value for the block size.")
    dpace_alpha: Share = Field(0.5, description="Smoothing of D-PACE; 0.3 to 0.7 are stable.")
    target_features: Literal["tapped", "zero"] = Field(
        "tapped",
        description="zero: an ablation, the drafter never sees the target; its zero-feature acceptance is the honest floor.",
    )
    attention: Literal["auto", "dense", "grouped", "flex"] = Field(
        "auto", description="Attention of the drafter. auto: on the CPU grouped, or dense for few keys; on CUDA flex."
    )
    autocast: Literal["none", "bfloat16"] = Field("none", description="Precision of the drafter's matrix products.")
    compile: bool = Field(
        False,
        description="torch.compile of the drafter's layers: about a minute at the start; on the CPU it needs a C++ compiler.",
    )
    checkpoint_every: Count = Field(500, description="Optimizer steps between checkpoints.")
    max_skipped: Share = Field(
        0.1, description="Training fails when a larger share of the micro-batches is skipped: not finite, or without an anchor."
    )

    @field_validator("loss", mode="before")
    @classmethod
    def _one_term(cls, loss: Any) -> Any:
        return {loss: 1.0} if isinstance(loss, str) else loss

    @field_validator("loss")
    @classmethod
    def _some_term(cls, loss: dict[LossTerm, float]) -> dict[LossTerm, float]:
        if not loss:
            raise ValueError("training.loss is empty; name a term such as ce")
        return loss


class PipelineConfig(Section):
    """Who works where, and how far ahead."""

    targets: tuple[str, ...] = Field(
        ("cpu",),
        min_length=1,
        description="A device for each target replica, cpu or cuda:0; cuda:0+cuda:1 spreads its layers over both.",
    )
    drafter: str = Field("cpu", description="Device of the drafter.")
    ranks: Count = Field(
        1,
        description="Processes that train one drafter together, each with targets and a drafter of its own on the next CUDA devices; "
        "training.accumulate micro-batches of a step are shared among them.",
    )
    peak_tflops: PositiveFloat | None = Field(
        None, description="Dense TFLOP/s of one device, for the share of them that real tokens use (MFU); None: not shown."
    )
    readers: Count = 1
    ahead_bytes: Count = Field(8 * 2**30, description="Bytes of hidden states between reading and the end of the step.")
    cache_bytes: Count = Field(500 * 10**9, description="Most bytes of shards from S3 in places.cache.")
    cache_evict: bool = Field(True, description="Shards least recently used leave a full cache; false: that is an error.")
    keep_checkpoints: Count = Field(
        3,
        description="Newest checkpoints that stay; the best one, by real acceptance where during_training measured it, else by simulated, stays too.",
    )
    stop_deadline_s: PositiveFloat = Field(20.0, description="A stop request saves if the measured save time fits.")
    stall_s: PositiveFloat = Field(600.0, description="No micro-batch for so long: all stacks are printed, the run fails.")
    first_batch_s: PositiveFloat = Field(
        1800.0,
        description="The same until the first micro-batch is trained (compiling, cold shards) and while a replica is loaded anew.",
    )
    evaluation_s: PositiveFloat = Field(
        14400.0,
        description="The processes that decode with the exported drafter may take so long; then they are ended: an error.",
    )
    rebuilds: Annotated[int, Field(ge=0)] = Field(
        3,
        description="Failures of target replicas in a process that are survived: another gets the micro-batch, the failed is loaded anew.",
    )


class PromptSetConfig(Section):
    """Evaluation prompts of one kind."""

    path: str | None = Field(
        None, description="Like data.conversations: a file of JSONL or Parquet, or a data set of the hub; None: the preset's own."
    )
    preset: Literal["gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca"] | None = Field(
        None, description="A public benchmark: where it is on the hub, and the form in which its rows are asked."
    )
    num_prompts: Count | None = Field(None, description="None: evaluation.num_prompts.")
    thinking: bool | None = Field(None, description="enable_thinking of the chat template for this set; None: data.thinking.")

    @model_validator(mode="after")
    def _somewhere(self) -> "PromptSetConfig":
        if self.path is None and self.preset is None:
            raise ValueError("a prompt set needs a path or a preset")
        return self


class EvaluationConfig(Section):
    """Acceptance by real decoding with the exported drafter."""

    prompts: str | None = Field(
        None,
        description='JSONL file, one object a line: {"turns": ["..."]} or {"messages": [...]}. The prompt set named `prompts`.',
    )
    prompt_sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], PromptSetConfig] = Field(
        {}, description="More sets, reported apart, by name: {math: {preset: gsm8k, num_prompts: 200}, chat: {path: chat.jsonl}}."
    )
    num_prompts: Count | None = Field(None, description="Of each set, at most; None: all.")
    processes: Count = Field(1, description="Fresh processes that share the prompts; each loads the target.")
    batch_size: Count = Field(1, description="Requests decoded together; the speed-up is that of this batch size.")
    block_size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Slots of a block while decoding, the anchor included; None: as trained, fewer draft fewer tokens."
    )
    max_new_tokens: Count = 256
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(0.0, description="0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = Field(None, description="None: all tokens.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="Of sampled texts.")
    dtype: Dtype = Field("bfloat16", description="Precision of the target while decoding; losslessness is exact in float32.")
    ngram_order: Annotated[int, Field(ge=2)] = 3

    @model_validator(mode="after")
    def _has_prompts(self) -> "EvaluationConfig":
        if self.prompts is None and not self.prompt_sets:
            raise ValueError("no prompts: give evaluation.prompts, a file, or evaluation.prompt_sets")
        if self.prompts is not None and "prompts" in self.prompt_sets:
            raise ValueError("evaluation.prompts and a set named `prompts`: give that set another name")
        return self


class DuringTrainingConfig(Section):
    """Acceptance of the drafter while it is trained, simulated and real; the weights do not depend on it."""

    eval_every: Count | None = Field(
        None,
        description="Optimizer steps between evaluations, each of which is a checkpoint, too; None: none. The first target replica then "
        "holds all layers and the head, and decodes between two micro-batches with a copy of the drafter.",
    )
    num_prompts: Count = Field(
        8, description="Of all prompt sets together, drawn by evaluation.seed; their first turns are decoded."
    )
    max_new_tokens: Count = Field(128, description="Of each prompt, at most.")
    num_rows: Count = Field(
        64, description="First rows of the validation split, for simulated acceptance; without a split: the texts just decoded."
    )
    limit_s: PositiveFloat = Field(
        300.0, description="An evaluation that takes longer is given up and counted; pipeline.stall_s is so much longer."
    )


class ExportConfig(Section):
    """Further formats of the exported drafter, of the same weights, so no part of the experiment."""

    speculators: bool = Field(
        False,
        description="Also write export-speculators/, the format of the speculators library, which vLLM alone reads; with copies of the "
        "target's embedding and head.",
    )


class PromotionConfig(Section):
    """Which drafter is in use, and what another must do to replace it; decided after the run, so no part of the experiment."""

    model: Annotated[str, Field(pattern=r"^[^/:]+$")] | None = Field(
        None, description="Name in MLflow's registry, one a target; None: <last part of target.path>-dflash."
    )
    min_prompts: Count = Field(20, description="Requests that must have been measured for an interval to mean something.")
    min_speedup: PositiveFloat = Field(1.0, description="The interval of the speed-up over the target alone must lie above.")


class Places(Section):
    """Directories and addresses: the only section that the environment may set (DFLASH_RUNS, DFLASH_COPIES, ...)."""

    runs: str = Field("runs", description="Directory of all run directories.")
    cache: str | None = Field(None, description="Directory of shards fetched from S3, shared by all runs; unset: <runs>/.cache.")
    mlflow_uri: str | None = Field(
        None, description="MLflow tracking address; unset: sqlite in <runs>/mlflow.db; none: no tracking."
    )
    copies: str | None = Field(None, description="s3:// place that every run is copied to, and fetched from; unset: nowhere.")

    @field_validator("runs", "cache")
    @classmethod
    def _local(cls, directory: str | None) -> str | None:
        if directory is not None and "://" in directory:
            raise ValueError("no directory of this machine; places.copies keeps a copy of every run on S3")
        return directory

    @field_validator("mlflow_uri")
    @classmethod
    def _blank_is_unset(cls, uri: str | None) -> str | None:
        return (uri or "").strip() or None

    @field_validator("copies")
    @classmethod
    def _on_s3(cls, copies: str | None) -> str | None:
        if copies is None:
            return None
        scheme, separator, path = copies.partition("://")
        if scheme.lower() != "s3" or not separator or not path.strip("/"):
            raise ValueError("no place on S3; write s3://bucket/prefix, or leave it out")
        return f"s3://{path.strip('/')}"


class Config(Section):
    """A complete run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = Field(
        description="Directory under places.runs."
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = PipelineConfig()
    evaluation: EvaluationConfig
    during_training: DuringTrainingConfig = DuringTrainingConfig()
    regeneration: RegenerationConfig = RegenerationConfig()
    export: ExportConfig = ExportConfig()
    promotion: PromotionConfig = PromotionConfig()
    places: Places = Places()

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.training.tokens_per_batch < self.data.max_length:
            raise ValueError(
                f"training.tokens_per_batch {self.training.tokens_per_batch} is below data.max_length "
                f"{self.data.max_length}: the longest row fits no micro-batch; raise the one or lower the other"
            )
        if self.training.accumulate % self.pipeline.ranks:
            raise ValueError(
                f"training.accumulate {self.training.accumulate} is no multiple of pipeline.ranks {self.pipeline.ranks}: each rank takes "
                "equally many micro-batches of a step; change the one or the other"
            )
        if self.training.anchors_per_batch < self.training.anchors_per_row:
            raise ValueError(
                f"training.anchors_per_batch {self.training.anchors_per_batch} is below training.anchors_per_row "
                f"{self.training.anchors_per_row}: one row fits no micro-batch"
            )
        return self


def experiment(config: Config) -> dict[str, Any]:
    """What decides the result: not the name, not `places`, and not who does the work, on which the weights do not depend.

    Nor `regeneration`: it makes a file of data, whose content is in the data's own fingerprint. Nor `during_training`, which only
    looks on. Nor `export` and `promotion`, which come after.
    """
    exclude: Any = {
        "places": True,
        "name": True,
        "pipeline": True,
        "during_training": True,
        "regeneration": True,
        "export": True,
        "promotion": True,
        "data": PREPARATION_WORK,
    }
    return config.model_dump(mode="json", exclude=exclude)


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
