"""AdamW on fp32 masters and a learning rate that is a pure function of the step.

Nothing here keeps hidden state: moments are named like their parameters, so that checkpoints are plain tensors.
"""

import math

import torch
from torch import Tensor, nn

from dflash_core.config import TrainingConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


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


def make_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over all parameters, in one kernel for all of them; the rate is set before every step."""
    return torch.optim.AdamW(
        module.parameters(), lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay, fused=True
    )


def read_moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"; empty before the first step."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {f"{name}.{kind}": state[kind] for kind in MOMENTS if kind in state}
    return found


def write_moments(module: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, Tensor], step: int) -> None:
    """The reverse of `read_moments`; `step` is the number of applied updates (for the bias correction)."""
    for name, parameter in module.named_parameters():
        if f"{name}.exp_avg" in moments:
            kept = {kind: moments[f"{name}.{kind}"].to(parameter.device, torch.float32).clone() for kind in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **kept}
