"""The mask, against the golden picture of the algorithm's description and a loop; attention against plain softmax."""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from dflash_core.modeling.attention import Backend, BlockView, attend, block_mask, check_backend, choose_backend
from dflash_core.modeling.grouped import runs_of_blocks


def picture(mask: torch.Tensor, context_length: int) -> list[str]:
    rows = ["".join("1" if seen else "." for seen in row) for row in mask.tolist()]
    return [f"{row[:context_length]} | {row[context_length:]}" for row in rows]


def test_golden_mask() -> None:
    mask = block_mask(torch.tensor([[2, 4]]), torch.ones(1, 2, dtype=torch.bool), context_length=6, block_size=3)
    assert mask.shape == (1, 1, 6, 12)
    assert picture(mask[0, 0], 6) == ["11.... | 111..."] * 3 + ["1111.. | ...111"] * 3


def test_golden_mask_of_a_sliding_layer() -> None:
    where = {"context_length": 6, "block_size": 3, "window": 3}
    anchors, valid = torch.tensor([[2, 4]]), torch.ones(1, 2, dtype=torch.bool)
    assert picture(block_mask(anchors, valid, **where, causal=True)[0, 0], 6) == [
        "11.... | 1.....",
        ".1.... | 11....",
        "...... | 111...",
        "..11.. | ...1..",
        "...1.. | ...11.",
        "...... | ...111",
    ]
    assert picture(block_mask(anchors, valid, **where, causal=False)[0, 0], 6) == [
        "11.... | 111...",
        ".1.... | 111...",
        "...... | 111...",
        "..11.. | ...111",
        "...1.. | ...111",
        "...... | ...111",
    ]


KINDS = [(None, False), (3, True), (7, True), (7, False), (500, True)]  # window, causal


@pytest.mark.parametrize(("window", "causal"), KINDS)
def test_mask_equals_the_rule_on_random_blocks(window: int | None, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        rows, count, length, size = (int(torch.randint(1, high, (), generator=generator)) for high in (4, 6, 12, 5))
        anchors = torch.randint(0, length, (rows, count), generator=generator)
        valid = torch.rand(rows, count, generator=generator) < 0.7
        mask = block_mask(anchors, valid, context_length=length, block_size=size, window=window, causal=causal)[:, 0]
        for b in range(rows):
            for query in range(count * size):
                j, slot = divmod(query, size)
                for p in range(length):
                    near = window is None or p >= anchors[b, j] + slot - (window - 1)
                    assert bool(mask[b, query, p]) == bool(valid[b, j] and p < anchors[b, j] and near)
                for key in range(count * size):
                    assert bool(mask[b, query, length + key]) == (key // size == j and (not causal or key % size <= slot))


def test_a_padding_block_sees_its_own_slots_only() -> None:
    mask = block_mask(torch.tensor([[3, 0]]), torch.tensor([[True, False]]), context_length=4, block_size=2)
    assert picture(mask[0, 0], 4)[2:] == [".... | ..11"] * 2


Pair = tuple[torch.Tensor, torch.Tensor]


def random_case(
    seed: int, *, kv_heads: int, length: int = 70, blocks: int = 5, size: int = 3, dim: int = 8
) -> tuple[torch.Tensor, Pair, Pair, torch.Tensor, torch.Tensor]:
    """(query, context, own, anchors, valid) of two rows; the second has two padding blocks and an anchor at 0."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 4, blocks * size, dim, generator=generator)
    context, own = (
        (torch.randn(2, kv_heads, n, dim, generator=generator), torch.randn(2, kv_heads, n, dim, generator=generator))
        for n in (length, blocks * size)
    )
    anchors = torch.stack([torch.randperm(length, generator=generator)[:blocks].sort().values for _ in range(2)])
    valid = torch.ones(2, blocks, dtype=torch.bool)
    anchors[1, 0], anchors[1, -2:], valid[1, -2:] = 0, 0, False
    return query, context, own, anchors, valid


def view_of(anchors: torch.Tensor, valid: torch.Tensor, *, length: int, size: int, backend: Backend, **kind: Any) -> BlockView:
    return BlockView(anchor_positions=anchors, block_valid=valid, context_length=length, block_size=size, backend=backend, **kind)


@pytest.mark.parametrize("backend", ["dense", "grouped", "flex"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("window", "causal"), KINDS)
def test_attend_is_a_softmax_over_what_the_mask_shows(kv_heads: int, backend: Backend, window: int | None, causal: bool) -> None:
    query, context, own, anchors, valid = random_case(1, kv_heads=kv_heads, length=9, blocks=4)
    view = view_of(anchors, valid, length=9, size=3, backend=backend, window=window, causal=causal)
    out, mask = attend(query, context, own, view), view.mask
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    for b in range(2):
        for head in range(4):
            for q in range(12):
                shown = [k for k in range(21) if mask[b, 0, q, k]]
                scores = [float(query[b, head, q] @ key[b, head * kv_heads // 4, k]) / math.sqrt(8) for k in shown]
                shares = torch.tensor(scores).softmax(0)
                expected = sum(share * value[b, head * kv_heads // 4, k] for share, k in zip(shares, shown, strict=True))
                torch.testing.assert_close(out[b, head, q], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("window", "causal"), KINDS)
def test_flex_equals_dense_where_no_tile_divides_the_length(window: int | None, causal: bool) -> None:
    query, context, own, anchors, valid = random_case(5, kv_heads=2, length=331, blocks=9)
    kind: dict[str, Any] = {"length": 331, "size": 3, "window": window, "causal": causal}
    dense, flex = (attend(query, context, own, view_of(anchors, valid, backend=backend, **kind)) for backend in ("dense", "flex"))
    torch.testing.assert_close(flex, dense, atol=1e-5, rtol=0)


def test_without_a_view_all_is_visible() -> None:
    query, context, own, _, _ = random_case(1, kv_heads=2)
    everything = view_of(torch.full((2, 1), 70), torch.ones(2, 1, dtype=torch.bool), length=70, size=15, backend="dense")
    torch.testing.assert_close(attend(query, context, own, None), attend(query, context, own, everything))


@pytest.mark.parametrize("run", [None, 1, 2, 4])
@pytest.mark.parametrize("length", [1, 70, 331])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("window", "causal"), KINDS)
def test_grouped_attention_and_its_gradients_equal_the_dense_ones(
    kv_heads: int, length: int, run: int | None, window: int | None, causal: bool
) -> None:
    """Lengths that no tile divides, runs of any size, slots and blocks without any context, padding blocks."""
    blocks = min(5, length)
    query, context, own, anchors, valid = random_case(length, kv_heads=kv_heads, length=length, blocks=blocks)
    leaves = [query, *context, *own]
    for leaf in leaves:
        leaf.requires_grad_()
    dense, grouped = (
        view_of(anchors, valid, length=length, size=3, backend=backend, window=window, causal=causal)
        for backend in ("dense", "grouped")
    )
    vars(grouped)["runs"] = runs_of_blocks(anchors, valid, block_size=3, window=window, run=run)
    a, b = attend(query, context, own, dense), attend(query, context, own, grouped)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    weights = torch.randn(a.shape, generator=torch.Generator().manual_seed(2))
    for x, y in zip(
        torch.autograd.grad((a * weights).sum(), leaves), torch.autograd.grad((b * weights).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 5, 700, 9000])
def test_runs_cover_exactly_what_blocks_see(window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        anchors = torch.randint(0, 3000, (3, 20), generator=generator).sort(-1).values
        valid = torch.rand(3, 20, generator=generator) < 0.9
        anchors = torch.where(valid, anchors, 0)
        seen = torch.zeros(3, 20, 2, 3000, dtype=torch.long)
        for part in runs_of_blocks(anchors, valid, block_size=2, window=window):
            shown = torch.ones(3, part.last - part.first, 2, part.end - part.start, dtype=torch.bool)
            seen[:, part.first : part.last, :, part.start : part.end] += shown if part.hidden is None else ~part.hidden
        mask = block_mask(anchors, valid, context_length=3000, block_size=2, window=window)
        assert torch.equal(seen.flatten(1, 2), mask[:, 0, :, :3000].long())


def test_a_run_of_a_sliding_layer_begins_where_its_first_window_does() -> None:
    """Far less than the whole context is read; padding blocks, whose anchor is 0, do not draw it to the start."""
    anchors, valid = torch.tensor([[1000, 1100, 4000, 0]]), torch.tensor([[True, True, True, False]])
    runs = runs_of_blocks(anchors, valid, block_size=4, window=64, run=2)
    assert [(run.first, run.last, run.start, run.end) for run in runs] == [(0, 2, 937, 1100), (2, 4, 3937, 4000)]


def test_grouped_attention_under_autocast() -> None:
    """There values are bf16 while normed queries and keys are fp32."""
    query, context, own, anchors, valid = random_case(4, kv_heads=2)
    narrow = [(key, value.bfloat16()) for key, value in (context, own)]
    grouped = attend(query, *narrow, view_of(anchors, valid, length=70, size=3, backend="grouped"))
    dense = attend(query, context, own, view_of(anchors, valid, length=70, size=3, backend="dense"))
    assert grouped.dtype == torch.bfloat16
    torch.testing.assert_close(grouped.float(), dense, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("wanted", "device", "keys", "chosen"),
    [
        ("auto", "cpu", 4096, "grouped"),
        ("auto", "cpu", 300, "dense"),
        ("grouped", "cpu", 300, "grouped"),
        ("auto", "cuda:1", 300, "flex"),
        ("dense", "cpu", 4096, "dense"),
    ],
)
def test_backend_of_a_device(wanted: Backend, device: str, keys: int, chosen: str) -> None:
    assert choose_backend(wanted, device, keys=keys) == chosen


@pytest.mark.parametrize(("wanted", "device"), [("flex", "cpu"), ("grouped", "cuda")])
def test_a_backend_that_cannot_train_on_the_device_is_refused(wanted: Backend, device: str) -> None:
    with pytest.raises(ValueError, match=rf"training.attention {wanted} on {device}: .*; choose auto or dense"):
        check_backend(wanted, device)


PEAK = """
import torch
from pathlib import Path
from dflash_core.modeling.attention import BlockView, attend, choose_backend

torch.set_num_threads(1)
length, blocks, size = 4096, 512, 16
view = BlockView(
    anchor_positions=torch.linspace(1, length - 1, blocks).long().unsqueeze(0),
    block_valid=torch.ones(1, blocks, dtype=torch.bool),
    context_length=length,
    block_size=size,
    backend=choose_backend("auto", "cpu", keys=length + blocks * size),
)
leaves = [torch.randn(1, 1, n, 8).requires_grad_() for n in (blocks * size, length, length, blocks * size, blocks * size)]


def memory(name):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))


attend(leaves[0][:, :, :size], tuple(leaves[1:3]), tuple(leaf[:, :, :size] for leaf in leaves[3:]), None).sum().backward()
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
attend(leaves[0], tuple(leaves[1:3]), tuple(leaves[3:]), view).sum().backward()
print((memory("VmHWM") - before) / 1024)
"""


def test_memory_of_many_anchors_over_a_long_row() -> None:
    """CASES E18: 512 blocks of 16 over 4,096 tokens. A dense mask of them has 96 MiB, and 384 as numbers."""
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 32
