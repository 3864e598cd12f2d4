"""Ranks that train one drafter together: what they add up, and when they stop.

Every rank holds the drafter's weights and has its own targets. Nothing is exchanged before a step: gradients are sums until then, so
one reduction of sums and weights makes the step that a single rank would make of the same micro-batches. Since all ranks reduce
the same numbers, they skip, clip and stop together.

What the optimizer keeps is shared out (as ZeRO's first stage, arXiv 1910.02054): a rank has the moments of whole parameters that are
its own, updates those, and hands them round. Whole ones, since Muon needs matrices; so the step is the same, bit by bit.

    gradients --add--> sums on all ranks --own parameters' update--> weights --spread--> all ranks       moments --collect--> rank 0
"""

from collections.abc import Callable, Iterable, Mapping
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

    def owners(self, parameters: Mapping[str, Tensor]) -> dict[str, int]:
        """The rank that updates each parameter: the largest first, to whoever has least."""
        room = [0] * self.size
        found: dict[str, int] = {}
        for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
            found[name] = room.index(min(room))
            room[found[name]] += parameters[name].numel()
        return found

    def spread(self, tensor: Tensor, owner: int) -> None:
        """Replaces a tensor by that of rank `owner`."""
        if self.size > 1:
            torch.distributed.broadcast(tensor, owner)

    def collect(self, own: Mapping[str, Tensor], like: Mapping[str, tuple[Tensor, int]]) -> dict[str, Tensor]:
        """On rank 0 a copy of every tensor of `like`, {name: (one of its shape, its owner)}; each owner has its `own`. Else {}."""
        found: dict[str, Tensor] = {}
        for name, (shape, owner) in like.items():
            value = own[name].detach().clone() if owner == self.rank else torch.empty_like(shape)
            self.spread(value, owner)
            if self.rank == 0:
                found[name] = value
        return found
