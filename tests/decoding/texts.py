"""Prompts, the target's own texts, and a proposer that knows them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.speculate import Proposer, decode
from dflash_core.records import Generation
from tests.fakes import VOCAB

NEVER: frozenset[int] = frozenset()
LAYERS = (0, 1, 2)


def prompt_of(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, VOCAB) for _ in range(length)]


def one(
    target: DecodingTarget,
    proposer: Proposer | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int = 40,
    stop_ids: frozenset[int] = NEVER,
    **how: Any,
) -> Generation:
    """A batch of one request."""
    return decode(target, [prompt], limits=[max_new_tokens], stop_ids=stop_ids, proposer=proposer, **how)[0]


def alone(target: DecodingTarget, prompt: Sequence[int], count: int = 40, stop_ids: frozenset[int] = NEVER) -> tuple[int, ...]:
    return one(target, None, prompt, max_new_tokens=count, stop_ids=stop_ids).tokens


class EachRow:
    """Proposes by a function of one committed text."""

    def __init__(self, propose: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self._propose = propose

    def start(self, rows: int) -> None: ...

    def extend(self, target_hidden: Tensor, counts: Sequence[int]) -> None: ...

    def propose(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(self._propose(text)) for text in texts]

    def select(self, rows: Sequence[int]) -> None: ...


class Oracle:
    """Drafts the continuation of one of the given texts, each draft token wrong with probability `wrong`."""

    def __init__(self, texts: Sequence[Sequence[int]], drafts: int, *, wrong: float = 0.0, seed: int = 0) -> None:
        self.texts, self.drafts, self.wrong = [list(text) for text in texts], drafts, wrong
        self.seed = seed

    def start(self, rows: int) -> None:
        self.rng = random.Random(self.seed)
        self.hidden: list[list[Tensor]] = [[] for _ in range(rows)]  # [n, K*H] of the committed tokens of each request

    def extend(self, target_hidden: Tensor, counts: Sequence[int]) -> None:
        for own, states, count in zip(self.hidden, target_hidden, counts, strict=True):
            own.append(states[:count])

    def propose(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        return [self._draft(text, own) for text, own in zip(texts, self.hidden, strict=True)]

    def _draft(self, committed: Sequence[int], hidden: list[Tensor]) -> list[int]:
        whole = next(text for text in self.texts if text[: len(committed)] == list(committed))
        assert sum(map(len, hidden)) == len(committed) - 1, "all hidden states before the anchor, no other"
        place = len(committed)
        right = (whole[place : place + self.drafts] + [4] * self.drafts)[: self.drafts]
        return [4 + (token - 3) % (VOCAB - 4) if self.rng.random() < self.wrong else token for token in right]

    def select(self, rows: Sequence[int]) -> None:
        self.hidden = [self.hidden[row] for row in rows]
