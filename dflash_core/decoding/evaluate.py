"""Acceptance of an exported drafter, by real decoding, beside two references on the same prompts.

python -m dflash_core.decoding.evaluate JOB.json        the fresh process that reported values come from

prompt --greedy--> the target's own text, timed          lossless: both texts equal
       --speculate with the export--> accepted drafts
       --replay n-gram, replay zeroed features-->        what they would accept of the same text
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import EvaluationConfig
from dflash_core.data.chat import render
from dflash_core.data.shards import TokenDataset
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.export import load_export
from dflash_core.decoding.ngram import NgramDraft
from dflash_core.decoding.speculate import DecodingTarget, DraftCache, greedy, replay, speculate
from dflash_core.modeling.target import TargetEnds, load_model, read_facts
from dflash_core.records import AcceptanceReport, Generation

TIE_MARGIN = 1e-4  # top-2 logit distance under which float32 rounding may choose either


@dataclass(frozen=True, kw_only=True)
class EvaluationJob:
    """Everything the fresh process needs."""

    export: str
    shards: str  # training rows, for the n-gram reference
    target: str
    attention: str
    device: str
    evaluation: EvaluationConfig
    part: int = 0  # of evaluation.processes: takes every so-manieth prompt


def read_prompts(path: str) -> list[list[str]]:
    """User turns of each prompt: JSONL of {"turns": [...]}. Raises ValueError for a missing, empty or malformed file."""
    if not Path(path).is_file():
        raise ValueError(f"evaluation.prompts {path!r}: no such file")
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                turns = json.loads(line)["turns"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path}, line {number}: not of the form {{"turns": ["..."]}}') from error
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                raise ValueError(f"{path}, line {number}: turns must be a list of texts, at least one")
            prompts.append(turns)
    if not prompts:
        raise ValueError(f"evaluation.prompts {path!r} is empty: give at least one prompt")
    return prompts


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One request, decoded four ways."""

    prompt: int  # number in the prompt file
    turn: int
    target: Generation
    margins: list[float]
    drafted: Generation
    ngram: Generation
    zero_features: Generation


def measure(job: EvaluationJob) -> list[Measured]:
    """Decodes the job's prompts turn by turn; later turns follow the target's own answers."""
    if job.device == "cpu":
        torch.set_num_threads(1)
    evaluation = job.evaluation
    facts = read_facts(job.target)
    tokenizer = load_tokenizer(job.target)
    model = load_model(job.target, dtype=evaluation.dtype, device=job.device, attention=job.attention)
    drafter = load_export(Path(job.export), dtype=getattr(torch, evaluation.dtype), device=job.device)
    shape, ends = drafter.shape, TargetEnds(model)
    target = DecodingTarget(model, shape.target_layer_ids, device=job.device)
    dataset = TokenDataset(Path(job.shards))
    rows = (dataset.row(i) for i in range(len(dataset)))
    ngram = NgramDraft(rows, order=evaluation.ngram_order, draft_tokens=shape.block_size - 1)
    draft, blind = DraftCache(drafter, ends), DraftCache(drafter, ends, zero_features=True)
    stop_ids = frozenset(facts.eos_ids)
    width = len(shape.target_layer_ids) * shape.hidden_size
    results: list[Measured] = []
    prompts = list(enumerate(read_prompts(evaluation.prompts)[: evaluation.num_prompts]))
    for number, turns in prompts[job.part :: evaluation.processes]:
        messages: list[dict[str, Any]] = []
        for turn, question in enumerate(turns):
            messages.append({"role": "user", "content": question})
            text = render(tokenizer, messages, tools=None, generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            room = facts.max_positions - len(prompt) - shape.block_size
            if room < 1:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens leaves no room in the target's {facts.max_positions} positions"
                )
            limit = min(evaluation.max_new_tokens, room)
            alone, margins = greedy(target, prompt, max_new_tokens=limit, stop_ids=stop_ids)
            nothing = torch.zeros(1, len(prompt) + len(alone.tokens), width, device=job.device)
            results.append(
                Measured(
                    prompt=number,
                    turn=turn,
                    target=alone,
                    margins=margins,
                    drafted=speculate(target, draft, prompt, max_new_tokens=limit, stop_ids=stop_ids),
                    ngram=replay(ngram, prompt, alone.tokens, nothing, shape.block_size),
                    zero_features=replay(blind, prompt, alone.tokens, nothing, shape.block_size),
                )
            )
            answer = [token for token in alone.tokens if token not in stop_ids]
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
    return results


def read_measured(printed: str) -> list[Measured]:
    """What a fresh process printed, as records again."""

    def record(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        parts: dict[str, Any] = {key: tuple(part) if isinstance(part, list) else part for key, part in value.items()}
        return Generation(**parts)

    rows = json.loads(printed.splitlines()[-1])
    return [Measured(**{key: record(part) for key, part in row.items()}) for row in rows]


def acceptance_length(generations: Sequence[Generation]) -> float:
    """Tokens committed a verify round: accepted draft tokens + 1 (the bonus token), averaged over all rounds."""
    rounds = [count for generation in generations for count in generation.accepted]
    return 1 + sum(rounds) / len(rounds) if rounds else 0.0


def summarise(results: list[Measured], *, draft_tokens: int) -> AcceptanceReport:
    """The report of all requests together."""
    drafted = [result.drafted for result in results]
    divergences = list(_divergences(results))
    tokens = sum(len(generation.tokens) for generation in drafted)
    target_tokens = sum(len(result.target.tokens) for result in results)
    target_rate = target_tokens / sum(result.target.seconds for result in results)
    drafted_rate = tokens / sum(generation.seconds for generation in drafted)
    return AcceptanceReport(
        prompts=len(results),
        rounds=sum(len(generation.accepted) for generation in drafted),
        tokens=tokens,
        acceptance_length=acceptance_length(drafted),
        acceptance_length_ngram=acceptance_length([result.ngram for result in results]),
        acceptance_length_zero_features=acceptance_length([result.zero_features for result in results]),
        acceptance_by_slot=by_slot(drafted, draft_tokens),
        lossless_exact=len(results) - len(divergences),
        lossless_checked=len(results),
        divergences=tuple(divergences),
        speedup=drafted_rate / target_rate,
        target_tokens_per_second=target_rate,
        drafted_tokens_per_second=drafted_rate,
    )


def by_slot(generations: Sequence[Generation], draft_tokens: int) -> tuple[float, ...]:
    """Accepted / offered for draft token 1, 2, ...: the share of rounds whose first k drafts were all right."""
    rounds = [pair for generation in generations for pair in zip(generation.accepted, generation.drafted, strict=True)]
    rates = []
    for slot in range(1, draft_tokens + 1):
        offered = [accepted for accepted, drafted in rounds if drafted >= slot]
        rates.append(sum(accepted >= slot for accepted in offered) / len(offered) if offered else 0.0)
    return tuple(rates)


def _divergences(results: list[Measured]) -> Iterator[dict[str, Any]]:
    for result in sorted(results, key=lambda result: (result.prompt, result.turn)):
        alone, drafted = result.target.tokens, result.drafted.tokens
        if alone != drafted:
            place = next(
                (i for i, (a, b) in enumerate(zip(alone, drafted, strict=False)) if a != b), min(len(alone), len(drafted))
            )
            margin = result.margins[place] if place < len(result.margins) else 0.0
            yield {"prompt": result.prompt, "turn": result.turn, "position": place, "margin": margin, "tie": margin < TIE_MARGIN}


def main(job_file: str) -> None:
    """Reads an EvaluationJob, writes what was measured to standard output as one JSON line."""
    value = json.loads(Path(job_file).read_text(encoding="utf-8"))
    job = EvaluationJob(**{**value, "evaluation": EvaluationConfig(**value["evaluation"])})
    print(json.dumps([dataclasses.asdict(result) for result in measure(job)]))


if __name__ == "__main__":
    main(sys.argv[1])
