"""AdamW or Muon on fp32 masters, a learning rate that is a pure function of the step, and the mean of the weights.

Nothing here keeps hidden state: moments are named like their parameters, so that checkpoints are plain tensors. `parameters` are
those that this rank updates, by name.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_core.config import TrainingConfig
from dflash_core.sizes import MOMENTS
from dflash_core.training.muon import Muon

KINDS = tuple(kind for kinds in MOMENTS.values() for kind in kinds)


def learning_rate(step: int, *, total: int, training: TrainingConfig) -> float:
    """Rate of step `step` (0-based) of `total`: linear warm-up over a share of the steps, then the schedule, to zero at the end.

    cosine falls all the way; wsd (warm-up, stable, decay) stays and falls linearly over the last share `decay`.
    """
    warm = math.ceil(training.warmup * total)
    if step < warm:
        return training.learning_rate * (step + 1) / warm
    if training.schedule == "wsd":
        return training.learning_rate * min(1.0, max(0, total - step) / max(1, math.ceil(training.decay * total)))
    progress = (step - warm) / max(1, total - warm)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def optimizer_of(parameter: Tensor, training: TrainingConfig) -> str:
    """muon for a matrix where it is asked for, else adamw."""
    return "muon" if training.optimizer == "muon" and parameter.dim() == 2 else "adamw"


def make_optimizers(parameters: Mapping[str, Tensor], training: TrainingConfig) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW over all parameters, in one kernel for all of them; or Muon for the matrices and AdamW for the rest."""
    kinds: dict[str, list[Tensor]] = {"adamw": [], "muon": []}
    for parameter in parameters.values():
        kinds[optimizer_of(parameter, training)].append(parameter)
    rate, decay, found = training.learning_rate, training.weight_decay, list[torch.optim.Optimizer]()
    if kinds["adamw"]:
        found.append(torch.optim.AdamW(kinds["adamw"], lr=rate, betas=training.betas, weight_decay=decay, fused=True))
    if kinds["muon"]:
        found.append(Muon(kinds["muon"], lr=rate, weight_decay=decay))
    return tuple(found)


def update(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """One step at a learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


class Average:
    """A running mean of the weights (EMA), which is what gets exported where there is one; fp32, beside the weights.

    The first steps weigh less, so that the mean does not remember the start: its decay is at most (1 + n) / (10 + n) at update n.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.mean = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def add(self, updates: int) -> None:
        """The weights after `updates` updates join the mean."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        for name, parameter in self._parameters.items():
            self.mean[name].lerp_(parameter, 1 - decay)


def moment_names(name: str, parameter: Tensor, training: TrainingConfig) -> list[str]:
    """The optimizer's tensors for a parameter, "<parameter>.exp_avg" and the like."""
    return [f"{name}.{kind}" for kind in MOMENTS[optimizer_of(parameter, training)]]


def read_moments(parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' tensors by `moment_names`; empty before the first step."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            found |= {f"{name}.{kind}": state[kind] for kind in KINDS if kind in state}
    return found


def write_moments(
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    moments: Mapping[str, Tensor],
    updates: int,
) -> None:
    """The reverse of `read_moments`, of which others' are left alone; `updates`: the applied ones (for AdamW's bias correction)."""
    for optimizer in optimizers:
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in parameters.items():
            kept = {kind: moments[f"{name}.{kind}"] for kind in KINDS if f"{name}.{kind}" in moments}
            if parameter in own and kept:
                kept = {kind: tensor.to(parameter.device, torch.float32).clone() for kind, tensor in kept.items()}
                optimizer.state[parameter] = {"step": torch.tensor(float(updates), device=parameter.device), **kept}
