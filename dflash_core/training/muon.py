"""Muon: the momentum of a matrix, made orthogonal, is its update (Jordan et al., 2024; scaled as in arXiv 2502.16982).

    gradient -> momentum, looked ahead (Nesterov) -> five Newton-Schulz steps: U S V^T to about U V^T -> x 0.2 sqrt(larger side)

That scale gives an update the size of AdamW's, so one learning rate serves matrices here and vectors there. Matrices of one shape
go through together. torch.optim.Muon iterates in bfloat16 everywhere; that is done here on CUDA alone, CPUs being slow at it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from dflash_core.sizes import MUON_STEPS

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic x (a + b x^2 + c x^4): singular values end between 0.7 and 1.2
SIZE = 0.2  # root mean square of AdamW's updates


class Muon(torch.optim.Optimizer):
    """For matrices only; weight decay is decoupled, as AdamW's."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        assert all(parameter.dim() == 2 for group in self.param_groups for parameter in group["params"]), "matrices only"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient; no closure."""
        for group in self.param_groups:
            alike = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                updates = orthogonal(torch.stack([self._ahead(parameter, group["momentum"]) for parameter in parameters]))
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * SIZE * max(shape) ** 0.5)

    def _ahead(self, parameter: Tensor, momentum: float) -> Tensor:
        """The gradient mixed with its updated running mean."""
        assert parameter.grad is not None
        state = self.state[parameter]
        mean = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        mean.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(mean, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns] -> the same singular vectors with all singular values near 1; zeros stay zeros. fp32."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(MUON_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a x + (b gram + c gram gram) x
    return (x.mT if tall else x).float()
