"""The drafter against a slow second writing of its equations, and its tensors against the published format."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_core.modeling.attention import Backend, BlockView
from dflash_core.modeling.drafter import Drafter, new_drafter, tensor_shapes
from dflash_core.records import DrafterShape
from tests.fakes import make_drafter, make_shape


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one vector, pairs (i, i + d/2)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def sees(shape: DrafterShape, layer: int, *, slot: int, key: int, anchor: int) -> bool:
    """Whether a slot sees key number `key`: the positions before the anchor, then the block's slots."""
    if layer not in shape.sliding_layers:
        return True
    assert shape.sliding_window is not None
    distance = anchor + slot - key  # keys stand at their own position
    return distance < shape.sliding_window if key < anchor else distance >= 0 or not shape.sliding_causal


def slow_block(drafter: Drafter, taps: Tensor, embeddings: Tensor, anchor: int) -> Tensor:
    """Final-normed states [S, H] of one block: context taps [T, K*H] cut before the anchor, one vector at a time."""
    shape, w = drafter.shape, {name: p.detach() for name, p in drafter.named_parameters()}
    eps, heads, kv_heads, dim = shape.rms_norm_eps, shape.num_heads, shape.num_kv_heads, shape.head_dim
    context = [norm(w["fc.weight"] @ taps[p], w["hidden_norm.weight"], eps) for p in range(anchor)]
    y = list(embeddings)
    positions = [*range(anchor), *(anchor + k for k in range(len(y)))]
    for layer in range(shape.num_layers):

        def weight(name: str, layer: int = layer) -> Tensor:
            return w[f"layers.{layer}.{name}.weight"]

        u = [norm(x, weight("input_layernorm"), eps) for x in y]
        keys, values = [], []
        for position, x in zip(positions, context + u, strict=True):
            key = (weight("self_attn.k_proj") @ x).view(kv_heads, dim)
            keys.append(
                [turn(norm(key[h], weight("self_attn.k_norm"), eps), position, shape.rope_theta) for h in range(kv_heads)]
            )
            values.append((weight("self_attn.v_proj") @ x).view(kv_heads, dim))
        for k, x in enumerate(u):
            query = (weight("self_attn.q_proj") @ x).view(heads, dim)
            seen = [i for i in range(len(keys)) if sees(shape, layer, slot=k, key=i, anchor=anchor)]
            parts = []
            for h in range(heads):
                q = turn(norm(query[h], weight("self_attn.q_norm"), eps), anchor + k, shape.rope_theta)
                group = h * kv_heads // heads
                scores = torch.stack([q @ keys[i][group] / math.sqrt(dim) for i in seen])
                shares = torch.exp(scores - scores.max())
                shares = shares / shares.sum()
                parts.append(sum(share * values[i][group] for share, i in zip(shares, seen, strict=True)))
            y[k] = y[k] + weight("self_attn.o_proj") @ torch.cat(parts)  # type: ignore[arg-type]
        for k, x in enumerate(y):
            x = norm(x, weight("post_attention_layernorm"), eps)
            gate, up = weight("mlp.gate_proj") @ x, weight("mlp.up_proj") @ x
            y[k] = y[k] + weight("mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * up)
    return torch.stack([norm(x, w["norm.weight"], eps) for x in y])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 4, "num_layers": 1},
        {"num_kv_heads": 4, "rope_theta": 1e6},
        {"num_layers": 3, "sliding_layers": (0, 1), "sliding_window": 5},
        {"sliding_layers": (1,), "sliding_window": 4, "sliding_causal": False},
    ],
)
@pytest.mark.parametrize("backend", ["dense", "grouped", "flex"])
def test_denoise_equals_the_slow_version(changes: dict[str, Any], backend: Backend) -> None:
    drafter = make_drafter(**changes)
    shape = drafter.shape
    generator = torch.Generator().manual_seed(3)
    anchors, length, size = [0, 3, 4, 8], 9, shape.block_size
    taps = torch.randn(1, length, len(shape.target_layer_ids) * shape.hidden_size, generator=generator)
    embeddings = torch.randn(len(anchors), size, shape.hidden_size, generator=generator)
    positions = torch.tensor([anchor + k for anchor in anchors for k in range(size)]).unsqueeze(0)
    valid = torch.ones(1, len(anchors), dtype=torch.bool)
    view = BlockView(
        anchor_positions=torch.tensor([anchors]), block_valid=valid, context_length=length, block_size=size, backend=backend
    )
    with torch.no_grad():
        context = drafter.context(taps)
        fast = drafter.denoise(embeddings.view(1, -1, shape.hidden_size), positions, context, view)
    for j, anchor in enumerate(anchors):
        slow = slow_block(drafter, taps[0], embeddings[j], anchor)
        torch.testing.assert_close(fast[0, j * size : (j + 1) * size], slow, atol=2e-5, rtol=1e-4)


def test_forward_reads_the_context_as_it_grows() -> None:
    """Passes with the tokens committed since the last one see what one pass over all of them sees."""
    drafter = make_drafter()
    shape, size = drafter.shape, drafter.shape.block_size
    generator = torch.Generator().manual_seed(4)
    taps = torch.randn(1, 9, len(shape.target_layer_ids) * shape.hidden_size, generator=generator)
    cache = DynamicCache(config=drafter.config)
    for start, end in [(0, 5), (5, 6), (6, 9)]:
        block = torch.randn(1, size, shape.hidden_size, generator=generator)
        cache.crop(-size if start else 0)
        with torch.no_grad():
            found = drafter(block, taps[:, start:end], torch.arange(start, end + size).unsqueeze(0), None, cache)
        slow = slow_block(drafter, taps[0], block[0], end)
        torch.testing.assert_close(found.last_hidden_state[0], slow, atol=2e-5, rtol=1e-4)


def test_new_drafter_depends_on_its_seed_alone() -> None:
    first = new_drafter(make_shape(), 5).state_dict()
    torch.manual_seed(99)
    again, other = new_drafter(make_shape(), 5).state_dict(), new_drafter(make_shape(), 6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    assert all((value == 1).all() for name, value in first.items() if "norm" in name)
    assert first["layers.0.mlp.up_proj.weight"].std() == pytest.approx(32**-0.5, rel=0.1)
    assert first["layers.0.mlp.down_proj.weight"].std() == pytest.approx(48**-0.5, rel=0.1)


def test_names_and_shapes_are_the_eleven_a_layer_and_three() -> None:
    hidden, inner, queries, keys, dim = 32, 48, 6 * 4, 2 * 4, 4
    expected = {"fc.weight": (hidden, 3 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in (0, 1):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (queries, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (keys, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{i}.self_attn.q_norm.weight": (dim,),
            f"layers.{i}.self_attn.k_norm.weight": (dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    shape = make_shape(num_heads=6, head_dim=4)
    assert len(expected) == 11 * 2 + 3
    assert {name: tuple(value.shape) for name, value in Drafter(shape).state_dict().items()} == expected
    assert tensor_shapes(shape) == expected


@pytest.mark.parametrize(("hidden", "inner", "billions"), [(4096, 12288, 1.0486), (2560, 9728, 0.5374)])
def test_published_parameter_counts(hidden: int, inner: int, billions: float) -> None:
    shape = make_shape(
        num_layers=5,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        target_layer_ids=(1, 9, 17, 25, 33),
    )
    shapes = tensor_shapes(shape)
    assert len(shapes) == 58
    assert sum(math.prod(size) for size in shapes.values()) / 1e9 == pytest.approx(billions, abs=5e-5)
