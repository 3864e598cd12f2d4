"""Every metric that MLflow shows, with its unit: the names are here and nowhere else.

line of metrics.jsonl --step_points--> (name, value)          finished report --report_points--> (name, value)
line of evaluations.jsonl --evaluation_points--> (name, value)
"""

import math
from collections.abc import Iterator
from typing import Any

STEP = {  # of an optimizer step, as `train/<name>`
    "loss": "nats a predicted token, weighted by its place in the block",
    "accuracy": "share of the predicted tokens that are right, given all before them in the block",
    "simulated_acceptance_length": "tokens a block: right predictions from the first on, + 1; teacher-forced, so no measurement",
    "tokens_per_second": "real tokens (no padding) a second of the step",
    "learning_rate": "of this step",
    "gradient_norm": "before clipping",
    "epoch": "number of the pass over the data, from 0",
    "tokens": "real tokens of the step",
    "computed_tokens": "tokens of the step with padding",
    "blocks": "anchored blocks of the step",
    "seconds": "from the end of the step before to the end of this one",
}
SKIPPED = (
    "train/skipped_micro_batches"  # micro-batches since the step before that were left out: not finite, or without an anchor
)
ACCURACY_BY_SLOT = "train/accuracy_by_slot/{slot:02d}"  # share of right predictions in a block's slot
PIPELINE = {  # how the pipeline stood at a step, as `pipeline/<name>`: dflash_core/training/observation.py
    "{stage}_busy, {stage}_starved, {stage}_blocked": "share of the stage's time since the step before: at work, waiting for input, for room",
    "waiting_for_{stage}": "micro-batches",
    "credit_bytes": "bytes of hidden states between reading and the end of the step",
    "..._per_second": "of what was made since the step before",
    "mfu": "share of the devices' peak arithmetic",
    "eta_s": "seconds to the last step, at the mean speed so far",
}
EVALUATION = {  # of a snapshot, measured while training went on, as `evaluation/<name>` at the snapshot's step
    "acceptance_length": "tokens committed a verify round: accepted draft tokens + 1, by real decoding of a few prompts",
    "simulated_acceptance_length": "teacher-forced, as training counts, on the validation split (or on the texts decoded)",
    "gap": "simulated / real acceptance length - 1",
    "rounds": "verify rounds of the real value",
    "seconds": "for which the full target replica was borrowed",
}
EVALUATION_KNOWN = "evaluation/acceptance_length"  # every evaluation has it
REPORT = {  # of the exported drafter, by real decoding
    "acceptance_length": "tokens committed a verify round: accepted draft tokens + 1",
    "acceptance_length_simulated": "the same of a block behind every token of the target's texts: what training counts",
    "acceptance_length_ngram": "the same for a drafter that looks up n-grams",
    "acceptance_length_zero_features": "the same for this drafter with the target's features zeroed",
    "lossless_exact": "requests whose greedy text equals the target's own",
    "lossless_checked": "requests that were compared",
    "speedup": "times, target alone / with drafts, same prompts",
    "target_tokens_per_second": "of the target alone",
    "drafted_tokens_per_second": "of the target with this drafter",
    "tokens_per_second": "of the training as a whole",
}
REPORT_BOUND = "acceptance_length_{bound}"  # low, high: of its 95 % bootstrap interval over prompts
REPORT_OF_SET = "{name}/{prompt_set}"  # acceptance_length, speedup: of one prompt set
SYSTEM = {  # of the machine, every ten seconds; the names that MLflow's own page of system metrics knows
    "system/cpu_utilization_percentage": "percent of all cores",
    "system/system_memory_usage_megabytes": "10^6 bytes",
    "system/system_memory_usage_percentage": "percent",
    "system/process_memory_usage_megabytes": "10^6 bytes, of the flow's process",
    "system/gpu_{gpu}_utilization_percentage": "percent",
    "system/gpu_{gpu}_memory_usage_megabytes": "10^6 bytes",
    "system/gpu_{gpu}_power_usage_watts": "watts",
}


def step_points(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of one line of metrics.jsonl."""
    yield "step", row["step"]
    for name in STEP:
        yield f"train/{name}", math.nan if row[name] is None else float(row[name])  # null: it was not finite
    for name, value in row.get("observed", {}).items():
        yield f"pipeline/{name}", value
    yield SKIPPED, float(sum(row["skipped"].values()))
    for slot, (correct, counted) in enumerate(zip(row["correct"], row["counted"], strict=True)):
        if counted:
            yield ACCURACY_BY_SLOT.format(slot=slot), correct / counted


def evaluation_points(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of one line of evaluations.jsonl; the gap is NaN where one of its two values is not there."""
    real, simulated = row["acceptance_length"], row["simulated_acceptance_length"]
    values = {**row, "gap": simulated / real - 1 if real and simulated else math.nan}
    for name in EVALUATION:
        yield f"evaluation/{name}", float(values[name])


def report_points(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, value) of a finished report, whose numbers are finite."""
    for name in REPORT:
        yield name, float(report[name])
    for bound in ("low", "high") if report["acceptance_interval"] else ():
        yield REPORT_BOUND.format(bound=bound), report["acceptance_interval"][bound]
    for prompt_set, own in report["sets"].items():
        for name in ("acceptance_length", "speedup"):
            yield REPORT_OF_SET.format(name=name, prompt_set=prompt_set), own[name]
