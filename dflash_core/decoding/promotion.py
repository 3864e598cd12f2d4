"""Whether a drafter may replace the one in use: every gate must hold.

    report of the candidate, and its difference from the champion on the same prompts --decide--> Decision

A first champion has nobody to be compared with and passes the absolute gates only.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from dflash_core.config import PromotionConfig
from dflash_core.decoding.intervals import estimate
from dflash_core.decoding.report import shown
from dflash_core.decoding.summary import by_set, committed_and_rounds, prompt_sums
from dflash_core.records import AcceptanceReport, Comparison, Decision, Gate, Measured

LEAST_SHARE = 0.5  # of the acceptance length that teacher-forced blocks predict


def compare(results: Sequence[Measured]) -> Comparison:
    """The candidate's acceptance length minus the champion's, both measured on the same prompts by the same process."""
    tables = {name: _paired_table(own) for name, own in by_set(results).items()}
    tables = {name: table for name, table in tables.items() if len(table)}
    return Comparison(
        difference=estimate(list(tables.values()), _mean_difference) if tables else None,
        by_set={name: estimate([table], _mean_difference) for name, table in tables.items()},
    )


def _paired_table(results: Sequence[Measured]) -> np.ndarray:
    """[prompts, 4]: tokens and rounds of the candidate, tokens and rounds of the champion; prompts without a round left out."""

    def columns(result: Measured) -> tuple[int, ...]:
        assert result.champion is not None
        return (*committed_and_rounds(result.drafted), *committed_and_rounds(result.champion))

    both = prompt_sums(results, columns)
    return both[(both[:, 1] > 0) & (both[:, 3] > 0)]


def _mean_difference(sums: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over the prompt sets, each weighing the same."""
    return np.mean([own[:, 0] / own[:, 1] - own[:, 2] / own[:, 3] for own in sums], axis=0)


def decide(
    *,
    export_fault: str | None,
    report: AcceptanceReport | None,
    comparison: Comparison | None,
    settings: PromotionConfig,
) -> Decision:
    """All gates in order. `report` is None where the export could not be measured, `comparison` where there is no champion."""
    gates = [Gate(name="export", passed=export_fault is None, reason=export_fault or "verified")]
    if report is not None:
        gates += [_lossless(report), _enough(report, settings), _consistent(report), _faster(report, settings)]
        if comparison is not None:
            gates += _beats(comparison)
    return Decision(promoted=report is not None and all(gate.passed for gate in gates), gates=tuple(gates))


def _lossless(report: AcceptanceReport) -> Gate:
    wrong = [divergence for divergence in report.divergences if not divergence["tie"]]
    text = f"{report.lossless_exact} of {report.lossless_checked} texts equal the target's own, {len(report.divergences) - len(wrong)} differ at a tie"
    if wrong:
        first = wrong[0]
        text += (
            f", {len(wrong)} elsewhere, first prompt {first['prompt']} turn {first['turn']} token {first['position']} "
            f"(top-2 margin {first['margin']:.2e})"
        )
    return Gate(name="lossless", passed=not wrong and report.lossless_checked > 0, reason=text)


def _enough(report: AcceptanceReport, settings: PromotionConfig) -> Gate:
    text = f"{report.prompts} requests measured, {settings.min_prompts} needed for an interval that means something"
    return Gate(name="prompts", passed=report.prompts >= settings.min_prompts, reason=text)


def _consistent(report: AcceptanceReport) -> Gate:
    """Decoding that accepts far less than blocks on the same texts do sees other positions, states or masks than training did."""
    real, simulated = report.acceptance_length, report.acceptance_length_simulated
    text = f"acceptance length {real:.2f} by decoding, {simulated:.2f} by blocks after every token of the same texts, at least half of it needed"
    return Gate(name="gap", passed=real >= LEAST_SHARE * simulated, reason=text)


def _faster(report: AcceptanceReport, settings: PromotionConfig) -> Gate:
    text = f"speed-up over the target alone {shown(report.speedup_interval)}, must be above {settings.min_speedup:g}"
    passed = report.speedup_interval is not None and report.speedup_interval.low > settings.min_speedup
    return Gate(name="speedup", passed=passed, reason=text)


def _beats(comparison: Comparison) -> Iterator[Gate]:
    difference = comparison.difference
    text = f"acceptance length minus the champion's, mean over prompt sets: {shown(difference, sign='+')}, must be above 0"
    yield Gate(name="better", passed=difference is not None and difference.low > 0, reason=text)
    worse = {name: own for name, own in comparison.by_set.items() if own.high < 0}
    text = ", ".join(f"{name}: {shown(own, sign='+')}" for name, own in (worse or comparison.by_set).items())
    text = f"clearly worse than the champion on {text}" if worse else f"no prompt set clearly worse ({text})"
    yield Gate(name="sets", passed=not worse, reason=text)
