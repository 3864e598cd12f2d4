"""How far a stage is: a bar on a terminal, elsewhere a line now and then, which the run's log in Prefect has in both cases.

rows tokenized -> RowProgress        rows answered -> RegenerationProgress        StepMetrics -> Progress
"""

import logging
import time
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dflash_core.records import StepMetrics
from flows.console import CONSOLE, say

LOG = logging.getLogger("flows")
LINE_EVERY_S = 10.0
WIDE = 140  # columns of a terminal


class _Live:
    """A bar that is drawn while the block runs, on a terminal; elsewhere nothing is."""

    def __init__(self, what: str, *columns: ProgressColumn, total: int | None, transient: bool = False) -> None:
        self._live = CONSOLE.is_terminal
        numbers = TextColumn("{task.fields[numbers]}")
        bar = [BarColumn()] if CONSOLE.width >= WIDE else []  # the numbers take what is left of the line
        self._bar = Bar(TextColumn(what), *bar, MofNCompleteColumn(), *columns, numbers, console=CONSOLE, transient=transient)
        self._task = self._bar.add_task(what, total=total, numbers="")
        self._started = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()


class RowProgress(_Live):
    """Conversations tokenized so far; call it now and then. The line is for runs that take long enough to be watched."""

    def __init__(self, total: int) -> None:
        super().__init__("tokenizing", total=total, transient=True)
        self._total = total

    def __call__(self, done: int) -> None:
        """Shows how many are done, how fast, and how long the rest takes at that speed."""
        now = time.monotonic()
        rate = done / max(1e-9, now - self._started)
        left = f"  {_duration((self._total - done) / rate)} left" if done else ""
        numbers = f"{rate:,.0f} rows/s{left}"
        if self._live:
            self._bar.update(self._task, completed=done, numbers=numbers)
        if now - self._shown >= LINE_EVERY_S:
            LOG.info(f"tokenized {done:,}/{self._total:,}  {numbers}", extra={"on_console": not self._live})
            self._shown = now


class RegenerationProgress:
    """Call it with where a regeneration stands, from any thread: rows, answers a second and what is left, now and then."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()
        self._before = 0
        self._tenth = -1

    def __call__(self, progress: Any) -> None:
        """Shows a line at the start, at each tenth, and when none came for a while."""
        now = time.monotonic()
        if self._tenth < 0:
            self._started, self._before = now, progress.rows
        tenth = 10 * (progress.rows_in - progress.left) // max(1, progress.rows_in)
        wait = max(LINE_EVERY_S, 0.05 * (now - self._started))  # a long run writes fewer lines
        if now - self._shown < (1.0 if tenth > self._tenth else wait) and progress.left and self._tenth >= 0:
            return
        self._shown, self._tenth = now, max(tenth, self._tenth)
        text = f"answered {progress.rows:>{len(f'{progress.rows_in:,}')},}/{progress.rows_in:,}"
        new, seconds = progress.rows - self._before, now - self._started
        if new and seconds:
            text += f"  {new / seconds:,.1f} rows/s  {progress.tokens / seconds:,.0f} tokens/s"
            text += f"  {_duration(progress.left * seconds / new)} left" if progress.left else ""
        if failures := sum(progress.failures.values()):
            text += f"  requests sent again {failures:,}"
        say(text)


class Progress(_Live):
    """Call it with every step, from any thread. Means are over the steps since the last display."""

    def __init__(self) -> None:
        super().__init__("training", TimeRemainingColumn(), total=None)
        self.percent = 0.0
        self._tenth = 0
        self._sums = _Sums()

    def __call__(self, metrics: StepMetrics, total: int) -> None:
        """Takes one step in, and shows it when it is time."""
        now = time.monotonic()
        self._sums.add(metrics)
        self.percent = 100 * metrics.step / total
        tenth = 10 * metrics.step // total
        wait = max(LINE_EVERY_S, 0.05 * (now - self._started))  # a long run writes fewer lines
        if self._live:
            self._bar.update(self._task, total=total, completed=metrics.step, numbers=self._sums.text(metrics))
        if tenth > self._tenth or now - self._shown >= wait or metrics.step == total:
            left = (total - metrics.step) * self._sums.seconds / self._sums.steps
            eta = f"  {_duration(left)} left" if metrics.step < total and self._shown > self._started else ""
            text = f"step {metrics.step:>{len(str(total))}}/{total}  {self._sums.text(metrics)}{eta}"
            LOG.info(text, extra={"on_console": not self._live})
            self._shown, self._tenth, self._sums = now, tenth, _Sums()


class _Sums:
    """Sums over the steps of one display."""

    def __init__(self) -> None:
        self.loss = self.weight = self.accepted = self.drafts = self.seconds = 0.0
        self.steps = self.tokens = self.skipped = 0

    def add(self, metrics: StepMetrics) -> None:
        self.steps += 1
        self.loss += metrics.loss_sum
        self.weight += metrics.weight_sum
        self.accepted += metrics.accepted_sum
        self.drafts += metrics.drafting
        self.seconds += metrics.seconds
        self.tokens += metrics.tokens
        self.skipped += sum(metrics.skipped.values())

    def text(self, metrics: StepMetrics) -> str:
        """`loss 2.31  simulated acceptance 3.10  5,120 tokens/s`."""
        loss = self.loss / self.weight if self.weight else float("nan")
        parts = [
            f"loss {loss:.3f}",
            f"simulated acceptance {1 + self.accepted / max(1, self.drafts):.2f}",
            f"{self.tokens / self.seconds if self.seconds else 0:,.0f} tokens/s",
        ]
        busy = {name: metrics.observed[f"{name}_busy"] for name in ("read", "tap", "train") if f"{name}_busy" in metrics.observed}
        if busy:
            busiest = max(busy, key=lambda name: busy[name])
            parts.append(f"{busiest} busy {busy[busiest]:.0%}")
        if self.skipped:
            parts.append(f"skipped micro-batches {self.skipped}")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
