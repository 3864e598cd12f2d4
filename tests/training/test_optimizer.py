"""The learning rate against values worked out by hand, and moments under their parameters' names."""

import math
from typing import Literal

import pytest
import torch
from torch import nn

from dflash_core.config import TrainingConfig
from dflash_core.training.optimizer import Average, learning_rate, make_optimizers, read_moments, update, write_moments


def test_learning_rate_by_hand() -> None:
    training = TrainingConfig(learning_rate=1.0, warmup=0.2, schedule="cosine")
    rates = [learning_rate(step, total=10, training=training) for step in range(10)]
    # two warm-up steps, then half a cosine over eight
    cosine = [1.0, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060]
    assert rates == pytest.approx([0.5, 1.0, *cosine], abs=1e-6)


def test_wsd_by_hand() -> None:
    training = TrainingConfig(learning_rate=1.0, warmup=0.2, schedule="wsd", decay=0.4)
    rates = [learning_rate(step, total=10, training=training) for step in range(11)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    sudden = TrainingConfig(learning_rate=1.0, warmup=0.0, schedule="wsd", decay=0.0)
    assert [learning_rate(step, total=3, training=sudden) for step in range(4)] == [1.0, 1.0, 1.0, 0.0]


def test_warm_up_is_rounded_up_and_may_be_absent() -> None:
    training = TrainingConfig(learning_rate=2.0, warmup=0.04)
    assert learning_rate(0, total=30, training=training) == pytest.approx(1.0)  # 1.2 steps, so two
    assert learning_rate(1, total=30, training=training) == pytest.approx(2.0)
    none = TrainingConfig(learning_rate=2.0, warmup=0.0, schedule="cosine")
    assert learning_rate(0, total=30, training=none) == pytest.approx(2.0)
    assert learning_rate(15, total=30, training=none) == pytest.approx(1.0)


def test_all_of_the_run_may_be_warm_up() -> None:
    training = TrainingConfig(learning_rate=1.0, warmup=1.0)
    assert [learning_rate(step, total=4, training=training) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_beyond_the_last_step_the_rate_is_zero(schedule: Literal["cosine", "wsd"]) -> None:
    training = TrainingConfig(learning_rate=1.0, schedule=schedule)
    assert learning_rate(99, total=10, training=training) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_are_named_like_their_parameters_and_go_back(kind: str) -> None:
    training = TrainingConfig(learning_rate=0.1, betas=(0.5, 0.75), optimizer=kind)
    module = nn.Linear(3, 2)
    parameters = dict(module.named_parameters())
    optimizers = make_optimizers(parameters, training)
    assert read_moments(parameters, optimizers) == {}
    module.weight.grad, module.bias.grad = torch.full((2, 3), 2.0), torch.full((2,), -1.0)
    update(optimizers, 0.1)
    moments = {name: value.clone() for name, value in read_moments(parameters, optimizers).items()}
    of_weight = {"adamw": {"weight.exp_avg": 1.0, "weight.exp_avg_sq": 1.0}, "muon": {"weight.momentum_buffer": 0.1}}
    assert {name: float(value.flatten()[0]) for name, value in moments.items()} == pytest.approx(
        of_weight[kind] | {"bias.exp_avg": -0.5, "bias.exp_avg_sq": 0.25}
    )
    other = nn.Linear(3, 2)
    other.load_state_dict(module.state_dict())
    again = make_optimizers(dict(other.named_parameters()), training)
    write_moments(dict(other.named_parameters()), again, moments, updates=1)
    for linear, both in ((module, optimizers), (other, again)):
        linear.weight.grad, linear.bias.grad = torch.arange(6.0).view(2, 3), torch.full((2,), math.pi)
        update(both, 0.2)
    assert torch.equal(module.weight, other.weight)
    assert torch.equal(module.bias, other.bias)


def test_the_mean_of_the_weights_by_hand() -> None:
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.0)
        average = Average(dict(module.named_parameters()), 0.5)
        for updates, value in enumerate((11.0, 12.0), 1):
            module.weight.fill_(value)
            average.add(updates)
    # decays 2/11 and 3/12, both under the 0.5 asked for
    assert float(average.mean["weight"]) == pytest.approx(0.25 * (9 / 11 * 11.0) + 0.75 * 12.0)
    with torch.no_grad():
        module.weight.fill_(0.0)
        average.add(1000)
    assert float(average.mean["weight"]) == pytest.approx(0.5 * 11.25)
