"""Acceptance of an exported drafter, by real decoding, beside references on the same prompts.

python -m dflash_core.decoding.evaluate JOB.json        the fresh process that reported values come from

prompt --decode alone--> the target's own text, timed           lossless: both texts equal
       --decode with the export--> accepted drafts              and with the champion, where one is compared with
       --replay n-gram, replay zeroed features-->               what they would accept of the same text
       --teacher-forced blocks after every token-->             what training reports as simulated acceptance
"""

import dataclasses
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import EvaluationConfig
from dflash_core.data.arrow import Columns
from dflash_core.data.chat import Chat, open_chat, served_ids
from dflash_core.data.prompts import Messages, PromptSet, read_prompt_sets
from dflash_core.data.reader import TokenDataset
from dflash_core.data.storage import ShardPlaces, find_sets
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.drafts import DraftCache
from dflash_core.decoding.export import load_export, read_shape
from dflash_core.decoding.fit import check_fit
from dflash_core.decoding.ngram import NgramDraft
from dflash_core.decoding.replay import replay, replay_drafter, simulate
from dflash_core.decoding.sampling import Sampling, place_numbers
from dflash_core.decoding.speculate import decode
from dflash_core.devices import home
from dflash_core.modeling.drafter import Drafter
from dflash_core.modeling.target import TargetEnds, load_model, read_facts
from dflash_core.records import Generation, Measured, Measurements

TOO_LONG = "requests left out: the prompt leaves no room in the target's positions"
MASKS = "mask tokens that the target emitted itself"


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """Everything the fresh process needs."""

    export: str
    shards: ShardPlaces  # training rows, for the n-gram reference
    target: str
    attention: str
    device: str  # of the target, perhaps several; the drafter is on the first
    evaluation: EvaluationConfig
    date: str | None = None  # what the chat template prints, as in the training rows
    thinking: bool | None = None  # the chat template's enable_thinking
    champion: str | None = None  # export of the drafter in use, to be measured on the same prompts
    part: int = 0  # of evaluation.processes: takes every so-manieth prompt

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file; `read_job` is the way back."""
        shards = {**dataclasses.asdict(self.shards), "columns": self.shards.columns}
        return {**vars(self), "shards": shards, "evaluation": self.evaluation.model_dump(mode="json")}


def read_job(value: dict[str, Any]) -> EvaluationJob:
    """A job from what `as_dict` gave."""
    shards = value["shards"]
    places = ShardPlaces(**{**shards, "places": tuple(shards["places"]), "columns": Columns(*shards["columns"])})
    return EvaluationJob(**{**value, "shards": places, "evaluation": EvaluationConfig(**value["evaluation"])})


class _Drafting:
    """An exported drafter, and the target with its taps."""

    def __init__(self, export: str, model: Any, ends: TargetEnds, job: EvaluationJob) -> None:
        self.drafter: Drafter = load_export(Path(export), dtype=getattr(torch, job.evaluation.dtype), device=home(job.device))
        self.target = DecodingTarget(model, self.drafter.shape.target_layer_ids, device=home(job.device))
        self.cache = DraftCache(self.drafter, ends, block_size=job.evaluation.block_size)


class _Bench:
    """All that a measurement needs, loaded once. Raises ValueError where a drafter is of another target."""

    def __init__(self, job: EvaluationJob) -> None:
        evaluation = job.evaluation
        self.job, self.facts = job, read_facts(job.target)
        for export in filter(None, (job.export, job.champion)):
            check_fit(read_shape(Path(export))[0], self.facts, export=export)
        self.tokenizer = load_tokenizer(job.target)
        self.stop_ids = frozenset(self.facts.eos_ids)
        model = load_model(job.target, dtype=evaluation.dtype, device=job.device, attention=job.attention)
        self.ends = TargetEnds(model)
        self.own = _Drafting(job.export, model, self.ends, job)
        self.champion = _Drafting(job.champion, model, self.ends, job) if job.champion else None
        self.shape = self.own.drafter.shape
        self.block_size = evaluation.block_size or self.shape.block_size
        dataset = TokenDataset(find_sets(job.shards), columns=job.shards.columns)
        rows = (dataset.row(i) for i in range(len(dataset)))
        self.draft_tokens = self.block_size - self.shape.first_slot
        self.ngram = NgramDraft(rows, order=evaluation.ngram_order, draft_tokens=self.draft_tokens)
        self.sampling = Sampling(temperature=evaluation.temperature, top_k=evaluation.top_k, top_p=evaluation.top_p)

    def measure(self, requests: Sequence["_Asked"], chat: Chat, counts: Counter[str]) -> list[Measured]:
        """The next turn of each prompt, decoded together; the target's answers are added to their messages."""
        prompts = [served_ids(chat, request.messages) for request in requests]
        rooms = [self.facts.max_positions - len(prompt) - self.block_size for prompt in prompts]
        for request, room in zip(requests, rooms, strict=True):
            request.over = room < 1
        counts[TOO_LONG] += sum(request.over for request in requests)
        fitting = [(request, prompt, room) for request, prompt, room in zip(requests, prompts, rooms, strict=True) if room > 0]
        if not fitting:
            return []
        asked, prompts, rooms = (list(column) for column in zip(*fitting, strict=True))
        limits = [min(self.job.evaluation.max_new_tokens, room) for room in rooms]
        alone = self._decode(None, asked, prompts, limits)
        drafted = self._decode(self.own, asked, prompts, limits)
        beside = self._decode(self.champion, asked, prompts, limits) if self.champion else None
        results = []
        for row, (request, prompt, own) in enumerate(zip(asked, prompts, alone, strict=True)):
            results.append(self._measured(request, prompt, own, drafted[row], beside[row] if beside else None))
            counts[MASKS] += own.tokens.count(self.shape.mask_token_id)
            answer = [token for token in own.tokens if token not in self.stop_ids]
            request.messages.append({"role": "assistant", "content": self.tokenizer.decode(answer)})
        return results

    def _decode(
        self, drafting: _Drafting | None, asked: Sequence["_Asked"], prompts: Sequence[list[int]], limits: Sequence[int]
    ) -> list[Generation]:
        seed = self.job.evaluation.seed
        return decode(
            (drafting or self.own).target,
            prompts,
            limits=limits,
            stop_ids=self.stop_ids,
            proposer=drafting.cache if drafting else None,
            sampling=self.sampling,
            numbers=[place_numbers(seed, (each.prompt, each.turn), limit) for each, limit in zip(asked, limits, strict=True)],
        )

    def _measured(
        self, request: "_Asked", prompt: list[int], alone: Generation, drafted: Generation, champion: Generation | None
    ) -> Measured:
        """One request with its references, which read the target's own text."""
        text = [*prompt, *alone.tokens]
        self.own.target.start(1)
        _, hidden = self.own.target.forward([text], last_only=True)
        drafter, size = self.own.drafter, self.block_size
        return Measured(
            prompt_set=request.prompt_set,
            prompt=request.prompt,
            turn=request.turn,
            context=len(prompt),
            target=alone,
            drafted=drafted,
            ngram=replay(self.ngram.propose, prompt, alone.tokens, draft_tokens=self.draft_tokens),
            zero_features=replay_drafter(drafter, self.ends, prompt, alone.tokens, torch.zeros_like(hidden), block_size=size),
            simulated=simulate(drafter, self.ends, prompt, alone.tokens, hidden, block_size=size),
            champion=champion,
        )


@dataclass
class _Asked:
    """A prompt whose turns are decoded one after the other; later turns follow the target's own answers."""

    prompt_set: str
    prompt: int
    rest: Messages  # still to be asked
    messages: Messages = field(default_factory=list)
    turn: int = -1
    over: bool = False  # did not fit

    def next(self) -> bool:
        """Asks up to the next user message; False where there is none, or the last one did not fit."""
        for place, message in enumerate(self.rest):
            if message["role"] == "user" and not self.over:
                self.messages += self.rest[: place + 1]
                self.rest = self.rest[place + 1 :]
                self.turn += 1
                return True
        return False


def measure(job: EvaluationJob) -> Measurements:
    """Decodes the job's prompts, a batch at a time. Raises ValueError where not one of them fits the target's positions."""
    if home(job.device) == "cpu":
        torch.set_num_threads(1)
    bench, evaluation = _Bench(job), job.evaluation
    results: list[Measured] = []
    counts: dict[str, Counter[str]] = {}
    for one in read_prompt_sets(evaluation):
        thinking = job.thinking if one.thinking is None else one.thinking
        chat = open_chat(bench.tokenizer, stop_ids=bench.stop_ids, date=job.date, thinking=thinking)
        own = counts[one.name] = Counter()
        mine = list(enumerate(one.prompts))[job.part :: evaluation.processes]
        for start in range(0, len(mine), evaluation.batch_size):
            batch = mine[start : start + evaluation.batch_size]
            if not results:
                bench.measure([_ready(_Asked(one.name, *batch[0]))], chat, Counter())  # first passes are slow; not counted
            for active in _turns(one, batch):
                results += bench.measure(active, chat, own)
    if not results and any(own[TOO_LONG] for own in counts.values()):
        raise ValueError(
            f"evaluation: no prompt leaves room in the target's {bench.facts.max_positions} positions; shorten the prompts"
        )
    return Measurements(results=results, counts={name: dict(own) for name, own in counts.items()})


def _ready(request: _Asked) -> _Asked:
    request.next()
    return request


def _turns(one: PromptSet, batch: Sequence[tuple[int, Messages]]) -> Iterator[list[_Asked]]:
    """The requests of a batch of prompts turn by turn; prompts with fewer turns drop out."""
    active = [_Asked(one.name, number, list(messages)) for number, messages in batch]
    while active := [request for request in active if request.next()]:
        yield active


def read_measured(printed: Sequence[str]) -> Measurements:
    """What fresh processes printed, as records again."""
    results: list[Measured] = []
    counts: dict[str, Counter[str]] = {}
    for text in printed:
        value = json.loads(text.splitlines()[-1])
        results += [Measured(**{key: _record(part) for key, part in row.items()}) for row in value["results"]]
        for name, own in value["counts"].items():
            counts.setdefault(name, Counter()).update(own)
    return Measurements(results=results, counts={name: dict(own) for name, own in counts.items()})


def _record(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    parts: dict[str, Any] = {key: tuple(part) if isinstance(part, list) else part for key, part in value.items()}
    return Generation(**parts)


def main(job_file: str) -> None:
    """Reads an EvaluationJob, writes what was measured to standard output as one JSON line."""
    job = read_job(json.loads(Path(job_file).read_text(encoding="utf-8")))
    print(json.dumps(dataclasses.asdict(measure(job))))


if __name__ == "__main__":
    main(sys.argv[1])
    gc.freeze()  # else the end of the process searches all that was imported for garbage, which takes two seconds
