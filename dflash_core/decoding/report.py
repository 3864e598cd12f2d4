"""The report of a run as text for people."""

from typing import Any

DEFINITION = (
    "Acceptance length: tokens committed a verify round, that is accepted draft tokens + 1 (the target's own), over all rounds."
)


def acceptance_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) lines of the acceptance table."""
    ties = sum(divergence["tie"] for divergence in report["divergences"])
    return [
        ("acceptance length, this drafter", f"{report['acceptance_length']:.2f}"),
        ("acceptance length, n-gram reference", f"{report['acceptance_length_ngram']:.2f}"),
        ("acceptance length, target features zeroed", f"{report['acceptance_length_zero_features']:.2f}"),
        ("acceptance rate by draft token", "  ".join(f"{rate:.2f}" for rate in report["acceptance_by_slot"])),
        ("lossless (equal to the target alone)", report["lossless"] + (f", {ties} of the others at a tie" if ties else "")),
        ("speed-up over the target alone", f"{report['speedup']:.2f}x"),
        (
            "tokens/s, target alone -> with drafts",
            f"{report['target_tokens_per_second']:.0f} -> {report['drafted_tokens_per_second']:.0f}",
        ),
    ]


def report_markdown(report: dict[str, Any]) -> str:
    """report.md."""
    lines = [
        f"# Drafter `{report['name']}`",
        "",
        f"{report['prompts']} held-out requests, {report['rounds']} verify rounds. {DEFINITION}",
        "",
    ]
    lines += ["| measure | value |", "|---|---|"]
    lines += [f"| {what} | {value} |" for what, value in acceptance_rows(report)]
    training, data = report["training"], report["data"]
    lines += ["", "## Training", ""]
    lines += [
        f"- {training['step']} of {training['total_steps']} steps, {training['tokens']:,} real tokens, {report['tokens_per_second']:,.0f} tokens/s",
        f"- start-up: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in report['startup_s'].items())}",
        f"- bottleneck: {report['bottleneck']}",
        f"- micro-batches: {report['ledger']['micro_batches']}",
    ]
    lines += [f"- departure from exact resume: {change}" for change in training["departures"]]
    lines += ["", "| stage | workers | items | busy s | starved s | blocked s |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {stage['workers']} | {stage['items']} | {stage['busy']:.1f} | {stage['starved']:.1f} | {stage['blocked']:.1f} |"
        for name, stage in report["stages"].items()
    ]
    ledger = report["ledger"]["conversations"]
    lines += [
        "",
        "## Data",
        "",
        f"- {data['rows']:,} rows, {data['tokens']:,} tokens, {data['supervised']:,} supervised, {data['shards']} shards",
    ]
    lines += [
        f"- conversations in {ledger['rows_in']}, kept {ledger['kept']}, cut {ledger['cut']}, dropped {ledger['dropped'] or 'none'}"
    ]
    if report["divergences"]:
        lines += [
            "",
            "## Differences from the target alone",
            "",
            "| prompt | turn | token | top-2 margin | tie |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {d['prompt']} | {d['turn']} | {d['position']} | {d['margin']:.2e} | {'yes' if d['tie'] else 'NO'} |"
            for d in report["divergences"]
        ]
    return "\n".join(lines) + "\n"
