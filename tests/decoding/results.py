"""Measured requests written by hand."""

from typing import Any

from dflash_core.records import Generation, Measured


def generation(
    accepted: tuple[int, ...] = (),
    drafted: tuple[int, ...] = (),
    *,
    tokens: tuple[int, ...] = (1, 2),
    seconds: float = 1.0,
    **more: Any,
) -> Generation:
    return Generation(tokens=tokens, accepted=accepted, drafted=drafted, seconds=seconds, **more)


def measured(
    own: tuple[int, ...] = (1, 2), text: tuple[int, ...] = (1, 2), margins: list[float] | None = None, **changes: Any
) -> Measured:
    """The target's `own` text and the one decoded with drafts; `changes` are fields of the record."""
    parts = {
        "prompt_set": "prompts",
        "prompt": 0,
        "turn": 0,
        "context": 10,
        "target": generation(tokens=own, seconds=2.0, margins=tuple(margins or [1.0] * len(own))),
        "drafted": generation((2, 0), (3, 3), tokens=text, seconds=1.0),
        "ngram": generation((1, 0), (3, 3)),
        "zero_features": generation((0, 0), (3, 3)),
        "simulated": generation((2, 1), (3, 3)),
    }
    return Measured(**{**parts, **changes})
