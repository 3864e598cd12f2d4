"""What a run says of its conversations: where they come from, how they become token rows, and how answers are made anew."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number, not true or false")
    return value


Count = Annotated[int, Field(ge=1, le=2**53), BeforeValidator(_no_truth)]


class Section(BaseModel):
    """A part of the run: immutable, and a misspelt key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)  # an address may hold a password


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
