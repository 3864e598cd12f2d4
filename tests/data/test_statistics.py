"""Counts of rows: quantiles and histograms against plain numpy, and a picture that is one."""

from pathlib import Path

import numpy as np
import pytest

from dflash_core.data.statistics import Rows, draw, statistics


def rows_of(lengths: list[int], supervised: list[int]) -> Rows:
    rows = Rows()
    for length, trained in zip(lengths, supervised, strict=True):
        rows.count(length, trained)
    return rows


def make_rows(count: int, seed: int = 0) -> tuple[list[int], list[int]]:
    generator = np.random.default_rng(seed)
    lengths = np.maximum(2, generator.lognormal(5, 1, count).astype(int))
    return lengths.tolist(), (lengths * generator.random(count)).astype(int).tolist()


def test_numbers_are_those_of_the_sorted_rows() -> None:
    lengths, supervised = make_rows(1001)
    found = statistics(rows_of(lengths, supervised))
    ordered = sorted(lengths)
    assert (found["rows"], found["tokens"], found["supervised"]) == (1001, sum(lengths), sum(supervised))
    assert found["length"] == {
        "mean": round(sum(lengths) / 1001),
        "median": ordered[500],
        "p90": ordered[900],
        "p99": ordered[990],
        "longest": ordered[-1],
    }
    for low, high, count in found["lengths"]:
        assert count == sum(low <= length < high for length in lengths)
    assert sum(count for _, _, count in found["lengths"]) == 1001
    edges = [low for low, _, _ in found["lengths"]]
    assert edges[0] <= ordered[0]
    assert edges[-1] <= ordered[-1] < found["lengths"][-1][1]
    shares = [100 * trained // length for length, trained in zip(lengths, supervised, strict=True)]
    for low, high, count in found["supervised_percent"]:
        assert count == sum(low <= share < high for share in shares)


@pytest.mark.parametrize("lengths", [[2], [7, 7, 7], [2, 3, 4, 5, 6, 7, 8], [1024], [1023, 1025], [2, 2**20]])
def test_every_length_has_its_bin(lengths: list[int]) -> None:
    found = statistics(rows_of(lengths, lengths))
    assert sum(count for _, _, count in found["lengths"]) == len(lengths)
    assert all(low < high for low, high, _ in found["lengths"])
    assert found["supervised_percent"][-1] == [95, 101, len(lengths)], "all of the tokens are supervised"


def test_parts_add_up_and_nothing_is_zero() -> None:
    lengths, supervised = make_rows(500)
    whole = rows_of(lengths, supervised)
    assert rows_of(lengths[:123], supervised[:123]) + rows_of(lengths[123:], supervised[123:]) == whole
    assert whole + Rows() == whole
    assert statistics(Rows())["length"] == {"mean": 0, "median": 0, "p90": 0, "p99": 0, "longest": 0}


@pytest.mark.parametrize("dropped", [{}, {"longer than max_length": 12, "an assistant turn without a stop token": 3}])
def test_the_picture_is_written_whole(dropped: dict[str, int], tmp_path: Path) -> None:
    ledger = {
        "rows_in": 515, "kept": 500, "cut": 4, "dropped": dropped, "statistics": statistics(rows_of(*make_rows(500))),
    }  # fmt: skip
    draw(ledger, tmp_path / "data.png")
    assert (tmp_path / "data.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["data.png"]
