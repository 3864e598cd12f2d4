"""evaluations.jsonl: what snapshots accepted during training, one line each; and what it says about the run, in words.

    Evaluation --EvaluationsFile.add--> a line, and the log: "step 300: acceptance length 2.31 by decoding 8 prompts ..."
    all of them --summary--> training.json: the cost, the best step, the warnings

Lines are never cut off. A resumed training that makes steps again has the same weights there, and measures none of them twice.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_core.files import sync, written_beside
from dflash_core.records import Evaluation

LOG = logging.getLogger(__name__)
GROWING, MOST_GAP = 3, 0.15  # evaluations in a row whose gap grew, and the gap from which that is a warning


class EvaluationsFile:
    """`evaluations.jsonl` of a run, those of earlier processes included, by step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found = read_evaluations(path)
        if path.is_file():  # without the half line of a killed writer
            with written_beside(path) as place:
                place.write_text("".join(map(_line, self.found.values())), encoding="utf-8")

    @property
    def real(self) -> dict[int, float]:
        """Real acceptance length by step."""
        return {step: found.acceptance_length for step, found in self.found.items()}

    def add(self, evaluation: Evaluation) -> None:
        """Appends one, on the disk when this returns, and says it; a gap that grows is a warning."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(evaluation))
        sync(self._path)
        self.found = dict(sorted({**self.found, evaluation.step: evaluation}.items()))
        LOG.info("step %d: acceptance length %.2f by decoding %d prompts, simulated %.2f (%s), in %.1f s", evaluation.step,
                 evaluation.acceptance_length, evaluation.prompts, evaluation.simulated_acceptance_length, evaluation.simulated_on,
                 evaluation.seconds)  # fmt: skip
        if warning := gap_warning([found for step, found in self.found.items() if step <= evaluation.step]):
            LOG.warning(warning)


def read_evaluations(path: Path) -> dict[int, Evaluation]:
    """The evaluations of a file by step; none where there is no file. A line that a killed writer left half is no evaluation."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["step"]] = Evaluation(**row)
    return dict(sorted(found.items()))


def _line(evaluation: Evaluation) -> str:
    return json.dumps(asdict(evaluation)) + "\n"


def gap_warning(found: Sequence[Evaluation]) -> str | None:
    """Words where the gap of the last GROWING evaluations grew each time and now exceeds MOST_GAP; None where it did not.

    The gap is simulated / real acceptance length - 1. Evaluations without a verify round or a block have none.
    """
    gaps = [
        one.simulated_acceptance_length / one.acceptance_length - 1
        for one in found
        if one.acceptance_length and one.simulated_acceptance_length
    ]
    last = gaps[-GROWING:]
    if len(last) < GROWING or last != sorted(set(last)) or last[-1] <= MOST_GAP:
        return None
    return (
        f"step {found[-1].step}: simulated acceptance {found[-1].simulated_acceptance_length:.2f} is {last[-1]:.0%} above the real "
        f"{found[-1].acceptance_length:.2f}, and the gap grew in the last {GROWING} evaluations ({', '.join(f'{gap:.0%}' for gap in last)}; "
        f"limit {MOST_GAP:.0%}): the drafter learns what does not help decoding; look for prompts unlike the training data, answers "
        "that are not the target's own, or data.thinking and data.date other than in serving"
    )


def summary(evaluations: EvaluationsFile, *, left_out: int, given_up: int, seconds: float, wall_s: float) -> dict[str, Any]:
    """For training.json: every evaluation of the run, and what this process's ones cost: `seconds` of `wall_s`."""
    found = list(evaluations.found.values())
    real = {step: value for step, value in evaluations.real.items() if value}
    return {
        "seconds": round(seconds, 3),
        "share": round(seconds / wall_s, 4) if wall_s else 0.0,
        "left_out": left_out,
        "given_up": given_up,
        "best_step": max(real, key=lambda step: (real[step], step), default=None),
        "warnings": [words for end in range(1, len(found) + 1) if (words := gap_warning(found[:end]))],
        "evaluations": [asdict(one) for one in found],
    }
