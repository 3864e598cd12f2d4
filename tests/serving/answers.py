"""What a client is asked and what it answers, as JSON between processes. Standard library only: clients run in other environments."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prompts to be continued greedily in float32 by a target with exported drafters, one after the other."""

    target: str
    exports: dict[str, list[list[int]]]  # directory of a drafter: the prompts for it
    max_new_tokens: int
    stop_ids: list[int]
    draft_tokens: int  # a round


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt continued: its text ends with the stop token."""

    tokens: list[int]
    rounds: int  # passes of the target after the one that gave the first token
    accepted_at: list[int]  # [draft_tokens] rounds that accepted draft token 1, 2, ...


Client = Callable[[Job, str, list[list[int]]], list[Answer]]  # (job, export, prompts)


def answer_of(tokens: Sequence[int], accepted: Sequence[int], *, draft_tokens: int) -> Answer:
    """From the draft tokens that each round accepted."""
    accepted_at = [sum(count > place for count in accepted) for place in range(draft_tokens)]
    return Answer(tokens=list(tokens), rounds=len(accepted), accepted_at=accepted_at)


def serve(client: Client) -> None:
    """The main of a client: JOB.json in, one line of JSON out."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    answers = {export: client(job, export, prompts) for export, prompts in job.exports.items()}
    print(json.dumps({export: [asdict(answer) for answer in own] for export, own in answers.items()}))


def read_answers(printed: str) -> dict[str, list[Answer]]:
    """What `serve` printed last: the answers with each export."""
    found: dict[str, list[dict[str, Any]]] = json.loads(printed.splitlines()[-1])
    return {export: [Answer(**row) for row in rows] for export, rows in found.items()}
