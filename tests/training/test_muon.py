"""Muon beside torch's own, which iterates in bfloat16, and the property that names it."""

import pytest
import torch
from torch import nn

from dflash_core.training.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 12, 12)])
def test_singular_values_end_near_one_and_vectors_stay(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 7
    found = orthogonal(matrices)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    core = u.mT @ found @ v.mT  # diagonal where the singular vectors are the same
    assert float((core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))).abs().max()) < 1e-4


def test_a_matrix_of_zeros_is_not_moved() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_updates_are_those_of_torch() -> None:
    modules = [
        nn.ModuleList([nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False), nn.Linear(16, 24, bias=False)]) for _ in "ab"
    ]
    modules[1].load_state_dict(modules[0].state_dict())
    start = [parameter.detach().clone() for parameter in modules[0].parameters()]
    ours = Muon(modules[0].parameters(), lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(modules[1].parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    for before, a, b in zip(start, modules[0].parameters(), modules[1].parameters(), strict=True):
        assert float((a - b).norm() / (b - before).norm()) < 0.02  # bfloat16
