"""Which token follows: the best one, or a draw from the target's distribution.

    logits --temperature, top-k, top-p--> probabilities --one number in [0, 1) a place of the text--> token

The number belongs to the place, not to the pass: decoding alone and decoding with drafts look up the same one, so sampled texts
are equal too, and each is an exact draw from the target's distribution whatever was drafted.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

COLDEST = 1e-5  # temperatures below are greedy


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the default is greedy."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    def pick(self, logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [...] int64, margins [...]) of logits [..., V] fp32 and numbers [...] fp64 in [0, 1).

        The margin says how far another token was: between the two best logits, or from `numbers` to the nearest other share.
        """
        if self.greedy:
            best = logits.topk(2, dim=-1).values
            return logits.argmax(-1), best[..., 0] - best[..., 1]
        ends = self.probabilities(logits).cumsum(-1)
        numbers = (numbers * ends[..., -1]).unsqueeze(-1)
        tokens = torch.searchsorted(ends, numbers, right=True).clamp(max=logits.shape[-1] - 1)
        upper = ends.gather(-1, tokens) - numbers
        lower = numbers - torch.where(tokens > 0, ends.gather(-1, (tokens - 1).clamp(min=0)), 0.0)
        return tokens.squeeze(-1), torch.minimum(upper, lower).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] fp64 after temperature, then top-k, then the smallest set that holds top_p of what is left."""
        logits = logits.double() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        shares = logits.softmax(-1)
        if self.top_p < 1:
            falling, order = shares.sort(stable=True, dim=-1, descending=True)
            dropped = falling.cumsum(-1) - falling >= self.top_p
            shares = shares.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
            shares = shares / shares.sum(-1, keepdim=True)
        return shares


def place_numbers(seed: int, request: tuple[int, ...], count: int) -> np.ndarray:
    """The numbers [count] of the places of one request's text; the same for the same seed and request."""
    return np.random.default_rng([seed, *request]).random(count)
