"""Figures of the drafter's parts beside the ways that others compute them: `python -m tests.benchmarks.drafter loss|attention|step`.

Sides take turns in one process and times are medians of their ratios; memory is the highest of a fresh process each. Every side's
gradient is compared with the plain one before anything is timed.
"""

import argparse
import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dflash_core.config import Config
from dflash_core.modeling.anchors import draw_blocks
from dflash_core.modeling.attention import Backend, BlockView, attend, block_mask
from dflash_core.modeling.drafter import Drafter, RMSNorm, new_drafter
from dflash_core.modeling.loss import block_loss, slots_that_fit
from dflash_core.modeling.target import TargetEnds
from dflash_core.records import AnchoredBlocks, TappedBatch
from dflash_core.training.trainer import Trainer
from tests.fakes import make_batch, make_shape

VOCAB = 248_320


class LossCase:
    """Blocks of one row, an eighth of them padding, and a head of the vocabulary of Qwen3.6."""

    def __init__(self, *, blocks: int, size: int, hidden: int, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size, self.hidden = size, hidden
        weights = torch.exp(-(torch.arange(size) - 1) / 4.0).repeat(1, blocks, 1)
        weights[..., 0] = 0
        weights[:, -blocks // 8 :] = 0
        self.blocks = AnchoredBlocks(
            anchor_positions=torch.zeros(1, blocks, dtype=torch.long),
            block_valid=weights.sum(-1) > 0,
            block_ids=torch.zeros(1, blocks, size, dtype=torch.long),
            labels=torch.randint(vocab, (1, blocks, size), generator=generator),
            weights=weights,
        )
        self.states = torch.randn(1, blocks, size, hidden, generator=generator)
        self.matrix = torch.randn(vocab, hidden, generator=generator).mul_(hidden**-0.5)

    def head(self, states: Tensor) -> Tensor:
        return torch.nn.functional.linear(states, self.matrix)


def sum_of(case: LossCase, states: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(case.head(states).float(), labels, reduction="none")
    return (losses * weights).sum()


def full(case: LossCase, states: Tensor) -> Tensor:
    """All logits of the trained slots at once."""
    trained = case.blocks.weights > 0
    return sum_of(case, states[trained], case.blocks.labels[trained], case.blocks.weights[trained])


def checkpointed(case: LossCase, states: Tensor, *, all_slots: bool) -> Tensor:
    """Chunks whose logits are computed again in the backward pass; public trainers give the head every slot (`all_slots`)."""
    keep = torch.ones_like(case.blocks.weights, dtype=torch.bool) if all_slots else case.blocks.weights > 0
    parts = zip(
        states[keep].split(CHUNK), case.blocks.labels[keep].split(CHUNK), case.blocks.weights[keep].split(CHUNK), strict=True
    )
    return torch.stack([checkpoint(sum_of, case, *part, use_reentrant=False) for part in parts]).sum()


def ours(case: LossCase, states: Tensor) -> Tensor:
    return block_loss(states, case.blocks, case.head, terms={"ce": 1.0}, slots_at_once=CHUNK).loss_sum


CHUNK = slots_that_fit(VOCAB, device="cpu")
SIDES: dict[str, Callable[[LossCase, Tensor], Tensor]] = {
    "full logits": full,
    "checkpointed, all slots": functools.partial(checkpointed, all_slots=True),
    "checkpointed, trained slots": functools.partial(checkpointed, all_slots=False),
    "ours": ours,
}


def gradient(case: LossCase, side: str) -> Tensor:
    states = case.states.clone().requires_grad_()
    SIDES[side](case, states).backward()
    assert states.grad is not None
    return states.grad


def memory(name: str) -> float:
    """MB of this process: VmRSS, what it holds, or VmHWM, the most since `clear_refs`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def loss_memory(side: str, case: LossCase) -> None:
    """For a fresh process: prints what forward and backward need beyond the inputs."""
    case.head(case.states[0, :1, :1])
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    gradient(case, side)
    print(memory("VmHWM") - before)


def loss(arguments: argparse.Namespace) -> None:
    """Memory and time of every side at the vocabulary of Qwen3.6."""
    case = LossCase(blocks=arguments.blocks, size=8, hidden=arguments.hidden)
    if arguments.memory_of:
        loss_memory(arguments.memory_of, case)
        return
    expected = gradient(case, "full logits")
    error = {side: float((gradient(case, side) - expected).abs().max() / expected.abs().max()) for side in SIDES}
    most = {}
    for side in SIDES:
        command = [sys.executable, "-m", "tests.benchmarks.drafter", "loss", "--memory-of", side]
        command += ["--blocks", str(arguments.blocks), "--hidden", str(arguments.hidden)]
        most[side] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.rounds):
        for side in SIDES:
            start = time.process_time()
            gradient(case, side)
            seconds[side].append(time.process_time() - start)
    print(f"loss: vocabulary {VOCAB:,}, hidden {arguments.hidden}, {arguments.blocks} blocks of 8, an eighth padding, fp32")
    for side in SIDES:
        print(f"  {side:28} {median(seconds[side]):6.2f} CPU-s  {most[side]:7.0f} MB  gradient error {error[side]:.1e}")

    def ratio(a: str, b: str) -> float:
        return median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))

    print(f"  memory: 1/{most['full logits'] / most['ours']:.1f} of full logits (at most 1/8)")
    print(f"  time: {ratio('ours', 'full logits'):.2f}x of full logits (at most 1.3)")
    print(f"  {ratio('checkpointed, all slots', 'ours'):.2f}x faster than checkpointed chunks as public trainers have them (1.6)")
    print(f"  {ratio('checkpointed, trained slots', 'ours'):.2f}x faster than checkpointed chunks of the trained slots alone")


# ---- attention -------------------------------------------------------------------------------------------------------


def attention(arguments: argparse.Namespace) -> None:
    """Forward and backward over one row of 2,048 tokens, grouped beside a dense mask: blocks of 16, 8/4 heads of 64."""
    length, size, heads, kv_heads, dim = 2048, 16, 8, 4, 64
    generator = torch.Generator().manual_seed(0)
    window = arguments.window
    for blocks, wanted in ((64, 2.0), (256, 3.0)):
        anchors = (torch.randperm(length - 1, generator=generator)[:blocks] + 1).sort().values.unsqueeze(0)
        sizes = [(heads, blocks * size), *[(kv_heads, length)] * 2, *[(kv_heads, blocks * size)] * 2]
        leaves = [torch.randn(1, *shape, dim, generator=generator).requires_grad_() for shape in sizes]
        seconds: dict[Backend, list[float]] = {"dense": [], "grouped": []}
        results: dict[Backend, tuple[Tensor, ...]] = {}
        for _ in range(arguments.rounds + 1):
            for backend, times in seconds.items():
                start = time.process_time()
                view = BlockView(
                    anchor_positions=anchors,
                    block_valid=torch.ones_like(anchors, dtype=torch.bool),
                    context_length=length,
                    block_size=size,
                    backend=backend,
                    window=window,
                    causal=window is not None,
                )
                out = attend(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), view)
                results[backend] = (out.detach(), *torch.autograd.grad(out.square().sum(), leaves))
                times.append(time.process_time() - start)
        error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results.values(), strict=True))
        dense, grouped = (median(times[1:]) for times in seconds.values())
        ratio = median(a / b for a, b in zip(seconds["dense"][1:], seconds["grouped"][1:], strict=True))
        print(f"attention, window {window}, {blocks} anchors: dense {dense * 1e3:.0f} ms, grouped {grouped * 1e3:.0f} ms, {ratio:.2f}x (at least {wanted}); "
              f"largest difference {error:.1e}")  # fmt: skip


# ---- a whole step ----------------------------------------------------------------------------------------------------


def plain_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def plain_loss(drafter: Drafter, ends: TargetEnds, hidden: Tensor, blocks: AnchoredBlocks) -> Tensor:
    """Loss over weight of one batch as trainers commonly write it: autograd everywhere, a bool mask, the head over all slots of
    checkpointed chunks."""
    rows, count, size = blocks.block_ids.shape
    length, dim = hidden.shape[1], drafter.shape.head_dim
    mask = block_mask(blocks.anchor_positions, blocks.block_valid, context_length=length, block_size=size)
    own = (blocks.anchor_positions.unsqueeze(-1) + torch.arange(size)).flatten(1)
    cos, sin = drafter.rotary(torch.cat([torch.arange(length).expand(rows, -1), own], 1))
    context = plain_norm(drafter.fc(hidden), drafter.hidden_norm)
    x = ends.embed(blocks.block_ids.flatten(1))
    for layer in drafter.layers:
        attention, inner = layer.self_attn, plain_norm(x, layer.input_layernorm)
        both = torch.cat([context, inner], 1)
        query = plain_norm(attention.q_proj(inner).unflatten(-1, (-1, dim)), attention.q_norm).transpose(1, 2)
        key = plain_norm(attention.k_proj(both).unflatten(-1, (-1, dim)), attention.k_norm).transpose(1, 2)
        value = attention.v_proj(both).unflatten(-1, (-1, dim)).transpose(1, 2)
        query, key = plain_rotation(query, cos[:, length:], sin[:, length:]), plain_rotation(key, cos, sin)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(plain_norm(x, layer.post_attention_layernorm))
    states = plain_norm(x, drafter.norm).view(rows, count, size, -1)

    def chunk(states: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        logits = ends.head(states).float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum(), (logits.argmax(-1) == labels).sum()

    parts = zip(*(x.flatten(0, 1).split(128) for x in (states, blocks.labels, blocks.weights)), strict=True)
    return sum(checkpoint(chunk, *part, use_reentrant=False)[0] for part in parts) / blocks.weights.sum()


def step(arguments: argparse.Namespace) -> None:
    """Steps of the setting in which public trainers took 74 ms: 16 rows of 220 tokens, 12 anchors each, three layers of hidden 64."""
    shape = make_shape(num_layers=3, hidden_size=64, intermediate_size=172, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512,
                       block_size=8, mask_token_id=3)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    head, embed = torch.nn.Linear(64, 512, bias=False).requires_grad_(False), torch.nn.Embedding(512, 64).requires_grad_(False)
    ends = cast(TargetEnds, argparse.Namespace(head=head, embed=embed, head_dtype=torch.float32))
    training = {"anchors_per_row": 12, "anchors_per_batch": 192, "learning_rate": 1e-3}
    values = {
        "target": {"path": "none"},
        "data": {"conversations": "none"},
        "training": training,
        "evaluation": {"prompts": "none"},
    }
    config = Config.model_validate({"name": "step", "drafter": {"block_size": 8}, **values})
    trainer = Trainer(new_drafter(shape, 0), ends, config, total_steps=10**6, device="cpu")
    plain = new_drafter(shape, 0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(arguments.rounds):
        ids = torch.randint(4, 512, (16, 220), generator=generator)
        batch = make_batch([(row, [0] * 10 + [1] * 210) for row in ids.tolist()], number=number, first_row=16 * number)
        hidden = torch.randn(16, 220, 192, generator=generator)
        blocks = draw_blocks(batch, block_size=8, mask_token_id=3, num_anchors=12, gamma=4.0, seed=config.seed)
        start = time.process_time()
        metrics = trainer.train(TappedBatch(batch=batch, target_hidden=hidden))
        middle = time.process_time()
        loss = plain_loss(plain, ends, hidden, blocks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds["ours"].append(middle - start)
        seconds["plain"].append(time.process_time() - middle)
        if number == 0:
            assert metrics is not None
            error = abs(metrics.loss_sum / metrics.weight_sum / float(loss.detach()) - 1)
    ratio = median(a / b for a, b in zip(seconds["ours"][5:], seconds["plain"][5:], strict=True))
    print(f"step: ours {median(seconds['ours'][5:]) * 1e3:.0f} ms, as commonly written {median(seconds['plain'][5:]) * 1e3:.0f} ms: "
          f"{ratio:.2f} of it (45 / 74 = 0.61); first loss differs by {error:.1e}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("loss", help=loss.__doc__)
    command.add_argument("--blocks", type=int, default=96)
    command.add_argument("--hidden", type=int, default=256)
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--memory-of", help=argparse.SUPPRESS)
    command.set_defaults(run=loss)
    command = commands.add_parser("attention", help=attention.__doc__)
    command.add_argument("--rounds", type=int, default=3)
    command.add_argument("--window", type=int, help="of a sliding layer, causal within the block")
    command.set_defaults(run=attention)
    command = commands.add_parser("step", help=step.__doc__)
    command.add_argument("--rounds", type=int, default=45)
    command.set_defaults(run=step)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
