"""RMS norm and rotary embedding with their gradients written out: a third of the passes over memory that autograd makes of them.

x --rms_norm--> x / rms(x) * w       backward: from x and 1 / rms(x), nothing else is kept
x --rotate----> (x1 cos - x2 sin, x2 cos + x1 sin)       backward: turns back, from the angles alone
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / rms(x) * weight [D], the mean of squares in fp32, as Qwen3 rounds it."""
    return _RMSNorm.apply(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, T, head_dim] by cos, sin [B, T, head_dim], NeoX halves."""
    half = x.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return _Rotate.apply(x, *(angle.unsqueeze(1).to(x.dtype) for angle in (cos, signed)))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, normal = grads[0].float(), x.float() * scale
        product = grad * normal
        mean = (product @ weight.float()).div_(x.shape[-1]).unsqueeze(-1)
        towards = (grad * weight).addcmul_(normal, mean, value=-1).mul_(scale)
        return towards.to(x.dtype), product.flatten(0, -2).sum(0).to(weight.dtype), None


class _Rotate(torch.autograd.Function):
    """x cos + swapped(x) sin, where swapping exchanges the halves and is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        x = x.contiguous()  # in this layout a head's angles are one run of memory
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad = grads[0].contiguous()
        return (grad * cos).add_((grad * sin).roll(grad.shape[-1] // 2, -1)), None, None
