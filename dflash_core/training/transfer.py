"""Hidden states on their way from a target's device to the drafter's, each replica on a CUDA stream of its own.

    tap on the replica's stream -> copy on the same stream -> wait for that stream alone -> TappedBatch on the drafter's device

A target over several devices has a stream on each. Target and drafter may share a device: their kernels are on different streams,
and the allocator is told who still reads.
"""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from dflash_core.devices import parts
from dflash_core.records import TappedBatch


class Carrier:
    """Runs a replica's taps and brings them to `destination`. On the CPU there is nothing to bring."""

    def __init__(self, source: str, destination: str) -> None:
        sources = [torch.device(part) for part in parts(source)]
        self.source, self.destination = sources[0], torch.device(destination)
        self._streams = [torch.cuda.Stream(each) for each in sources if each.type == "cuda"]

    def __call__(self, tap: Callable[[], TappedBatch]) -> TappedBatch:
        """`tap()` with its states on the destination, finished: whoever gets it need not wait for another stream."""
        if not self._streams:
            return tap()
        with ExitStack() as current:
            for stream in reversed(self._streams):  # last the first device's, where the tap begins and ends
                current.enter_context(torch.cuda.stream(stream))
            tapped = tap()
            states = {name: value for name, value in vars(tapped).items() if isinstance(value, torch.Tensor)}
            moved: dict[str, Any] = {name: value.to(self.destination, non_blocking=True) for name, value in states.items()}
        for stream in self._streams:
            stream.synchronize()
        if self.source == self.destination:
            for value in moved.values():
                value.record_stream(torch.cuda.default_stream(self.destination))
        return dataclasses.replace(tapped, **moved)
