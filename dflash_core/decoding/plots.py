"""Pictures of a report: where drafts are accepted, how much a round commits, how training went.

report, metrics.jsonl --draw_report--> acceptance.png, training.png
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

POINTS = 200  # of the training curve: longer runs are averaged in as many stretches


def draw_report(report: dict[str, Any], metrics: Path, *, acceptance: Path, training: Path) -> list[Path]:
    """Writes the pictures that can be drawn; returns their paths. matplotlib takes a second to import."""
    written = [_draw_acceptance(report, acceptance)]
    curve = training_curve(metrics) if metrics.is_file() else []
    found = (report.get("evaluation") or {}).get("evaluations", [])
    measured = [(one["step"], one["acceptance_length"]) for one in found if one["acceptance_length"]]
    return [*written, _draw_training(curve, report["acceptance_length"], measured, training)] if curve else written


def training_curve(metrics: Path) -> list[tuple[float, float, float]]:
    """(step, loss, simulated acceptance length) over at most POINTS stretches of a run; what is not finite is left out."""
    rows = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        values = (row["step"], row["loss"], row["simulated_acceptance_length"])
        if all(value is not None and math.isfinite(value) for value in values):
            rows.append(values)
    stretch = max(1, math.ceil(len(rows) / POINTS))
    return [_mean(rows[start : start + stretch]) for start in range(0, len(rows), stretch)]


def _mean(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    step, loss, length = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    return step, loss, length


def _figure(columns: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _draw_acceptance(report: dict[str, Any], path: Path) -> Path:
    figure, (slots, rounds) = _figure(2)
    for name, own in (report["sets"] or {"all": report}).items():
        places = range(1, len(own["acceptance_by_slot"]) + 1)
        slots.plot(places, own["acceptance_by_slot"], marker="o", label=name)
        slots.plot(places, own["acceptance_by_slot_conditional"], marker=".", linestyle=":", color=slots.lines[-1].get_color())
    slots.set(xlabel="draft token", ylabel="accepted / offered", ylim=(0, 1.02), title="by slot (dotted: all before accepted)")
    slots.legend(fontsize="small")
    rounds.bar(range(1, len(report["histogram"]) + 1), report["histogram"])
    rounds.set(xlabel="tokens committed", ylabel="rounds", title=f"mean {report['acceptance_length']:.2f}")
    figure.savefig(path, dpi=100)
    return path


def _draw_training(
    curve: Sequence[tuple[float, float, float]], real: float, measured: Sequence[tuple[int, float]], path: Path
) -> Path:
    figure, (losses, lengths) = _figure(2)
    steps = [step for step, _, _ in curve]
    losses.plot(steps, [loss for _, loss, _ in curve])
    losses.set(xlabel="step", ylabel="loss", title="training loss")
    lengths.plot(steps, [length for _, _, length in curve], label="simulated, training rows")
    if measured:
        lengths.plot(*zip(*measured, strict=True), marker="o", color="tab:red", label="real decoding, snapshots")
    lengths.axhline(real, color="black", linestyle="--", label="real decoding, export")
    lengths.set(xlabel="step", ylabel="acceptance length", ylim=(0.9, None))
    lengths.legend(fontsize="small")
    figure.savefig(path, dpi=100)
    return path
