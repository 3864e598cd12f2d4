"""The mask, against the golden picture of the algorithm's description and a loop; attention against plain softmax."""

import math

import pytest
import torch

from dflash_core.modeling.attention import attend, block_mask


def picture(mask: torch.Tensor, context_length: int) -> list[str]:
    rows = ["".join("1" if seen else "." for seen in row) for row in mask.tolist()]
    return [f"{row[:context_length]} | {row[context_length:]}" for row in rows]


def test_golden_mask() -> None:
    mask = block_mask(torch.tensor([[2, 4]]), torch.ones(1, 2, dtype=torch.bool), context_length=6, block_size=3)
    assert mask.shape == (1, 1, 6, 12)
    assert picture(mask[0, 0], 6) == ["11.... | 111..."] * 3 + ["1111.. | ...111"] * 3


def test_mask_equals_the_rule_on_random_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        rows, count, length, size = (int(torch.randint(1, high, (), generator=generator)) for high in (4, 6, 12, 5))
        anchors = torch.randint(0, length, (rows, count), generator=generator)
        valid = torch.rand(rows, count, generator=generator) < 0.7
        mask = block_mask(anchors, valid, context_length=length, block_size=size)[:, 0]
        for b in range(rows):
            for query in range(count * size):
                j = query // size
                for p in range(length):
                    assert bool(mask[b, query, p]) == bool(valid[b, j] and p < anchors[b, j])
                for key in range(count * size):
                    assert bool(mask[b, query, length + key]) == (key // size == j)


def test_a_padding_block_sees_its_own_slots_only() -> None:
    mask = block_mask(torch.tensor([[3, 0]]), torch.tensor([[True, False]]), context_length=4, block_size=2)
    assert picture(mask[0, 0], 4)[2:] == [".... | ..11"] * 2


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attend_is_a_softmax_over_what_the_mask_shows(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 3, 8, generator=generator)
    key, value = (torch.randn(2, kv_heads, 5, 8, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, 3, 5, generator=generator) < 0.6
    mask[..., 0] = True
    out = attend(query, key, value, mask)
    for b in range(2):
        for head in range(4):
            for q in range(3):
                shown = [k for k in range(5) if mask[b, 0, q, k]]
                scores = [float(query[b, head, q] @ key[b, head * kv_heads // 4, k]) / math.sqrt(8) for k in shown]
                shares = torch.tensor(scores).softmax(0)
                expected = sum(share * value[b, head * kv_heads // 4, k] for share, k in zip(shares, shown, strict=True))
                torch.testing.assert_close(out[b, head, q], expected, atol=1e-6, rtol=1e-5)
    everything = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    torch.testing.assert_close(attend(query, key, value, None), attend(query, key, value, everything))
