"""metrics.jsonl: one line a step, the sums as they are and the means that people read."""

import json
import math
from pathlib import Path
from typing import Any

from dflash_core.files import written_beside
from dflash_core.records import StepMetrics


def step_row(metrics: StepMetrics) -> dict[str, Any]:
    """One line of metrics.jsonl: the sums as they are, and the means that people read."""
    means = {
        "loss": metrics.loss_sum / metrics.weight_sum if metrics.weight_sum else None,
        "accuracy": sum(metrics.correct) / max(1, sum(metrics.counted)),
        "simulated_acceptance_length": 1 + metrics.accepted_sum / max(1, metrics.drafting),
        "tokens_per_second": metrics.tokens / metrics.seconds if metrics.seconds else None,
    }
    row = {**vars(metrics), **means}  # asdict would copy every value deeply, which costs more than all the rest
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class MetricsFile:
    """`metrics.jsonl`: one line a step, flushed line by line; lines of an earlier try beyond `resume_step` are cut off.

    `lost_steps`, `lost_tokens`: what was cut, which is trained again.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        self.lost_steps = self.lost_tokens = 0
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # the half line of a killed writer, written again by the resumed steps
                if row["step"] <= resume_step:
                    kept.append(line + "\n")
                else:
                    self.lost_steps += 1
                    self.lost_tokens += row["tokens"]
        with written_beside(path) as place:
            place.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, metrics: StepMetrics) -> None:
        """Appends one step."""
        self._file.write(json.dumps(step_row(metrics)) + "\n")

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
