"""metrics.jsonl: rows of sums and means, and what a resumed run cuts."""

import json
from dataclasses import replace
from pathlib import Path

from dflash_core.records import StepMetrics
from dflash_core.training.metrics import MetricsFile, step_row

STEP = StepMetrics(
    step=1,
    position=2,
    epoch=0,
    micro_batches=2,
    skipped={"no anchor": 1},
    rows=3,
    tokens=100,
    computed_tokens=120,
    blocks=10,
    loss_sum=12.0,
    weight_sum=8.0,
    correct=(0, 6, 3),
    counted=(0, 10, 5),
    accepted_sum=9,
    learning_rate=0.1,
    gradient_norm=1.5,
    applied=True,
    seconds=0.5,
)


def test_a_row_has_the_sums_and_the_means_of_them() -> None:
    row = step_row(STEP)
    assert row["loss"] == 1.5
    assert row["accuracy"] == 9 / 15
    assert row["simulated_acceptance_length"] == 1.9
    assert row["tokens_per_second"] == 200.0
    assert (row["loss_sum"], row["skipped"], row["counted"]) == (12.0, {"no anchor": 1}, (0, 10, 5))


def test_a_step_without_weight_is_still_strict_json() -> None:
    empty = replace(STEP, loss_sum=0.0, weight_sum=0.0, correct=(0, 0, 0), counted=(0, 0, 0), gradient_norm=float("nan"))
    text = json.dumps(step_row(empty), allow_nan=False)
    assert json.loads(text)["loss"] is None
    assert json.loads(text)["gradient_norm"] is None


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in (1, 2):
        file.write(replace(STEP, step=step))
        assert steps(path) == list(range(1, step + 1))
    file.close()


def test_a_resumed_run_cuts_what_it_will_write_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(1, 8):
        file.write(replace(STEP, step=step))
    file.close()
    with path.open("a") as half:
        half.write('{"step": 8, "posi')
    file = MetricsFile(path, 5)
    assert (file.lost_steps, file.lost_tokens) == (2, 200)  # the half line was never counted by anybody
    file.write(replace(STEP, step=6))
    file.close()
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_half_line_within_the_kept_part_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    file = MetricsFile(path, 1)
    file.write(replace(STEP, step=2))
    file.close()
    assert steps(path) == [1, 2]
