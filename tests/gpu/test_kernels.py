"""The drafter's kernels on a GPU beside those of the CPU, and the target's flash-attn beside its SDPA: `make test-gpu`."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_core.modeling.attention import Backend, BlockView, attend
from dflash_core.modeling.target import TapReplica
from tests.fakes import make_batch, save_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTH, SIZE, HEADS, KV_HEADS, DIM = 1000, 16, 8, 2, 64  # a length that no tile divides


def attention(backend: Backend, leaves: list[Tensor], anchors: Tensor, **sliding: Any) -> list[Tensor]:
    """Output and gradients of one attention over `leaves`: queries, context and own keys and values."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    view = BlockView(
        anchor_positions=anchors,
        block_valid=anchors > 0,
        context_length=LENGTH,
        block_size=SIZE,
        backend=backend,
        **sliding,
    )
    out = attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), view)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sliding", [{}, {"window": 64, "causal": True}, {"window": 64, "causal": False}])
@pytest.mark.parametrize("blocks", [3, 37])
def test_flex_attention_forward_and_backward(dtype: torch.dtype, tolerance: float, blocks: int, sliding: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(blocks)
    anchors = torch.stack([(torch.randperm(LENGTH - 1, generator=generator)[:blocks] + 1).sort().values for _ in range(2)])
    anchors[1, -2:] = 0  # padding blocks
    sizes = [(HEADS, blocks * SIZE), *[(KV_HEADS, LENGTH)] * 2, *[(KV_HEADS, blocks * SIZE)] * 2]
    leaves = [torch.randn(2, *size, DIM, generator=generator) for size in sizes]
    wanted = attention("dense", leaves, anchors, **sliding)  # fp32 on the CPU
    for backend in ("dense", "flex"):
        found = attention(backend, [leaf.to("cuda:0", dtype) for leaf in leaves], anchors.cuda(), **sliding)
        for a, b in zip(found, wanted, strict=True):
            assert float((a.cpu().float() - b).norm() / b.norm()) < tolerance, backend


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
@pytest.mark.parametrize("packed", [False, True])
def test_a_target_with_flash_attn_taps_what_sdpa_taps(tmp_path: Path, packed: bool) -> None:
    target = str(save_target(tmp_path, head_dim=64))
    batch = make_batch([(list(range(5, 5 + n)), [1] * n) for n in (40, 23, 7)])
    found = {}
    for attention_ in ("sdpa", "flash_attention_2"):
        replica = TapReplica(target, layer_ids=(0, 1), dtype="bfloat16", device="cuda:0", attention=attention_, packed=packed)
        found[attention_] = replica.tap(batch).target_hidden.float()
    for row, length in enumerate(batch.lengths.tolist()):
        a, b = (states[row, :length] for states in found.values())
        assert float((a - b).norm() / a.norm()) < 2e-2
