"""Hidden states on their way from a target's device to the drafter's, each replica on a CUDA stream of its own.

    tap on the replica's stream -> copy on the same stream -> wait for that stream alone -> TappedBatch on the drafter's device

Target and drafter may share a device: their kernels are on different streams, and the allocator is told who still reads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from dflash_core.records import TappedBatch


class Carrier:
    """Runs a replica's taps and brings them to `destination`. On the CPU there is nothing to bring."""

    def __init__(self, source: str, destination: str) -> None:
        self.source, self.destination = torch.device(source), torch.device(destination)
        self._stream = torch.cuda.Stream(self.source) if self.source.type == "cuda" else None

    def __call__(self, tap: Callable[[], TappedBatch]) -> TappedBatch:
        """`tap()` with its states on the destination, finished: whoever gets it need not wait for another stream."""
        if self._stream is None:
            return tap()
        with torch.cuda.device(self.source), torch.cuda.stream(self._stream):
            tapped = tap()
            states = {name: value for name, value in vars(tapped).items() if isinstance(value, torch.Tensor)}
            moved: dict[str, Any] = {name: value.to(self.destination, non_blocking=True) for name, value in states.items()}
        self._stream.synchronize()
        if self.source == self.destination:
            for value in moved.values():
                value.record_stream(torch.cuda.default_stream(self.destination))
        return dataclasses.replace(tapped, **moved)
