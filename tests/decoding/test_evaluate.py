"""What is reported: averages by hand, and one whole measurement of a tiny export."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core import assembly
from dflash_core.decoding.evaluate import (
    EvaluationJob,
    Measured,
    acceptance_length,
    by_slot,
    main,
    measure,
    read_measured,
    read_prompts,
    summarise,
)
from dflash_core.decoding.export import write_export
from dflash_core.decoding.report import report_markdown
from dflash_core.modeling.drafter import new_drafter
from dflash_core.records import Generation
from dflash_core.rundir import open_run
from tests.fakes import make_config, make_shape, save_target


def generation(
    accepted: tuple[int, ...] = (), drafted: tuple[int, ...] = (), *, tokens: tuple[int, ...] = (1, 2), seconds: float = 1.0
) -> Generation:
    return Generation(tokens=tokens, accepted=accepted, drafted=drafted, seconds=seconds)


def test_acceptance_length_counts_the_bonus_token_and_averages_rounds() -> None:
    many, few = generation((3, 3, 3, 3), (3,) * 4), generation((0,), (3,))
    assert acceptance_length([many, few]) == pytest.approx(1 + 12 / 5)  # rounds, not requests
    assert acceptance_length([generation((0, 0), (3, 3))]) == 1.0
    assert acceptance_length([generation()]) == 0.0  # no round at all


def test_rates_by_slot_are_unconditional() -> None:
    rounds = generation((3, 1, 0, 2), (3, 3, 3, 2))
    assert by_slot([rounds], 3) == (3 / 4, 2 / 4, 1 / 3)
    assert by_slot([generation((1,), (1,))], 3) == (1.0, 0.0, 0.0)


def test_a_drafter_that_is_always_right_has_rates_of_one() -> None:
    """The last round of a text, which the stop token ends early, is no failure of the drafts behind it."""
    assert by_slot([generation((7, 7, 3), (7, 7, 3))], 7) == (1.0,) * 7


def measured(target: tuple[int, ...], drafted: tuple[int, ...], margins: list[float], **changes: Any) -> Measured:
    parts = {
        "prompt": 0,
        "turn": 0,
        "target": generation(tokens=target, seconds=2.0),
        "margins": margins,
        "drafted": generation((2, 0), (3, 3), tokens=drafted, seconds=1.0),
        "ngram": generation((1, 0), (3, 3)),
        "zero_features": generation((0, 0), (3, 3)),
    }
    return Measured(**{**parts, **changes})


def test_the_report_is_the_sum_of_its_requests() -> None:
    same, tie = (5, 6, 7, 8), (5, 6, 9, 9)
    results = [
        measured(same, same, [1.0] * 4),
        measured(same, (5, 6), [1.0, 1.0, 0.5, 1.0], prompt=2),
        measured(same, tie, [1.0, 1.0, 5e-5, 1.0], prompt=1, turn=1),
    ]
    report = summarise(results, draft_tokens=3)
    assert (report.prompts, report.rounds, report.tokens) == (3, 6, 10)
    assert (report.acceptance_length, report.acceptance_length_ngram, report.acceptance_length_zero_features) == (2.0, 1.5, 1.0)
    assert report.acceptance_by_slot == (0.5, 0.5, 0.0)
    assert (report.lossless_exact, report.lossless_checked) == (1, 3)
    assert report.divergences == (
        {"prompt": 1, "turn": 1, "position": 2, "margin": 5e-5, "tie": True},
        {"prompt": 2, "turn": 0, "position": 2, "margin": 0.5, "tie": False},
    )
    assert report.target_tokens_per_second == 12 / 6
    assert report.drafted_tokens_per_second == 10 / 3
    assert report.speedup == pytest.approx(10 / 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty: give at least one prompt"),
        ("\n\n", "is empty"),
        ('{"turns": ["a"]}\n{"turns": []}', "line 2: turns must be a list of texts"),
        ('{"turns": "a"}', "line 1: turns must be a list of texts"),
        ('{"turns": [1]}', "line 1: turns must be a list of texts"),
        ('{"prompt": "a"}', "line 1: not of the form"),
        ('["a"]', "line 1: not of the form"),
        ("{", "line 1: not of the form"),
    ],
)
def test_wrong_prompts_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(file))


def test_prompts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluation.prompts .*: no such file"):
        read_prompts(str(tmp_path / "absent"))
    (tmp_path / "p").write_text('{"turns": ["a", "b"]}\n\n{"turns": ["é"], "id": 3}', encoding="utf-8")
    assert read_prompts(str(tmp_path / "p")) == [["a", "b"], ["é"]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> EvaluationJob:
    """An untrained drafter of a varied target; the second prompt has two turns."""
    root = tmp_path_factory.mktemp("evaluate")
    target = save_target(root / "target", initializer_range=0.3, seed=2)
    (root / "prompts.jsonl").write_text(
        '{"turns": ["Tell me about herons."]}\n{"turns": ["Why?", "And then?"]}\n{"turns": ["No"]}\n'
    )
    config = make_config(root, target, drafter={"num_layers": 2})
    run = open_run(config)
    assembly.shard(config, run, assembly.tokenize(config, run))
    shape = assembly.check(config)[1]
    assert shape == make_shape(intermediate_size=64)
    write_export(run.export, new_drafter(shape, 0).state_dict(), shape, target=str(target))
    evaluation = config.evaluation.model_copy(update={"num_prompts": 2})
    return EvaluationJob(
        export=str(run.export),
        shards=str(run.shards),
        target=str(target),
        attention="auto",
        device="cpu",
        evaluation=evaluation,
    )


def test_an_untrained_drafter_is_lossless_and_worth_nothing(job: EvaluationJob) -> None:
    report = summarise(measure(job), draft_tokens=3)
    assert (report.prompts, report.lossless_exact, report.lossless_checked) == (3, 3, 3)  # two turns of the second prompt
    assert report.divergences == ()
    assert report.tokens == 3 * 12
    assert 1.0 <= report.acceptance_length < 1.3
    assert report.rounds * report.acceptance_length == pytest.approx(report.tokens - 3)  # the first token costs no round
    assert 1.0 <= report.acceptance_length_ngram < 1.5
    assert 1.0 <= report.acceptance_length_zero_features < 1.3
    assert len(report.acceptance_by_slot) == 3


def test_children_share_the_prompts(job: EvaluationJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What two processes print is, put together, what one measures: every turn of every prompt once, times apart."""
    results = []
    for part in (0, 1):
        evaluation = job.evaluation.model_copy(update={"processes": 2}).model_dump(mode="json")
        file = tmp_path / f"job-{part}.json"
        file.write_text(json.dumps({**vars(job), "evaluation": evaluation, "part": part}))
        main(str(file))
        results += read_measured("a line of something else\n" + capsys.readouterr().out)
    whole = measure(job)
    assert [(result.prompt, result.turn) for result in results] == [(0, 0), (1, 0), (1, 1)]
    assert [result.drafted.tokens for result in results] == [result.drafted.tokens for result in whole]
    assert [result.ngram.accepted for result in results] == [result.ngram.accepted for result in whole]
    assert [result.margins for result in results] == [result.margins for result in whole]


def test_a_prompt_without_room_is_refused(job: EvaluationJob, tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"turns": ["heron " * 400]}))
    evaluation = job.evaluation.model_copy(update={"prompts": str(file)})
    with pytest.raises(ValueError, match="leaves no room in the target's 512 positions"):
        measure(dataclasses.replace(job, evaluation=evaluation))


def test_the_written_report_shows_every_number() -> None:
    stage = {"workers": 1, "items": 9, "busy": 1.0, "starved": 2.0, "blocked": 3.0}
    acceptance = summarise([measured((1, 2), (1, 3), [1.0, 1e-6])], draft_tokens=2)
    text = report_markdown(
        {
            "name": "heron",
            **dataclasses.asdict(acceptance),
            "lossless": "0 / 1",
            "training": {"step": 30, "total_steps": 40, "tokens": 7, "departures": ["torch: 1 -> 2"]},
            "data": {"rows": 1234, "tokens": 56789, "supervised": 345, "shards": 2},
            "tokens_per_second": 1234.5,
            "startup_s": {"open": 0.5},
            "bottleneck": "train: busy",
            "ledger": {
                "conversations": {"rows_in": 5, "kept": 4, "cut": 1, "dropped": {"no stop": 1}},
                "micro_batches": {"issued": 3},
            },
            "stages": {"tap": stage},
        }
    )
    for piece in (
        "| acceptance length, this drafter | 2.00 |",
        "| acceptance length, n-gram reference | 1.50 |",
        "| acceptance length, target features zeroed | 1.00 |",
        "0 / 1, 1 of the others at a tie",
        "| speed-up over the target alone | 2.00x |",
        "30 of 40 steps",
        "torch: 1 -> 2",
        "| tap | 1 | 9 | 1.0 | 2.0 | 3.0 |",
        "1,234 rows, 56,789 tokens",
        "{'no stop': 1}",
        "| 0 | 0 | 1 | 1.00e-06 | yes |",
    ):
        assert piece in text, piece
