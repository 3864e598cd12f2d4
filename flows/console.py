"""What a person sees: every line is a log record of the logger `flows`, so the run's log in Prefect has it too.

say, show_*  -> logger "flows" -> console (command line only) and Prefect's run log        (bars: progress.py)
"""

import itertools
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dflash_core.decoding.report import DEFINITION, INTERVALS, acceptance_rows, served_rows, set_rows
from dflash_core.records import Decision, Manifest
from dflash_core.rundir import RunDirectory

if TYPE_CHECKING:  # it imports pyarrow, and a deployment's flow must load at once
    from dflash_core.data.preview import Look

LOG = logging.getLogger("flows")
LOG.setLevel(logging.INFO)
logging.getLogger("dflash_core.training.evaluations").setLevel(
    logging.INFO
)  # a line an evaluation, where else only warnings are shown
CONSOLE = Console(soft_wrap=True, highlight=False)


class _Lines(logging.Handler):
    """Plain messages; warnings say that they are."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "on_console", True):
            prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
            CONSOLE.print(prefix + record.getMessage(), markup=False)


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
    """Rows, tokens, how long and how much supervised they are, and what was left out."""
    ledger = manifest.ledger
    head = "preparation skipped: the shards are up to date" if skipped else "prepared"
    say(
        f"{head}: {manifest.rows:,} rows, {manifest.tokens:,} tokens ({manifest.supervised:,} supervised) in {_short(run.shards)}"
    )
    if ledger["validation_rows"]:
        say(f"  held out for validation: {ledger['validation_rows']:,} rows in {_short(run.validation)}")
    share = ledger["kept"] / ledger["rows_in"]
    say(
        f"  conversations: {ledger['rows_in']:,} in, {ledger['kept']:,} kept ({share:.1%}), {ledger['cut']:,} of them cut to length"
    )
    say(f"  masks proven by: {_counts(ledger['methods'])}")
    for reason, count in ledger["dropped"].items():
        say(f"  dropped: {count:,} x {reason}")
    for reason, count in ledger["rows_dropped"].items():
        say(f"  rows dropped from kept conversations: {count:,} x {reason}")
    for note, count in ledger["notes"].items():
        say(f"  noted: {count:,} x {note}")
    length = ledger["statistics"]["length"]
    held_out = ", validation included" if ledger["validation_rows"] else ""
    say(f"  tokens a row{held_out}: " + ", ".join(f"{name} {value:,}" for name, value in length.items()))
    bins = ledger["statistics"]["lengths"]
    most = max(rows for _, _, rows in bins)
    for low, high, rows in bins:
        say(f"  {low:>8,} to {high - 1:>8,}  {rows:>9,}  {'#' * round(40 * rows / max(1, most))}")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def show_preview(looks: Sequence["Look"], path: Path, dropped: dict[str, int]) -> None:
    """Rows with their supervised tokens in colour, or in [[ ]] where there is none; long stretches are shortened."""
    plain = CONSOLE.color_system is None
    for shown in looks:
        text = Text()
        for supervised, pieces in itertools.groupby(shown.pieces, key=lambda piece: piece.supervised):
            colour = "green" if supervised else "dim"
            text.append("[[" if plain and supervised else "")
            for piece in pieces:
                text.append(_shortened(piece.text), style=f"reverse {colour}" if piece.special else colour)
            text.append("]]" if plain and supervised else "")
        CONSOLE.print(Text(shown.headline, style="bold red" if shown.dropped else "bold"))
        CONSOLE.print(text, end="\n\n")
    for reason, count in dropped.items():
        say(f"left out before tokenization: {count:,} x {reason}")
    mark = "in [[ ]]" if plain else "green"
    say(f"Supervised tokens, which the drafter learns to predict, are {mark}. The same as a page: {_short(path)}")


def _shortened(text: str, *, most: int = 800) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {len(text) - most:,} characters ... {text[-most // 2 :]}"


# ---- regeneration ----------------------------------------------------------------------------------------------------


def show_regenerated(summary: dict[str, Any], next_command: str) -> None:
    """Rows, how the answers ended, what has no row, and what to run next."""
    counts = summary["conversations"]
    say(f"regenerated: {counts['kept']:,} of {counts['rows_in']:,} conversations in {_short(Path(summary['output']))}")
    if summary["before"]:
        say(f"  answered by an earlier run: {summary['before']:,}")
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in summary["finish_reasons"].items())
    say(f"  answers: {summary['turns']:,} ({reasons}), {summary['with_token_ids']:,} with token ids")
    for reason, count in summary["ended"].items():
        say(f"  ended early: {count:,} x {reason}")
    for reason, count in counts["dropped"].items():
        say(f"  no row: {count:,} x {reason}")
    for reason, count in summary["failures"].items():
        say(f"  sent again: {count:,} requests x {reason}")
    say(f"next: {next_command}")


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
    say(f"  ({DEFINITION} {INTERVALS})")
    if len(report["sets"]) > 1:
        for row in set_rows(report):
            say("  " + "  ".join(f"{name} {value}" for name, value in row.items()))
    for what, count in report["counts"].items():
        say(f"  counted: {count:,} x {what}")
    say("")
    say(f"drafter for serving  {_short(run.export)}")
    say(f"report               {_short(run.report_text)}, {run.report.name}, {run.metrics.name}, {run.timeline.name}")
    for what, command in _pages(mlflow_uri):
        say(f"{what:<20} {command}")


def show_served(served: list[dict[str, Any]], run: RunDirectory) -> None:
    """A line for each prompt set that a server answered."""
    say("")
    for row in served_rows(served):
        say("  ".join(f"{name} {value}" for name, value in row.items()))
    say(f"({DEFINITION})")
    say(f"report  {_short(run.root / 'served.md')}")


def show_promotion(decision: Decision, model: str, *, version: str | None, champion: str | None) -> str:
    """Every gate with what it found, and what became of the drafter; the same as Markdown."""
    say("")
    lines = ["| gate | | found |", "|---|---|---|"]
    for gate in decision.gates:
        passed = "passed" if gate.passed else "REFUSED"
        say(f"  {gate.name:<10} {passed:<8} {gate.reason}")
        lines.append(f"| {gate.name} | {passed} | {gate.reason} |")
    verdict = "promoted" if decision.promoted else "refused"
    kept = "; nothing was registered (dry run)" if version is None else f": version {version} of {model}"
    before = f", compared with champion {champion}" if champion else ", no champion before"
    say(f"{verdict}{kept}{before}")
    return "\n".join([f"**{verdict}**{kept}{before}", "", *lines]) + "\n"


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
