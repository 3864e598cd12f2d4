"""What a person sees: every line is a log record of the logger `flows`, so the run's log in Prefect has it too.

say, show_*  -> logger "flows" -> console (command line only) and Prefect's run log
Progress     -> a bar on a terminal, else a line now and then
"""

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dflash_core.decoding.report import DEFINITION, acceptance_rows
from dflash_core.records import Manifest, StepMetrics
from dflash_core.rundir import RunDirectory

LOG = logging.getLogger("flows")
LOG.setLevel(logging.INFO)
LINE_EVERY_S = 10.0
_CONSOLE = Console(soft_wrap=True, highlight=False)


class _Lines(logging.Handler):
    """Plain messages; warnings say that they are."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_console", True):
            prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            _CONSOLE.print(prefix + record.getMessage(), markup=False)


def attach() -> None:
    """Our log lines on standard output; for the command line, where Prefect's console handler is off."""
    handler = _Lines()
    for name, level in (("flows", logging.INFO), ("dflash_core", logging.WARNING)):
        handler.setLevel(logging.INFO)
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)


def say(line: str) -> None:
    """One line for the person and for the run's log."""
    LOG.info(line)


# ---- preparation -----------------------------------------------------------------------------------------------------


def show_prepared(manifest: Manifest, run: RunDirectory, *, skipped: bool) -> None:
    """Rows, tokens and what was left out."""
    ledger = manifest.ledger
    head = "preparation skipped: the shards are up to date" if skipped else "prepared"
    say(
        f"{head}: {manifest.rows:,} rows, {manifest.tokens:,} tokens ({manifest.supervised:,} supervised) in {_short(run.shards)}"
    )
    say(f"  conversations: {ledger['rows_in']:,} in, {ledger['kept']:,} kept, {ledger['cut']:,} of them cut to length")
    for reason, count in ledger["dropped"].items():
        say(f"  dropped: {count:,} x {reason}")


# ---- training --------------------------------------------------------------------------------------------------------


class Progress:
    """Call it with every step, from any thread. Means are over the steps since the last display."""

    def __init__(self) -> None:
        self._live = _CONSOLE.is_terminal
        self._bar = Bar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=_CONSOLE,
        )
        self._task = self._bar.add_task("training", total=None, numbers="")
        self._started = self._shown = time.monotonic()
        self._tenth = 0
        self._sums = _Sums()

    def __enter__(self) -> "Progress":
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    def __call__(self, metrics: StepMetrics, total: int) -> None:
        """Takes one step in, and shows it when it is time."""
        now = time.monotonic()
        self._sums.add(metrics)
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
        self.drafts += metrics.counted[1]
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
        if self.skipped:
            parts.append(f"skipped micro-batches {self.skipped}")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


# ---- the end ---------------------------------------------------------------------------------------------------------


def show_report(report: dict[str, Any], run: RunDirectory, mlflow_uri: str | None) -> None:
    """The acceptance table, where the files are, and how to open the pages."""
    rows = acceptance_rows(report)
    width = max(len(what) for what, _ in rows)
    training = report["training"]
    say("")
    say(f"drafter {report['name']}: {training['step']:,} steps, {report['tokens_per_second']:,.0f} tokens/s")
    say(f"  bottleneck: {report['bottleneck']}")
    say("")
    say(f"acceptance on {report['prompts']} held-out requests, {report['rounds']:,} verify rounds")
    for what, value in rows:
        say(f"  {what:<{width}}  {value}")
    say(f"  ({DEFINITION})")
    say("")
    say(f"drafter for serving  {_short(run.export)}")
    say(f"report               {_short(run.report_text)}, {run.report.name}, {run.metrics.name}, {run.timeline.name}")
    for what, command in _pages(mlflow_uri):
        say(f"{what:<20} {command}")


def _pages(mlflow_uri: str | None) -> list[tuple[str, str]]:
    """Commands or addresses that show the run in MLflow and Prefect."""
    scripts = _short(Path(sys.executable).parent)
    pages = []
    if mlflow_uri is not None:
        local = mlflow_uri.startswith("sqlite:")
        page = f"{scripts}/mlflow ui --backend-store-uri {mlflow_uri}   then http://127.0.0.1:5000"
        pages.append(("MLflow page", page if local else mlflow_uri))
    api = os.environ.get("PREFECT_API_URL")
    page = api.removesuffix("/api") if api else f"{scripts}/prefect server start   then http://127.0.0.1:4200"
    return [*pages, ("Prefect page", page)]


def _short(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
