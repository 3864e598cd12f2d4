"""Ranks that train one drafter together: what they add up, and when they stop.

Every rank holds the whole drafter and has its own targets. Nothing is exchanged before a step: gradients are sums until then, so
one reduction of sums and weights makes the step that a single rank would make of the same micro-batches. Since all ranks reduce
the same numbers, they skip, clip and stop together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Gang:
    """This rank among `size`. `asked`: whether this rank was asked to stop; `agree`: called when any was, after the same step."""

    rank: int = 0
    size: int = 1
    asked: Callable[[], bool] = lambda: False
    agree: Callable[[], None] = lambda: None

    def add(self, values: Tensor) -> None:
        """Replaces a tensor by its sum over all ranks."""
        if self.size > 1:
            torch.distributed.all_reduce(values)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """The same for all gradients; a rank that trained nothing adds zeros."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.add(parameter.grad)
