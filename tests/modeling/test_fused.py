"""Norm and rotation beside the same written plainly in float64, values and gradients."""

import pytest
import torch
from torch import Tensor

from dflash_core.modeling.fused import rms_norm, rotate


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (7, 33)])
def test_norm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(size, generator=generator) * 3 for size in (shape, shape[-1:], shape))
    found = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = [tensor.double().requires_grad_() for tensor in (x, weight)]
    values = rms_norm(*found, 1e-6), plain_norm(*wanted)
    torch.testing.assert_close(values[0].double(), values[1], atol=1e-5, rtol=1e-5)
    for value in values:
        value.backward(grad.to(value.dtype))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, atol=1e-5, rtol=1e-5)


def test_the_norm_of_zeros_is_zero_and_has_a_finite_gradient() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    rms_norm(x, torch.ones(4), 1e-6).sum().backward()
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


def test_norm_rounds_as_the_reference_does() -> None:
    """In bfloat16 the normal values are rounded before the weight: the product is another rounding."""
    x, weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.full((32,), 1.7).bfloat16()
    wide = x.float()
    wanted = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_rotation(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(2, 5, 4, generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    x, grad = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(2))
    if transposed:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    found, wanted = x.clone().requires_grad_(), x.double().requires_grad_()
    values = (
        rotate(found, *(torch.cat([a, a], -1) for a in (cos, sin))),
        plain_rotation(wanted, *(a.double().unsqueeze(1) for a in (cos, sin))),
    )
    torch.testing.assert_close(values[0].double(), values[1], atol=1e-5, rtol=1e-5)
    for value in values:
        value.backward(grad.to(value.dtype))
    torch.testing.assert_close(found.grad.double(), wanted.grad, atol=1e-5, rtol=1e-5)
