"""How long the rows are and how much of them is trained, in numbers and as a picture.

(length, supervised tokens) of every row --Rows.count, +--> Rows --statistics--> manifest --draw--> data.png
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.files import written_beside

QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}
SHARE_BIN = 5  # percent
INK, FAINT, BARS, DROPS = "#222222", "#d9d9d9", "#2f6f9f", "#b5533c"


@dataclass
class Rows:
    """Exact counts that add up over parts; as many entries as there are lengths, not rows."""

    lengths: Counter[int] = field(default_factory=Counter)  # rows by length in tokens
    shares: Counter[int] = field(default_factory=Counter)  # rows by supervised share in whole percent
    supervised: int = 0  # tokens

    def count(self, length: int, supervised: int) -> None:
        """Takes one row in."""
        self.lengths[length] += 1
        self.shares[100 * supervised // length] += 1
        self.supervised += supervised

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(self.lengths + other.lengths, self.shares + other.shares, self.supervised + other.supervised)


def statistics(rows: Rows) -> dict[str, Any]:
    """For the manifest: quantiles of the length, and two histograms as [from, to, rows], `to` not included.

    Lengths are in tokens, in bins of half an octave; shares are percent of a row's tokens that are supervised.
    """
    tokens = sum(length * count for length, count in rows.lengths.items())
    ordered = sorted(rows.lengths)
    below = list(itertools.accumulate(rows.lengths[length] for length in ordered))
    count = rows.lengths.total()

    def quantile(share: float) -> int:
        return next((length for length, upto in zip(ordered, below, strict=True) if upto >= share * count), 0)

    lengths = {name: quantile(share) for name, share in QUANTILES.items()}
    return {
        "rows": count,
        "tokens": tokens,
        "supervised": rows.supervised,
        "length": {"mean": round(tokens / count) if count else 0, **lengths, "longest": max(ordered, default=0)},
        "lengths": _binned(rows.lengths, _octaves(ordered)),
        "supervised_percent": _binned(rows.shares, [*range(0, 100, SHARE_BIN), 101]),
    }


def _octaves(lengths: list[int]) -> list[int]:
    """Edges at powers of the root of two around all lengths, as whole numbers."""
    if not lengths:
        return [0, 1]
    first, last = (math.floor(2 * math.log2(length)) for length in (lengths[0], lengths[-1] + 1))
    return sorted({math.ceil(2 ** (half / 2)) for half in range(first, last + 2)})


def _binned(counts: Counter[int], edges: list[int]) -> list[list[int]]:
    bins = [[low, high, 0] for low, high in itertools.pairwise(edges)]
    for value, count in counts.items():
        next(entry for entry in bins if entry[0] <= value < entry[1])[2] += count
    return bins


# ---- the picture -----------------------------------------------------------------------------------------------------


def draw(ledger: dict[str, Any], path: Path) -> None:
    """Length histogram, supervised share, and what was dropped, as a PNG. `ledger` is a manifest's."""
    from matplotlib.figure import Figure  # takes most of a second to import

    found = ledger["statistics"]
    dropped = [*ledger["dropped"].items()][:8]
    heights = [4.2, 0.8 + 0.35 * len(dropped)][: 2 if dropped else 1]
    figure = Figure(figsize=(11, sum(heights)), dpi=110, layout="constrained")
    # figures of their own, so that long reasons do not squeeze the histograms
    upper, *lower = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    share = found["supervised"] / max(1, found["tokens"])
    figure.suptitle(
        f"{found['rows']:,} rows, {found['tokens']:,} tokens, {share:.0%} supervised   "
        f"({ledger['kept']:,} of {ledger['rows_in']:,} conversations kept, {ledger['cut']:,} rows cut)",
        color=INK,
    )
    lengths, shares = upper.subplots(1, 2)
    _draw_lengths(lengths, found)
    _draw_shares(shares, found)
    for below in lower:
        _draw_dropped(below.subplots(), dropped)
    with written_beside(path) as place:
        figure.savefig(place, format="png")


def _draw_lengths(axes: Any, found: dict[str, Any]) -> None:
    lows, highs, rows = zip(*found["lengths"], strict=True)
    axes.bar(
        lows, rows, width=[high - low for low, high in zip(lows, highs, strict=True)], align="edge", color=BARS, edgecolor="white"
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(lows[0], highs[-1])
    for name, colour in (("median", INK), ("p99", DROPS)):
        axes.axvline(found["length"][name], color=colour, linestyle="--", linewidth=1, label=f"{name} {found['length'][name]:,}")
    axes.legend(frameon=False)
    _plain(axes, "Tokens a row", "rows")


def _draw_shares(axes: Any, found: dict[str, Any]) -> None:
    lows, _, rows = zip(*found["supervised_percent"], strict=True)
    axes.bar(lows, rows, width=SHARE_BIN, align="edge", color=BARS, edgecolor="white")
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter("{x:.0f} %")
    _plain(axes, "Supervised share of a row", "rows")


def _draw_dropped(axes: Any, dropped: list[tuple[str, int]]) -> None:
    reasons, counts = zip(*reversed(dropped), strict=True)
    bars = axes.barh(reasons, counts, color=DROPS, height=0.6)
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=4, color=INK)
    axes.margins(x=0.1)
    _plain(axes, "Dropped conversations by reason", "")


def _plain(axes: Any, title: str, what: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_ylabel(what)
    axes.yaxis.set_major_formatter(axes.yaxis.get_major_formatter() if not what else (lambda value, _: f"{value:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(color=FAINT)
    axes.set_axisbelow(True)
