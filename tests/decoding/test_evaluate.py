"""What is reported: averages by hand, and one whole measurement of a tiny export."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_core import assembly, measurement, preparation
from dflash_core.config import EvaluationConfig
from dflash_core.decoding.evaluate import (
    MASKS,
    TOO_LONG,
    EvaluationJob,
    main,
    measure,
    read_measured,
)
from dflash_core.decoding.export import write_export
from dflash_core.decoding.report import report_markdown
from dflash_core.decoding.summary import acceptance_length, by_context, by_slot, correlation, histogram, report_on, summarise
from dflash_core.modeling.drafter import new_drafter
from dflash_core.opening import shard_places
from dflash_core.records import ContextRange, Estimate, Measurements
from dflash_core.rundir import open_run
from tests.decoding.results import generation, measured
from tests.fakes import make_config, make_shape, save_target


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


def test_the_report_is_the_sum_of_its_requests() -> None:
    same, tie = (5, 6, 7, 8), (5, 6, 9, 9)
    results = [
        measured(same, same, [1.0] * 4),
        measured(same, (5, 6), [1.0, 1.0, 0.5, 1.0], prompt=2),
        measured(same, tie, [1.0, 1.0, 5e-5, 1.0], prompt=1, turn=1),
    ]
    report = summarise(results, block_size=4, dtype="float32")
    assert (report.prompts, report.rounds, report.tokens) == (3, 6, 10)
    assert (report.acceptance_length, report.acceptance_length_ngram, report.acceptance_length_zero_features) == (2.0, 1.5, 1.0)
    assert report.acceptance_by_slot == (0.5, 0.5, 0.0)
    assert (report.lossless_exact, report.lossless_checked) == (1, 3)
    assert report.divergences == (
        {"prompt_set": "prompts", "prompt": 1, "turn": 1, "position": 2, "margin": 5e-5, "tie": True},
        {"prompt_set": "prompts", "prompt": 2, "turn": 0, "position": 2, "margin": 0.5, "tie": False},
    )
    assert report.target_tokens_per_second == 12 / 6
    assert report.drafted_tokens_per_second == 10 / 3
    assert report.speedup == pytest.approx(10 / 6)


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
    preparation.prepare(config, run)
    shape = assembly.check(config)[1]
    assert shape == make_shape(intermediate_size=64)
    write_export(run.export, new_drafter(shape, 0).state_dict(), shape, target=str(target))
    evaluation = config.evaluation.model_copy(update={"num_prompts": 2})
    return EvaluationJob(
        export=str(run.export),
        shards=shard_places(config, run),
        target=str(target),
        attention="auto",
        device="cpu",
        evaluation=evaluation,
    )


def test_the_report_of_a_drafter_whose_anchor_drafts_has_a_slot_more(
    job: EvaluationJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = make_shape(intermediate_size=64, sample_from_anchor=True)
    export = write_export(tmp_path / "export", new_drafter(shape, 0).state_dict(), shape, target=job.target)
    config = make_config(tmp_path, job.target, drafter={"num_layers": 2, "sample_from_anchor": True})
    assert assembly.check(config)[1] == shape
    measured = measure(dataclasses.replace(job, export=str(export)))
    report = measurement._summary(config, measured)
    assert report.lossless_exact == 3
    assert (len(report.acceptance_by_slot), len(report.histogram)) == (4, 5)
    assert max(max(one.drafted.drafted) for one in measured.results) == 4
    assert max(max(one.ngram.drafted, default=0) for one in measured.results) == 4
    assert max(max(one.simulated.drafted) for one in measured.results) == 4


def test_an_untrained_drafter_is_lossless_and_worth_nothing(job: EvaluationJob) -> None:
    report = report_on(measure(job), block_size=4, dtype="float32")
    assert (report.prompts, report.lossless_exact, report.lossless_checked) == (3, 3, 3)  # two turns of the second prompt
    assert report.divergences == ()
    assert report.tokens == 3 * 12
    assert 1.0 <= report.acceptance_length < 1.3
    assert report.rounds * report.acceptance_length == pytest.approx(report.tokens - 3)  # the first token costs no round
    assert 1.0 <= report.acceptance_length_ngram < 1.5
    assert 1.0 <= report.acceptance_length_zero_features < 1.3
    assert 1.0 <= report.acceptance_length_simulated < 1.3
    assert len(report.acceptance_by_slot) == 3
    assert sum(report.histogram) == report.rounds
    assert list(report.sets) == ["prompts"]
    assert report.counts == {}


def test_children_share_the_prompts_and_batches_change_nothing(
    job: EvaluationJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What two processes print is, put together, what one measures: every turn of every prompt once, whatever the batches."""
    printed = []
    for part in (0, 1):
        evaluation = job.evaluation.model_copy(update={"processes": 2})
        file = tmp_path / f"job-{part}.json"
        file.write_text(json.dumps(dataclasses.replace(job, evaluation=evaluation, part=part).as_dict()))
        main(str(file))
        printed.append("a line of something else\n" + capsys.readouterr().out)
    results = read_measured(printed).results
    together = job.evaluation.model_copy(update={"batch_size": 2})
    whole = sorted(
        measure(dataclasses.replace(job, evaluation=together)).results, key=lambda result: (result.prompt, result.turn)
    )
    assert [(result.prompt, result.turn) for result in results] == [(0, 0), (1, 0), (1, 1)]
    assert [result.drafted.tokens for result in results] == [result.drafted.tokens for result in whole]
    assert [result.ngram.accepted for result in results] == [result.ngram.accepted for result in whole]
    assert [result.context for result in results] == [result.context for result in whole]


def with_evaluation(job: EvaluationJob, **changes: Any) -> EvaluationJob:
    return dataclasses.replace(job, evaluation=EvaluationConfig(**{**job.evaluation.model_dump(), **changes}))


def test_sampled_texts_are_lossless_too_and_the_champion_reads_the_same_prompts(job: EvaluationJob) -> None:
    sampled = with_evaluation(job, temperature=1.0, top_p=0.95, block_size=3)
    results = measure(dataclasses.replace(sampled, champion=job.export)).results
    for result in results:
        assert result.target.tokens == result.drafted.tokens
        assert result.champion is not None
        assert (result.champion.tokens, result.champion.accepted) == (result.drafted.tokens, result.drafted.accepted)
        assert max(result.drafted.drafted) == 2
    assert [result.target.tokens for result in results] != [result.target.tokens for result in measure(job).results]


def test_a_prompt_without_room_is_counted_and_nothing_else_refused(job: EvaluationJob, tmp_path: Path) -> None:
    rows = [json.dumps({"turns": ["heron " * 400]}), json.dumps({"turns": ["Why?", "heron " * 400, "And?"]})]
    file = tmp_path / "long.jsonl"
    file.write_text("\n".join(rows))
    measured = measure(with_evaluation(job, prompts=None, prompt_sets={"long": {"path": str(file)}}))
    assert [(result.prompt_set, result.prompt, result.turn) for result in measured.results] == [("long", 1, 0)]
    assert report_on(measured, block_size=4, dtype="float32").counts == {TOO_LONG: 2}
    file.write_text(rows[0])
    with pytest.raises(ValueError, match="no prompt leaves room in the target's 512 positions"):
        measure(with_evaluation(job, prompts=str(file)))


def test_a_drafter_of_another_target_is_refused_before_anything_is_decoded(job: EvaluationJob, tmp_path: Path) -> None:
    shape = make_shape(hidden_size=64)
    other = write_export(tmp_path / "other", new_drafter(shape, 0).state_dict(), shape, target="heron")
    with pytest.raises(ValueError, match="other: a drafter of another target: hidden_size 64, the target has 32"):
        measure(dataclasses.replace(job, export=str(other)))


def test_mask_tokens_of_the_target_and_texts_of_one_token_are_counted() -> None:
    counts = {"prompts": {MASKS: 2}}
    ended = measured((2,), (2,), drafted=generation(tokens=(2,)))
    report = report_on(Measurements(results=[ended], counts=counts), block_size=4, dtype="float32")
    assert report.counts == {MASKS: 2, "requests that ended at their first token, without a round": 1}
    assert (report.rounds, report.acceptance_length, report.acceptance_interval) == (0, 0.0, None)
    assert report.acceptance_by_slot == (0.0,) * 3
    text = json.dumps(dataclasses.asdict(report), allow_nan=False)
    assert "NaN" not in text
    with pytest.raises(ValueError, match="not one request was measured"):
        report_on(Measurements(results=[], counts={}), block_size=4, dtype="float32")


def test_rates_where_all_before_were_accepted() -> None:
    rounds = generation((3, 1, 0, 2), (3, 3, 3, 2))
    assert by_slot([rounds], 3, conditional=True) == (3 / 4, 2 / 3, 1 / 1)
    assert histogram([rounds], 4) == (1, 1, 1, 1)


def test_rounds_by_the_length_of_the_text_before_them() -> None:
    """A prompt of 250 tokens: rounds begin at 251, 255 and 256 tokens; one of 600 at 601."""
    short = measured(context=250, drafted=generation((3, 0, 1), (3, 3, 3)))
    long = measured(context=600, drafted=generation((2,), (3,)))
    assert by_context([short, long]) == (
        ContextRange(start=0, end=256, rounds=2, acceptance_length=2.5),
        ContextRange(start=256, end=512, rounds=1, acceptance_length=2.0),
        ContextRange(start=512, end=1024, rounds=1, acceptance_length=3.0),
    )


def test_sets_are_reported_apart() -> None:
    chat = measured(prompt_set="chat", drafted=generation((0, 0), (3, 3)))
    report = report_on(
        Measurements(results=[measured(prompt_set="math"), chat], counts={"chat": {MASKS: 1}}), block_size=4, dtype="float32"
    )
    assert (report.sets["math"].acceptance_length, report.sets["chat"].acceptance_length, report.acceptance_length) == (
        2.0,
        1.0,
        1.5,
    )
    assert (report.sets["math"].counts, report.sets["chat"].counts) == ({}, {MASKS: 1})
    assert report.acceptance_interval == Estimate(value=1.5, low=1.0, high=2.0)


def snapshot(step: int, real: float, simulated: float) -> dict[str, Any]:
    return {
        "step": step, "prompts": 8, "rounds": 99, "acceptance_length": real, "simulated_acceptance_length": simulated,
        "simulated_on": "validation", "blocks": 50, "seconds": 0.5,
    }  # fmt: skip


def test_the_correlation_over_the_snapshots_of_a_run() -> None:
    rising = [snapshot(10 * n, 1 + n / 10, 1 + n / 5) for n in range(1, 6)]
    assert correlation(rising) == 1.0
    assert correlation([*rising, snapshot(90, 0.0, 9.0)]) == 1.0  # one without a round says nothing
    falling = [snapshot(n, 3 - n / 10, 1 + n) for n in range(4)]
    assert correlation(falling) == -1.0
    assert correlation([snapshot(n, *pair) for n, pair in enumerate([(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 2.0)])]) == 0.0
    assert correlation(rising[:2]) is None
    assert correlation([]) is None
    assert correlation([snapshot(n, 2.0, 2.0 + n) for n in range(4)]) is None  # a constant


def test_the_written_report_shows_every_number() -> None:
    stage = {"workers": 1, "items": 9, "busy": 1.0, "starved": 2.0, "blocked": 3.0}
    different = measured((1, 2), (1, 3), [1.0, 1e-6])
    acceptance = report_on(Measurements(results=[different], counts={"prompts": {MASKS: 3}}), block_size=4, dtype="float32")
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
            "evaluation": {
                "evaluations": [snapshot(10, 2.0, 2.2), snapshot(20, 0.0, 2.4), snapshot(30, 2.5, 3.0)],
                "correlation": 0.981,
                "best_step": 30,
                "seconds": 12.34,
                "share": 0.056,
                "left_out": 2,
                "given_up": 1,
                "warnings": ["step 30: the gap grew"],
            },
            "ledger": {
                "conversations": {"rows_in": 5, "kept": 4, "cut": 1, "dropped": {"no stop": 1}},
                "micro_batches": {"issued": 9, "applied": 6, "skipped": {"no rows": 1}, "returned": 2},
            },
            "stages": {"tap": stage},
        }
    )
    for piece in (
        "| acceptance length, this drafter | 2.00 [2.00, 2.00] |",
        "| acceptance length, simulated (teacher-forced) | 2.50 |",
        "| prompts | 1 | 2 | 2.00 [2.00, 2.00] | 2.50 | 1.50 | 1.00 | 2.00x [2.00, 2.00] | 0 / 1 |",
        "| 3 | 1 | 50.0% |",
        f"- {MASKS}: 3",
        "| acceptance length, n-gram reference | 1.50 |",
        "| acceptance length, target features zeroed | 1.00 |",
        "0 / 1, 1 of the others at a tie",
        "| speed-up over the target alone | 2.00x [2.00, 2.00] |",
        "| step | acceptance length, real | simulated (validation) | gap | rounds | seconds |",
        "| 10 | 2.00 | 2.20 | +10% | 99 | 0.5 |",
        "| 20 | no round | 2.40 |  | 99 | 0.5 |",
        "| 30 | 2.50 | 3.00 | +20% | 99 | 0.5 |",
        "correlation of simulated and real: 0.98",
        "best checkpoint by real acceptance: step 30",
        "12.3 s, 5.6% of the last process's training; left out while one was in work 2, given up 1",
        "- warning: step 30: the gap grew",
        "30 of 40 steps",
        "torch: 1 -> 2",
        "| tap | 1 | 9 | 1.0 | 2.0 | 3.0 |",
        "1,234 rows, 56,789 tokens",
        "dropped: 1 x no stop",
        "9 issued, 6 trained, 1 x no rows, 2 read ahead and not trained",
        "| prompts | 0 | 0 | 1 | 1.00e-06 | yes |",
    ):
        assert piece in text, piece
