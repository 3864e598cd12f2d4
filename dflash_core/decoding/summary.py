"""From single requests to the numbers of a report.

Measured of every request --report_on--> AcceptanceReport, with those of the prompt sets

Sums first, ratios last; a ratio without a count is 0, never NaN.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_core.decoding.intervals import Statistic, estimate
from dflash_core.records import AcceptanceReport, ContextRange, Estimate, Generation, Measured, Measurements

TIE_MARGIN = {  # top-2 logit distance under which rounding may choose either
    "float32": 1e-4,
    "bfloat16": 0.25,  # two steps of bfloat16 between 16 and 32, where the best logits of large models lie
}


def acceptance_length(generations: Sequence[Generation]) -> float:
    """Tokens committed a verify round: accepted draft tokens + 1 (the bonus token), averaged over all rounds; 0 without a round."""
    rounds = [count for generation in generations for count in generation.accepted]
    return 1 + sum(rounds) / len(rounds) if rounds else 0.0


def by_set(results: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Results of each prompt set, the sets in the order of their first result."""
    sets: dict[str, list[Measured]] = {}
    for result in results:
        sets.setdefault(result.prompt_set, []).append(result)
    return sets


def prompt_sums(results: Sequence[Measured], columns: Callable[[Measured], Sequence[float]]) -> np.ndarray:
    """[prompts, columns]: what `columns` gives for each request, summed over the turns of a prompt."""
    sums: dict[tuple[str, int], np.ndarray] = {}
    for result in results:
        key = (result.prompt_set, result.prompt)
        sums[key] = sums.get(key, 0) + np.asarray(columns(result), np.float64)
    return np.stack(list(sums.values()))


def committed_and_rounds(generation: Generation) -> tuple[int, int]:
    """Tokens that verify rounds committed, and the rounds."""
    return sum(generation.accepted) + len(generation.accepted), len(generation.accepted)


def report_on(measured: Measurements, *, block_size: int, dtype: str) -> AcceptanceReport:
    """The whole report: all requests together, and each prompt set apart. Raises ValueError where nothing was measured.

    `block_size`: the most tokens that a round commits, one more than its draft tokens.
    """
    if not measured.results:
        raise ValueError("evaluation: not one request was measured; give more prompts, or shorter ones")
    sets = {
        name: summarise(own, block_size=block_size, dtype=dtype, counts=measured.counts.get(name, {}))
        for name, own in by_set(measured.results).items()
    }
    counts: Counter[str] = Counter()
    for own in measured.counts.values():
        counts.update(own)
    return replace(summarise(measured.results, block_size=block_size, dtype=dtype, counts=counts), sets=sets)


def summarise(
    results: Sequence[Measured], *, block_size: int, dtype: str, counts: Mapping[str, int] | None = None
) -> AcceptanceReport:
    """The numbers of these requests together; `dtype` is the target's while decoding."""
    drafted = [result.drafted for result in results]
    divergences = list(_divergences(results, TIE_MARGIN[dtype]))
    tokens = sum(len(generation.tokens) for generation in drafted)
    target_tokens = sum(len(result.target.tokens) for result in results)
    seconds = sum(generation.seconds for generation in drafted)
    target_rate = _ratio(target_tokens, sum(result.target.seconds for result in results))
    return AcceptanceReport(
        prompts=len(results),
        rounds=sum(len(generation.accepted) for generation in drafted),
        tokens=tokens,
        acceptance_length=acceptance_length(drafted),
        acceptance_interval=_acceptance_interval(results, _over_rounds),
        acceptance_by_prompt=_acceptance_interval(results, _over_prompts),
        acceptance_length_simulated=acceptance_length([result.simulated for result in results]),
        acceptance_length_ngram=acceptance_length([result.ngram for result in results]),
        acceptance_length_zero_features=acceptance_length([result.zero_features for result in results]),
        acceptance_by_slot=by_slot(drafted, block_size - 1),
        acceptance_by_slot_conditional=by_slot(drafted, block_size - 1, conditional=True),
        histogram=histogram(drafted, block_size),
        by_context=by_context(results),
        lossless_exact=len(results) - len(divergences),
        lossless_checked=len(results),
        divergences=tuple(divergences),
        speedup=_ratio(_ratio(tokens, seconds), target_rate),
        speedup_interval=_speedup_interval(results),
        target_tokens_per_second=target_rate,
        drafted_tokens_per_second=_ratio(tokens, seconds),
        draft_share=_ratio(sum(generation.draft_seconds for generation in drafted), seconds),
        counts={name: count for name, count in {**_seen(drafted), **(counts or {})}.items() if count},
        sets={},
    )


def _seen(drafted: Sequence[Generation]) -> dict[str, int]:
    return {
        "rounds without drafts: the text is longer than the drafter's positions": sum(one.undrafted for one in drafted),
        "requests that ended at their first token, without a round": sum(len(one.tokens) == 1 for one in drafted),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _acceptance_interval(results: Sequence[Measured], statistic: Statistic) -> Estimate | None:
    table = prompt_sums(results, lambda result: committed_and_rounds(result.drafted))
    table = table[table[:, 1] > 0]
    table = np.column_stack([table, table[:, 0] / table[:, 1], np.ones(len(table))])
    return estimate([table], statistic) if len(table) else None


def _over_rounds(sums: Sequence[np.ndarray]) -> np.ndarray:
    return sums[0][:, 0] / sums[0][:, 1]


def _over_prompts(sums: Sequence[np.ndarray]) -> np.ndarray:
    return sums[0][:, 2] / sums[0][:, 3]


def _speedup_interval(results: Sequence[Measured]) -> Estimate | None:
    def columns(result: Measured) -> tuple[float, float, float, float]:
        target, drafted = result.target, result.drafted
        return len(drafted.tokens), drafted.seconds, len(target.tokens), target.seconds

    table = prompt_sums(results, columns)
    table = table[(table > 0).all(1)]

    def speedup(sums: Sequence[np.ndarray]) -> np.ndarray:
        tokens, seconds, target_tokens, target_seconds = sums[0].T
        return (tokens / seconds) / (target_tokens / target_seconds)

    return estimate([table], speedup) if len(table) else None


def correlation(evaluations: Sequence[Mapping[str, Any]]) -> float | None:
    """Pearson's, of simulated and real acceptance length over the snapshots of one run; None for fewer than 3, or where one is constant."""
    pairs = [(one["simulated_acceptance_length"], one["acceptance_length"]) for one in evaluations]
    table = np.array([pair for pair in pairs if all(pair)], np.float64).reshape(-1, 2)
    if len(table) < 3 or not np.ptp(table, axis=0).all():
        return None
    return round(float(np.asarray(np.corrcoef(table.T))[0, 1]), 4)


def by_slot(generations: Sequence[Generation], draft_tokens: int, *, conditional: bool = False) -> tuple[float, ...]:
    """Accepted / offered for draft token 1, 2, ...: the share of rounds whose first k drafts were all right.

    `conditional`: of the rounds only whose first k - 1 drafts were right.
    """
    rounds = [pair for generation in generations for pair in zip(generation.accepted, generation.drafted, strict=True)]
    rates = []
    for slot in range(1, draft_tokens + 1):
        offered = [accepted for accepted, drafted in rounds if drafted >= slot and (not conditional or accepted >= slot - 1)]
        rates.append(_ratio(sum(accepted >= slot for accepted in offered), len(offered)))
    return tuple(rates)


def histogram(generations: Sequence[Generation], block_size: int) -> tuple[int, ...]:
    """Rounds that committed 1, 2, ... block_size tokens."""
    seen = Counter(count + 1 for generation in generations for count in generation.accepted)
    return tuple(seen[tokens] for tokens in range(1, block_size + 1))


def by_context(results: Sequence[Measured]) -> tuple[ContextRange, ...]:
    """Rounds by the length of the text before them, in ranges that double from 256 tokens."""
    ranges: dict[int, list[int]] = {}
    for result in results:
        length = result.context + 1
        for accepted in result.drafted.accepted:
            ranges.setdefault(max(0, (length // 128).bit_length() - 1), []).append(accepted)
            length += accepted + 1
    return tuple(
        ContextRange(
            start=128 * 2**number if number else 0,
            end=256 * 2**number,
            rounds=len(rounds),
            acceptance_length=1 + sum(rounds) / len(rounds),
        )
        for number, rounds in sorted(ranges.items())
    )


def _divergences(results: Sequence[Measured], tie_margin: float) -> Iterator[dict[str, Any]]:
    for result in sorted(results, key=lambda result: (result.prompt_set, result.prompt, result.turn)):
        alone, drafted = result.target.tokens, result.drafted.tokens
        if alone != drafted:
            place = next(
                (i for i, (a, b) in enumerate(zip(alone, drafted, strict=False)) if a != b), min(len(alone), len(drafted))
            )
            margin = result.target.margins[place] if place < len(result.target.margins) else 0.0
            yield {
                "prompt_set": result.prompt_set,
                "prompt": result.prompt,
                "turn": result.turn,
                "position": place,
                "margin": margin,
                "tie": margin < tie_margin,
            }
