"""The report of a run as text for people."""

from typing import Any

from dflash_core.records import Estimate

DEFINITION = (
    "Acceptance length: tokens committed a verify round, that is accepted draft tokens + 1 (the target's own), over all rounds."
)
INTERVALS = "Intervals are 95 % bootstrap intervals over prompts."
SIMULATED = (
    "Simulated: a block behind every token of the target's text, as training counts. Rounds of real decoding begin where the last "
    "one ended, which is more often at a hard place."
)


def shown(value: Estimate | dict[str, float] | None, *, sign: str = "") -> str:
    """`2.31 [2.20, 2.44]`, as text."""
    if value is None:
        return "not measured"
    own = value if isinstance(value, dict) else vars(value)
    return f"{own['value']:{sign}.2f} [{own['low']:{sign}.2f}, {own['high']:{sign}.2f}]"


def acceptance_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) lines of the acceptance table."""
    ties = sum(divergence["tie"] for divergence in report["divergences"])
    return [
        ("acceptance length, this drafter", shown(report["acceptance_interval"])),
        ("acceptance length, mean over prompts", shown(report["acceptance_by_prompt"])),
        ("acceptance length, simulated (teacher-forced)", f"{report['acceptance_length_simulated']:.2f}"),
        ("acceptance length, n-gram reference", f"{report['acceptance_length_ngram']:.2f}"),
        ("acceptance length, target features zeroed", f"{report['acceptance_length_zero_features']:.2f}"),
        ("acceptance rate by draft token", _rates(report["acceptance_by_slot"])),
        ("the same, where all before were accepted", _rates(report["acceptance_by_slot_conditional"])),
        ("lossless (equal to the target alone)", report["lossless"] + (f", {ties} of the others at a tie" if ties else "")),
        ("speed-up over the target alone", _times(report["speedup_interval"])),
        (
            "tokens/s, target alone -> with drafts",
            f"{report['target_tokens_per_second']:.0f} -> {report['drafted_tokens_per_second']:.0f}",
        ),
        ("time with drafts: drafting, verifying", f"{report['draft_share']:.0%}, {1 - report['draft_share']:.0%}"),
    ]


def _rates(rates: Any) -> str:
    return "  ".join(f"{rate:.2f}" for rate in rates)


def _times(value: dict[str, float] | None) -> str:
    return "not measured" if value is None else f"{value['value']:.2f}x [{value['low']:.2f}, {value['high']:.2f}]"


def set_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    """One line a prompt set."""
    return [
        {
            "prompt set": name,
            "requests": f"{own['prompts']:,}",
            "rounds": f"{own['rounds']:,}",
            "acceptance length": shown(own["acceptance_interval"]),
            "simulated": f"{own['acceptance_length_simulated']:.2f}",
            "n-gram": f"{own['acceptance_length_ngram']:.2f}",
            "features zeroed": f"{own['acceptance_length_zero_features']:.2f}",
            "speed-up": _times(own["speedup_interval"]),
            "lossless": f"{own['lossless_exact']} / {own['lossless_checked']}",
        }
        for name, own in report["sets"].items()
    ]


def served_rows(reports: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One line a prompt set, measured on a server."""
    return [
        {
            "prompt set": own["prompt_set"],
            "requests": f"{own['requests']:,}",
            "rounds": f"{own['rounds']:,}",
            "acceptance length": shown(own["acceptance_interval"]),
            "by draft token": _rates(own["acceptance_by_slot"]),
            "seconds a request, median and p95": f"{own['seconds_median']:.2f}, {own['seconds_p95']:.2f}",
            "tokens/s of a request": f"{own['tokens_per_second_of_a_request']:.0f}",
            "from": own["source"] + "".join(f", {count} {name}" for name, count in own["counts"].items()),
        }
        for own in reports
    ]


def served_markdown(url: str, reports: list[dict[str, Any]]) -> str:
    """served.md."""
    lines = [
        f"# `{reports[0]['model']}` at {url}",
        "",
        f"{DEFINITION} Intervals are 95 % bootstrap intervals over groups of requests.",
        "",
    ]
    return "\n".join([*lines, *table(served_rows(reports))]) + "\n"


def report_markdown(report: dict[str, Any]) -> str:
    """report.md."""
    lines = [
        f"# Drafter `{report['name']}`",
        "",
        f"{report['prompts']} held-out requests, {report['rounds']} verify rounds. {DEFINITION} {INTERVALS} {SIMULATED}",
        "",
        *table([{"measure": what, "value": value} for what, value in acceptance_rows(report)]),
        *_section("Prompt sets", table(set_rows(report))),
        *_section("Tokens committed a round", table(_histogram_rows(report))),
        *_section("By length of the text before a round", table(_context_rows(report))),
        *_section("Counted", [f"- {name}: {count:,}" for name, count in report["counts"].items()]),
        *_section("While it was trained", _evaluation_lines(report.get("evaluation"))),
        *_section("Training", _training_lines(report)),
        *_section("Data", _data_lines(report)),
    ]
    if report["divergences"]:
        lines += _section("Differences from the target alone", table(_divergence_rows(report)))
    return "\n".join(lines) + "\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"## {title}", "", *lines] if lines else []


def table(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a Markdown table whose columns are the keys of the first row."""
    if not rows:
        return []
    lines = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    return lines + [f"| {' | '.join(row.values())} |" for row in rows]


def _histogram_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    rounds = max(1, report["rounds"])
    return [
        {"tokens": str(tokens), "rounds": f"{count:,}", "share": f"{count / rounds:.1%}"}
        for tokens, count in enumerate(report["histogram"], 1)
    ]


def _context_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            "tokens": f"{own['start']:,} to {own['end'] - 1:,}",
            "rounds": f"{own['rounds']:,}",
            "acceptance length": f"{own['acceptance_length']:.2f}",
        }
        for own in report["by_context"]
    ]


def _divergence_rows(report: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {
            **{key.replace("_", " "): str(own[key]) for key in ("prompt_set", "prompt", "turn")},
            "token": str(own["position"]),
            "top-2 margin": f"{own['margin']:.2e}",
            "tie": "yes" if own["tie"] else "NO",
        }
        for own in report["divergences"]
    ]


def _evaluation_lines(evaluation: dict[str, Any] | None) -> list[str]:
    """Simulated beside real acceptance of every snapshot, how they go together, and what it cost."""
    if evaluation is None:
        return []
    if not evaluation["evaluations"]:
        return ["- none was due: during_training.eval_every is above the steps that were trained"]
    together = evaluation["correlation"]
    return [
        *table([_evaluation_row(one) for one in evaluation["evaluations"]]),
        "",
        f"- correlation of simulated and real: {'not known (fewer than 3 values, or one is constant)' if together is None else f'{together:.2f}'}",
        f"- best checkpoint by real acceptance: step {evaluation['best_step']}",
        f"- cost: the full replica was borrowed for {evaluation['seconds']:.1f} s, {evaluation['share']:.1%} of the last process's training; "
        f"left out while one was in work {evaluation['left_out']}, given up {evaluation['given_up']}",
        *(f"- warning: {words}" for words in evaluation["warnings"]),
    ]


def _evaluation_row(one: dict[str, Any]) -> dict[str, str]:
    real, simulated = one["acceptance_length"], one["simulated_acceptance_length"]
    return {
        "step": f"{one['step']:,}",
        "acceptance length, real": f"{real:.2f}" if real else "no round",
        f"simulated ({one['simulated_on']})": f"{simulated:.2f}" if simulated else "no block",
        "gap": f"{simulated / real - 1:+.0%}" if real and simulated else "",
        "rounds": f"{one['rounds']:,}",
        "seconds": f"{one['seconds']:.1f}",
    }


def _training_lines(report: dict[str, Any]) -> list[str]:
    training = report["training"]
    return [
        f"- {training['step']} of {training['total_steps']} steps, {training['tokens']:,} real tokens, {report['tokens_per_second']:,.0f} tokens/s",
        f"- start-up: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in report['startup_s'].items())}",
        f"- bottleneck: {report['bottleneck']}",
        f"- micro-batches of the last process: {_micro_batches(report['ledger']['micro_batches'])}",
        *(f"- departure from exact resume: {change}" for change in training["departures"]),
        "",
        "| stage | workers | items | busy s | starved s | blocked s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {stage['workers']} | {stage['items']} | {stage['busy']:.1f} | {stage['starved']:.1f} | {stage['blocked']:.1f} |"
            for name, stage in report["stages"].items()
        ),
    ]


def _micro_batches(ledger: dict[str, Any]) -> str:
    skipped = _counts(ledger["skipped"], none="skipped 0")
    returned = f"{ledger['returned']:,} read ahead and not trained" if ledger["returned"] else "none left over"
    return f"{ledger['issued']:,} issued, {ledger['applied']:,} trained, {skipped}, {returned}"


def _counts(counts: dict[str, int], *, none: str) -> str:
    return ", ".join(f"{count:,} x {what}" for what, count in counts.items()) or none


def _data_lines(report: dict[str, Any]) -> list[str]:
    data, ledger = report["data"], report["ledger"]["conversations"]
    shards = f"{data['shards']} shard{'s' if data['shards'] != 1 else ''}"
    return [
        f"- {data['rows']:,} rows, {data['tokens']:,} tokens, {data['supervised']:,} supervised, {shards}",
        f"- conversations in {ledger['rows_in']:,}, kept {ledger['kept']:,}, cut {ledger['cut']:,}, dropped: "
        f"{_counts(ledger['dropped'], none='none')}",
    ]
