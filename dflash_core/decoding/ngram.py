"""An n-gram drafter: the honest reference that any drafter has to beat. It knows the training answers and nothing else."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np


class NgramDraft:
    """Drafts the most frequent continuation of the last order-1 tokens, backing off to shorter contexts."""

    def __init__(self, rows: Iterable[tuple[np.ndarray, np.ndarray]], *, order: int, draft_tokens: int) -> None:
        """`rows` are (input_ids [T], loss_mask [T]); every supervised token counts, with the tokens before it as context."""
        counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for ids, mask in rows:
            text = ids.tolist()
            for place in np.flatnonzero(mask).tolist():
                for length in range(min(order - 1, place) + 1):
                    counts[tuple(text[place - length : place])][text[place]] += 1
        self._next = {context: min(seen, key=lambda token: (-seen[token], token)) for context, seen in counts.items()}
        self._order, self._draft_tokens = order, draft_tokens

    def propose(self, committed: Sequence[int]) -> list[int]:
        """The next draft_tokens tokens, each guessed from the ones before."""
        text = list(committed[-(self._order - 1) :])
        for _ in range(self._draft_tokens):
            text.append(self._guess(text))
        return text[-self._draft_tokens :]

    def _guess(self, text: list[int]) -> int:
        for length in range(min(self._order - 1, len(text)), -1, -1):
            context = tuple(text[len(text) - length :])
            if context in self._next:
                return self._next[context]
        raise ValueError("the n-gram reference was fitted on no supervised token")
