"""Bootstrap intervals against the textbook's own, and what they must not do."""

import numpy as np
import pytest

from dflash_core.decoding.intervals import estimate


def mean(sums):
    return sums[0][:, 0] / sums[0][:, 1]


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    found = estimate([np.stack([values, np.ones(400)], 1)], mean, resamples=4000)
    error = 1.96 * values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - error, abs=0.03)
    assert found.high == pytest.approx(values.mean() + error, abs=0.03)


def test_a_ratio_of_sums_weighs_prompts_by_their_rounds() -> None:
    found = estimate([np.array([[30.0, 10.0], [1.0, 1.0]])], mean)
    assert found.value == pytest.approx(31 / 11)
    assert (found.low, found.high) == (1.0, 3.0)  # one prompt drawn twice


def test_equal_prompts_leave_no_doubt_and_sets_are_drawn_apart() -> None:
    tables = [np.array([[3.0, 1.0]] * 4), np.array([[5.0, 1.0]] * 2)]
    found = estimate(tables, lambda sums: np.mean([own[:, 0] / own[:, 1] for own in sums], axis=0))
    assert (found.value, found.low, found.high) == (4.0, 4.0, 4.0)


def test_a_paired_difference_is_sharper_than_two_intervals() -> None:
    """Prompts differ by much more than the drafters do; drawn together, the difference is clear of zero all the same."""
    rng = np.random.default_rng(2)
    hard = rng.uniform(1, 8, 50)
    table = np.stack([hard + 0.1 + rng.normal(0, 0.05, 50), np.ones(50), hard, np.ones(50)], 1)
    both = estimate([table], lambda sums: (sums[0][:, 0] / sums[0][:, 1]) - (sums[0][:, 2] / sums[0][:, 3]))
    assert 0.07 < both.low < 0.1 < both.high < 0.13
    alone = estimate([table[:, :2]], mean)
    assert alone.high - alone.low > 1.0


def test_the_same_seed_gives_the_same_interval() -> None:
    table = np.random.default_rng(3).uniform(1, 2, (9, 2))
    assert estimate([table], mean, seed=4) == estimate([table], mean, seed=4)
    assert estimate([table], mean, seed=4) != estimate([table], mean, seed=5)
