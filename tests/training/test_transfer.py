"""On the CPU a carrier changes nothing; what it does on a device is in tests/gpu."""

import torch

from dflash_core.records import Batch, PlannedBatch, TappedBatch
from dflash_core.training.transfer import Carrier


def test_the_cpu_carries_nothing() -> None:
    nothing = torch.zeros(0)
    plan = PlannedBatch(number=0, epoch=0, rows=(0,), credit=0)
    batch = Batch(plan=plan, input_ids=nothing, loss_mask=nothing, lengths=nothing)
    tapped = TappedBatch(batch=batch, target_hidden=torch.randn(1, 2, 3))
    assert Carrier("cpu", "cpu")(lambda: tapped) is tapped
