"""Bootstrap intervals of ratios of sums: prompts are drawn again, with all their rounds, so what belongs together stays together.

    one table [prompts, columns] a prompt set --draw prompts with replacement--> sums [resamples, columns] --statistic--> interval

Prompts of one set are drawn among themselves. Two drafters measured on the same prompts share the draw: the interval is paired.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dflash_core.records import Estimate

RESAMPLES = 2000
LEVEL = 0.95
AT_ONCE = 2**22  # numbers drawn at a time

Statistic = Callable[[Sequence[np.ndarray]], np.ndarray]  # sums [resamples, columns] of each set -> [resamples]


def estimate(tables: Sequence[np.ndarray], statistic: Statistic, *, seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """Value and 95 % percentile interval of `statistic` over tables [prompts, columns], at least one prompt in each."""
    value = float(statistic([table.sum(0, keepdims=True) for table in tables])[0])
    rng = np.random.default_rng(seed)
    drawn = statistic([_resampled(table, rng, resamples) for table in tables])
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return Estimate(value=value, low=low, high=high)


def _resampled(table: np.ndarray, rng: np.random.Generator, resamples: int) -> np.ndarray:
    count = len(table)
    step = max(1, AT_ONCE // count)
    parts = [table[rng.integers(count, size=(min(step, resamples - done), count))].sum(1) for done in range(0, resamples, step)]
    return np.concatenate(parts)
