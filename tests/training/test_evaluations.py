"""evaluations.jsonl over restarts, the warning about a growing gap, and the sums in training.json."""

import logging
from pathlib import Path

import pytest

from dflash_core.records import Evaluation
from dflash_core.training.evaluations import EvaluationsFile, gap_warning, read_evaluations, summary


def evaluation(step: int, real: float = 2.0, simulated: float = 2.0, *, seconds: float = 0.5) -> Evaluation:
    return Evaluation(
        step=step, prompts=8, rounds=100, acceptance_length=real, simulated_acceptance_length=simulated,
        simulated_on="validation", blocks=50, seconds=seconds,
    )  # fmt: skip


def test_evaluations_of_all_processes_are_kept_and_none_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    first = EvaluationsFile(path)
    assert first.found == {}
    first.add(evaluation(10, 1.5))
    first.add(evaluation(30, 2.5))
    with path.open("a") as file:
        file.write('{"step": 40, "promp')  # the writer was killed
    second = EvaluationsFile(path)
    assert second.real == {10: 1.5, 30: 2.5}
    second.add(evaluation(20, 1.9))  # made up for by a resumed run
    assert list(read_evaluations(path)) == [10, 20, 30]
    assert read_evaluations(path)[20] == evaluation(20, 1.9)
    assert len(path.read_text().splitlines()) == 3


def test_each_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    EvaluationsFile(tmp_path / "evaluations.jsonl").add(evaluation(300, 2.314, 3.1, seconds=4.21))
    assert [record.getMessage() for record in caplog.records] == [
        "step 300: acceptance length 2.31 by decoding 8 prompts, simulated 3.10 (validation), in 4.2 s"
    ]


def of(*gaps: float) -> list[Evaluation]:
    return [evaluation(10 * number, 2.0, 2.0 * (1 + gap)) for number, gap in enumerate(gaps, 1)]


@pytest.mark.parametrize(
    ("gaps", "warned"),
    [
        ((0.05, 0.10, 0.16), True),
        ((0.9, 0.05, 0.10, 0.16), True),  # the last three count
        ((0.05, 0.10, 0.14), False),  # too small yet
        ((0.20, 0.30), False),  # too few
        ((0.20, 0.40, 0.39), False),  # shrank again
        ((0.20, 0.30, 0.30), False),  # did not grow
        ((-0.2, 0.0, 0.2), True),
        ((-0.3, -0.2, -0.1), False),
        ((), False),
    ],
)
def test_a_gap_that_grew_three_times_and_is_large_is_a_warning(gaps: tuple[float, ...], warned: bool) -> None:
    assert (gap_warning(of(*gaps)) is not None) == warned


def test_the_warning_says_values_limit_and_remedy() -> None:
    words = gap_warning(of(0.05, 0.10, 0.25))
    assert words is not None
    assert "step 30: simulated acceptance 2.50 is 25% above the real 2.00" in words
    assert "(5%, 10%, 25%; limit 15%)" in words
    assert "data.thinking" in words


def test_an_evaluation_without_a_round_has_no_gap() -> None:
    assert gap_warning([*of(0.05, 0.10), evaluation(25, 0.0, 3.0), evaluation(30, 2.0, 2.5)]) is not None


def test_the_summary_adds_up(tmp_path: Path) -> None:
    file = EvaluationsFile(tmp_path / "evaluations.jsonl")
    for one in (*of(0.05, 0.10, 0.2), evaluation(40, 2.4, 2.4), evaluation(50, 0.0, 2.0)):
        file.add(one)
    found = summary(file, left_out=2, given_up=1, seconds=3.0, wall_s=60.0)
    assert (found["seconds"], found["share"], found["left_out"], found["given_up"]) == (3.0, 0.05, 2, 1)
    assert found["best_step"] == 40
    assert [one["step"] for one in found["evaluations"]] == [10, 20, 30, 40, 50]
    assert len(found["warnings"]) == 1
    assert found["warnings"][0].startswith("step 30:")


def test_the_summary_of_none() -> None:
    nothing = EvaluationsFile(Path("no/such/file"))
    found = summary(nothing, left_out=0, given_up=0, seconds=0.0, wall_s=0.0)
    assert found["best_step"] is None
    assert (found["share"], found["evaluations"], found["warnings"]) == (0.0, [], [])
