"""The gates: each can refuse alone, and says what it found."""

import dataclasses
import random
from typing import Any

import pytest

from dflash_core.config import PromotionConfig
from dflash_core.decoding.promotion import compare, decide
from dflash_core.decoding.summary import summarise
from dflash_core.records import Decision, Measured
from tests.decoding.results import generation, measured

SETTINGS = PromotionConfig()
TEXT = tuple(range(1, 13))


def results(
    sets: dict[str, tuple[float, float | None]], *, prompts: int = 25, seconds: float = 1.0, seed: int = 0, **changes: Any
) -> list[Measured]:
    """Requests whose rounds accept about `ours` draft tokens, and the champion's about `theirs`, of 7."""
    rng = random.Random(seed)

    def rounds(mean: float) -> Any:
        accepted = tuple(min(7, max(0, round(rng.gauss(mean, 1.0)))) for _ in range(12))
        return generation(accepted, (7,) * 12, tokens=TEXT, seconds=seconds)

    return [
        measured(
            TEXT, TEXT, prompt_set=name, prompt=prompt, drafted=rounds(ours), champion=None if theirs is None else rounds(theirs)
        )
        for name, (ours, theirs) in sets.items()
        for prompt in range(prompts)
    ]


def decided(measurements: list[Measured], *, champion: bool = True, settings: PromotionConfig = SETTINGS) -> Decision:
    report = summarise(measurements, block_size=8, dtype="float32")
    comparison = compare(measurements) if champion else None
    return decide(export_fault=None, report=report, comparison=comparison, settings=settings)


def refused(decision: Decision) -> dict[str, str]:
    assert decision.promoted == all(gate.passed for gate in decision.gates)
    return {gate.name: gate.reason for gate in decision.gates if not gate.passed}


def test_a_first_champion_needs_the_absolute_gates_only() -> None:
    decision = decided(results({"math": (0.5, None)}), champion=False)
    assert decision.promoted
    assert [gate.name for gate in decision.gates] == ["export", "lossless", "prompts", "gap", "speedup"]


def test_a_better_drafter_replaces_the_champion() -> None:
    decision = decided(results({"math": (4.0, 3.0), "chat": (2.5, 2.0)}))
    assert decision.promoted
    assert [gate.name for gate in decision.gates] == ["export", "lossless", "prompts", "gap", "speedup", "better", "sets"]


def test_the_champion_itself_is_no_better_than_itself() -> None:
    own = [
        measured(TEXT, TEXT, prompt=result.prompt, drafted=result.drafted, champion=result.drafted)
        for result in results({"prompts": (3.0, None)})
    ]
    assert refused(decided(own)) == {
        "better": "acceptance length minus the champion's, mean over prompt sets: +0.00 [+0.00, +0.00], must be above 0"
    }


def test_a_difference_within_the_noise_is_refused() -> None:
    """0.03 of a round's spread of 1 over 300 rounds: better on paper, not clear of zero."""
    found = refused(decided(results({"math": (3.03, 3.0)}, seed=3)))
    assert list(found) == ["better"]


def test_one_set_clearly_worse_refuses_what_is_better_on_average() -> None:
    found = refused(decided(results({"math": (6.0, 2.0), "chat": (1.0, 2.0)})))
    assert list(found) == ["sets"]
    assert found["sets"].startswith("clearly worse than the champion on chat: -")


def test_broken_export_is_not_measured_and_says_why() -> None:
    decision = decide(export_fault="model.safetensors: no norm.weight", report=None, comparison=None, settings=SETTINGS)
    assert refused(decision) == {"export": "model.safetensors: no norm.weight"}


@pytest.mark.parametrize(("margin", "promoted"), [(5e-5, True), (0.5, False)])
def test_a_text_may_differ_at_a_tie_only(margin: float, promoted: bool) -> None:
    own = results({"math": (4.0, None)})
    other = generation((4,) * 12, (7,) * 12, tokens=(*TEXT[:5], 99), seconds=1.0)
    own[3] = measured(TEXT, (), [1.0] * 5 + [margin] + [1.0] * 6, prompt_set="math", prompt=3, drafted=other)
    decision = decided(own, champion=False)
    assert decision.promoted == promoted
    if not promoted:
        assert "first prompt 3 turn 0 token 5 (top-2 margin 5.00e-01)" in refused(decision)["lossless"]


def test_a_drafter_that_does_not_speed_up_is_refused() -> None:
    found = refused(decided(results({"math": (4.0, None)}, seconds=2.0), champion=False))
    assert found == {"speedup": "speed-up over the target alone 1.00 [1.00, 1.00], must be above 1"}


def test_decoding_far_below_what_blocks_predict_is_refused() -> None:
    """CASES E20: rounds accept none, blocks on the same texts half of seven."""
    wrong = [
        dataclasses.replace(one, simulated=generation((5,) * 12, (7,) * 12, tokens=TEXT))
        for one in results({"math": (1.5, None)})
    ]
    reasons = refused(decided(wrong, champion=False))
    assert reasons.keys() == {"gap"}
    assert "6.00 by blocks" in reasons["gap"]


def test_too_few_prompts_say_nothing() -> None:
    found = refused(decided(results({"math": (6.0, 1.0)}, prompts=5)))
    assert found == {"prompts": "5 requests measured, 20 needed for an interval that means something"}


def test_prompts_without_a_round_of_both_are_not_compared() -> None:
    empty = generation(tokens=(2,))
    comparison = compare([measured(champion=empty), measured(prompt=1, drafted=empty, champion=empty)])
    assert (comparison.difference, comparison.by_set) == (None, {})
    report = summarise([measured(drafted=empty)], block_size=8, dtype="float32")
    decision = decide(export_fault=None, report=report, comparison=comparison, settings=SETTINGS)
    assert "not measured" in refused(decision)["better"]
