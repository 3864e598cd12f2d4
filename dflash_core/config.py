"""One run is one `Config`: frozen, complete, checked once.

Sections hold what a user writes, from YAML, the environment (`places`) and the command line. What follows from them and the
target is derived in `sizes`.
"""

import hashlib
import json
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
PREPARATION_WORK = {"part_rows", "processes", "task_runner", "scheduler"}  # of `data`: who does the work, which no row depends on
Dtype = Literal["float32", "bfloat16"]
LossTerm = Literal["ce", "soft_ce", "kl", "tv", "nla", "lk"]


class Section(BaseModel):
    """A part of the run: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # an address may hold a password


class TargetConfig(Section):
    """The frozen model whose output is preserved."""

    path: str = Field(description="Directory of a transformers checkpoint, or a hub id.")
    dtype: Dtype = Field("bfloat16", description="Precision of the target's forward passes.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="auto: flash-attn where it is importable and the device is CUDA, else sdpa."
    )


class SourceConfig(Section):
    """One place that conversations come from."""

    path: Annotated[str, Field(min_length=1)] = Field(
        description="File, directory or glob of JSONL, JSON, Parquet or Arrow, or what `save_to_disk` wrote; the same as "
        "s3://...; or a data set of the Hugging Face hub, hf://owner/name, or owner/name where no such local path is."
    )
    shape: Literal["auto", "messages", "sharegpt", "turns", "instruction", "prompt", "text", "tokens"] = Field(
        "auto",
        description="auto: each row by its columns: messages; conversations; a bare list of turns; instruction/input/output; "
        "prompt/response (completion, chosen); rendered text; input_ids and loss_mask. A named shape drops all other rows.",
    )
    columns: dict[str, str] = Field({}, description="Other names of columns: {messages: dialogue} reads `dialogue` as messages.")
    weight: PositiveFloat = Field(
        1.0, description="How often each row is taken; 2.5: twice, and half of the rows a third time; 0.1: a tenth of them, once."
    )
    max_rows: Count | None = Field(None, description="Rows taken of this source, at most; chosen like data.max_rows.")
    split: str | None = Field(
        None, description="Split of a dataset dict or hub data set; None: train, or the only one there is; all: every one."
    )
    subset: str | None = Field(None, description="Configuration of a hub data set.")
    revision: str | None = Field(None, description="Commit, branch or tag of a hub data set; None: its main branch.")


def as_sources(value: Any) -> Any:
    """A path, a mapping, or a list of both, as a list of mappings."""
    values = [value] if isinstance(value, str | dict | SourceConfig) else value
    if not isinstance(values, list | tuple):
        return values
    return [{"path": each} if isinstance(each, str) else each for each in values]


class DataConfig(Section):
    """Conversations and how they become token rows."""

    conversations: tuple[SourceConfig, ...] = Field(
        (), description="Where conversations come from: a path, or a list of paths and of mappings {path, weight, ...}."
    )
    shards: tuple[str, ...] = Field(
        (), description="Instead of conversations: directories of `datasets.save_to_disk` or of this tool, local or s3://."
    )
    ids_column: str = Field("input_ids", description="Column of token ids in `shards`, a list of integers.")
    mask_column: str = Field("loss_mask", description="Column of loss masks in `shards`, a list of 0 and 1 or of booleans.")
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(
        {}, description="What other names of roles mean: {heron_7b: assistant}. A row with an unknown role is dropped."
    )
    truncated_answers: Literal["keep", "drop"] = Field(
        "keep", description="Rows whose answer was cut by length when it was generated (finish_reason: length)."
    )
    exact_duplicates: Literal["keep", "drop"] = Field(
        "keep", description="Rows that say the same as an earlier one, whatever their ids."
    )
    near_duplicates: Literal["keep", "drop", "off"] = Field(
        "keep", description="Rows that say nearly the same as an earlier one (MinHash of 3 words); keep: only count them."
    )
    prompt_overlap: Literal["keep", "drop", "off"] = Field(
        "keep",
        description="Rows that share 13 successive words with an evaluation prompt, or hold a shorter prompt as a whole message; "
        "keep: only count them.",
    )
    similarity: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.7, description="Estimated Jaccard similarity from which two rows are near-duplicates."
    )
    validation: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = Field(
        0.0, description="Share of the first prompts that is kept apart for validation."
    )
    validation_by: Literal["near_duplicates", "prompt"] = Field(
        "near_duplicates",
        description="What stays on one side: all rows whose first prompts are near-duplicates, or all with the same first prompt.",
    )
    max_rows: Count | None = Field(
        None,
        description="Rows taken at most: first everything above is filtered, then weights count, then each source's max_rows, "
        "then this. Rows that tokenization refuses (max_length, mask not provable) come off the rows taken.",
    )
    shuffle: bool = Field(True, description="A limit or weight takes rows drawn by `seed`; false: the first ones. Order stays.")
    part_rows: Count = Field(20_000, description="Conversations a part file; parts are tokenized side by side.")
    max_length: Count = Field(4096, description="Tokens a row; what is longer follows `too_long`.")
    too_long: Literal["cut", "drop"] = Field("cut", description="cut keeps the first max_length tokens; both are counted.")
    thinking: bool | None = Field(
        None,
        description="`enable_thinking` of the chat template, as the drafter will be served; None: the template's own default.",
    )
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = Field(
        None, description="Day for templates that print one; None: the day of the run's first preparation, which is kept."
    )
    shard_tokens: Annotated[int, Field(ge=1, le=2**30)] = Field(
        50_000_000, description="A shard is closed when it holds this many tokens (Arrow's list offsets are 32-bit)."
    )
    min_kept: Share = Field(
        0.9,
        description="Preparation fails when a smaller share of the conversations can be used; policies and limits do not count.",
    )
    processes: Annotated[int, Field(ge=0)] = Field(1, description="Processes that tokenize parts of the data; 0: one a core.")
    task_runner: Literal["threads", "dask", "ray"] = Field(
        "threads", description="dask, ray: the parts spread over a cluster that shares places.runs (extra `distributed`)."
    )
    scheduler: str | None = Field(
        None, description="Address of a running Dask or Ray cluster; None: `processes` local workers for this run."
    )

    _sources = field_validator("conversations", mode="before")(as_sources)

    @model_validator(mode="after")
    def _one_origin(self) -> "DataConfig":
        if bool(self.conversations) == bool(self.shards):
            given = "both are" if self.shards else "none is"
            raise ValueError(f"exactly one of data.conversations and data.shards must be given, {given}; leave the other out")
        return self


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
    schedule: Literal["cosine", "wsd"] = Field("cosine", description="Of the learning rate; wsd: constant, then down to zero.")
    decay: Share = Field(0.2, description="Share of all steps that the rate of wsd falls, linearly, at the end.")
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

    targets: tuple[str, ...] = Field(("cpu",), min_length=1, description="One device a target replica.")
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
        3, description="Newest checkpoints that stay; the best one, by simulated acceptance, stays too."
    )
    stop_deadline_s: PositiveFloat = Field(20.0, description="A stop request saves if the measured save time fits.")
    stall_s: PositiveFloat = Field(600.0, description="No micro-batch for so long: all stacks are printed, the run fails.")
    first_batch_s: PositiveFloat = Field(
        1800.0,
        description="The same until the first micro-batch is trained (compiling, cold shards) and while a replica is loaded anew.",
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


class RegenerationConfig(Section):
    """The target's own answers to given prompts, made by flows.regenerate; a file of data, so no part of the experiment."""

    conversations: tuple[SourceConfig, ...] = Field(
        (), description="Whose prompts are answered, written as in data.conversations; none: those of data.conversations."
    )
    output: str | None = Field(None, description="JSONL file to write; None: <places.runs>/<name>.regenerated.jsonl.")
    endpoints: tuple[str, ...] = Field(
        (), description="Base URLs of OpenAI-compatible servers (http://host:8000/v1); none: transformers in this process."
    )
    model: str | None = Field(None, description="The target's name on the servers; None: target.path.")
    api_key_env: str | None = Field(None, description="Name of the environment variable that holds the servers' key.")
    concurrency: Count = Field(32, description="Conversations in work for each endpoint; in process: rows of a batch.")
    timeout_s: PositiveFloat = Field(600.0, description="One answer may take so long.")
    attempts: Count = Field(8, description="A conversation is given up after so many failed answers to one request.")
    backoff_s: PositiveFloat = Field(1.0, description="Wait after a first failure; doubles with each, up to backoff_max_s.")
    backoff_max_s: PositiveFloat = 60.0
    rest_after: Count = Field(5, description="Failures in a row after which an endpoint rests for rest_s.")
    rest_s: PositiveFloat = 30.0
    outage_s: PositiveFloat = Field(600.0, description="The run ends when all endpoints have failed for so long.")
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(1.0, description="0: greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = Field(None, description="None: all tokens.")
    max_tokens: Count = Field(2048, description="Tokens of an answer; one cut here ends its conversation.")
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    thinking: Share | None = Field(
        None, description="Share of the conversations answered with enable_thinking, the rest without; None: the template's way."
    )
    token_ids: Literal["auto", "never"] = Field("auto", description="auto: asked for, and kept where a server gives them.")

    _sources = field_validator("conversations", mode="before")(as_sources)

    @field_validator("endpoints")
    @classmethod
    def _addresses(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        for address in endpoints:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"endpoint {address!r} is no http(s) address such as http://host:8000/v1")
            if parts.username or parts.password:
                raise ValueError("an endpoint's address holds a user or password; name the key's variable in api_key_env instead")
        plain = tuple(address.rstrip("/") for address in endpoints)
        if len(set(plain)) < len(plain):
            raise ValueError("an endpoint is named twice; raise concurrency instead")
        return plain


class PromotionConfig(Section):
    """Which drafter is in use, and what another must do to replace it; decided after the run, so no part of the experiment."""

    model: Annotated[str, Field(pattern=r"^[^/:]+$")] | None = Field(
        None, description="Name in MLflow's registry, one a target; None: <last part of target.path>-dflash."
    )
    min_prompts: Count = Field(20, description="Requests that must have been measured for an interval to mean something.")
    min_speedup: PositiveFloat = Field(1.0, description="The interval of the speed-up over the target alone must lie above.")


class Places(Section):
    """Directories and addresses: the only section that the environment may set (DFLASH_RUNS, DFLASH_MLFLOW_URI, DFLASH_CACHE)."""

    runs: str = Field("runs", description="Directory of all run directories.")
    cache: str | None = Field(None, description="Directory of shards fetched from S3, shared by all runs; unset: <runs>/.cache.")
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
    regeneration: RegenerationConfig = RegenerationConfig()
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

    Nor `regeneration`: it makes a file of data, whose content is in the data's own fingerprint. Nor `promotion`, which comes after.
    """
    exclude: Any = {
        "places": True,
        "name": True,
        "pipeline": True,
        "regeneration": True,
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
