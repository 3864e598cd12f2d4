"""The synchronous half of training on one rank: it knows tensors and the optimizer, nothing of tasks and channels.

    TappedBatch --backward on sums--> window of `accumulate` micro-batches --divide by its weight, clip, AdamW--> StepMetrics

Gradients are sums until the step, so they do not depend on how rows were split into micro-batches.
"""

import math
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from dflash_core.config import Config, loss_gamma
from dflash_core.modeling.anchors import draw_blocks
from dflash_core.modeling.attention import block_mask
from dflash_core.modeling.drafter import Drafter
from dflash_core.modeling.loss import LossSums, weighted_cross_entropy
from dflash_core.modeling.target import TargetEnds
from dflash_core.records import AnchoredBlocks, StepMetrics, TappedBatch, TrainState
from dflash_core.training.checkpoint import clone
from dflash_core.training.optimizer import learning_rate, make_optimizer, read_moments, write_moments

MIN_JUDGED = 20  # micro-batches before the share of skipped ones can fail the run


def block_states(drafter: Drafter, ends: TargetEnds, target_hidden: Tensor, blocks: AnchoredBlocks) -> Tensor:
    """Final-normed states [B, N, S, H] of all blocks of a batch, each seeing the context before its anchor."""
    rows, count, size = blocks.block_ids.shape
    length = target_hidden.shape[1]
    device = target_hidden.device
    positions = (blocks.anchor_positions.unsqueeze(-1) + torch.arange(size, device=device)).flatten(1)  # [B, N*S]
    context = drafter.context(target_hidden, torch.arange(length, device=device).expand(rows, -1))
    mask = block_mask(blocks.anchor_positions, blocks.block_valid, context_length=length, block_size=size)
    embeddings = ends.embed(blocks.block_ids.flatten(1)).to(target_hidden.dtype)
    return drafter(embeddings, positions, context, mask).view(rows, count, size, -1)


class Window:
    """Sums over the micro-batches of the open optimizer step."""

    def __init__(self, block_size: int) -> None:
        self.micro_batches = self.rows = self.tokens = self.computed_tokens = self.blocks = self.accepted_sum = 0
        self.loss_sum = self.weight_sum = 0.0
        self.correct = torch.zeros(block_size, dtype=torch.long)
        self.counted = torch.zeros(block_size, dtype=torch.long)
        self.skipped: Counter[str] = Counter()

    def add(self, tapped: TappedBatch, blocks: AnchoredBlocks, sums: LossSums) -> None:
        """One trained micro-batch."""
        self.rows += tapped.batch.lengths.numel()
        self.tokens += int(tapped.batch.lengths.sum())
        self.computed_tokens += tapped.batch.input_ids.numel()
        self.blocks += int(blocks.block_valid.sum())
        self.loss_sum += float(sums.loss_sum.detach())
        self.weight_sum += float(sums.weight_sum)
        self.correct += sums.correct.cpu()
        self.counted += sums.counted.cpu()
        self.accepted_sum += int(sums.accepted_sum)


class Trainer:
    """Drafter, optimizer and the open window. `train`, `finish` and `snapshot` are what the pipeline calls."""

    def __init__(self, drafter: Drafter, ends: TargetEnds, config: Config, *, total_steps: int, device: str) -> None:
        self.drafter = drafter.to(device)
        self.device = device
        self.total_steps = total_steps
        self.step = self.position = self.updates = 0
        self.counters: Counter[str] = Counter()
        self._ends, self._config = ends, config
        self._gamma = loss_gamma(config)
        self._optimizer = make_optimizer(self.drafter, config.training)
        self._window = Window(drafter.shape.block_size)
        self._since: float | None = None  # when the step in work began; start-up is reported apart
        self._epoch = 0
        self._bad_steps = 0

    @property
    def done(self) -> bool:
        """Whether all steps are applied."""
        return self.step >= self.total_steps

    @property
    def open_micro_batches(self) -> int:
        """Micro-batches trained since the last step; a stop drops them and the next run reads them again."""
        return self._window.micro_batches

    def train(self, tapped: TappedBatch) -> StepMetrics | None:
        """One micro-batch, forward and backward; the step's metrics when it closes the window."""
        self._one_thread()
        self._since = self._since or time.perf_counter()
        window, number = self._window, tapped.batch.plan.number
        window.micro_batches += 1
        self._epoch = tapped.batch.plan.epoch
        reason = self._forward_backward(tapped)
        if reason:
            window.skipped[reason] += 1
            self._check_skips(reason, number)
        if window.micro_batches == self._config.training.accumulate:
            return self._apply(number + 1)
        return None

    def finish(self) -> StepMetrics | None:
        """The last, shorter window when the data has ended."""
        if self._window.micro_batches == 0 or self.done:
            return None
        self._one_thread()
        return self._apply(self.position + self._window.micro_batches)

    def _one_thread(self) -> None:
        """The order of a CPU's sums must not depend on the machine; torch keeps the number for each calling thread."""
        if self.device == "cpu":
            torch.set_num_threads(1)

    def _forward_backward(self, tapped: TappedBatch) -> str | None:
        """Adds this micro-batch's gradient sums to the window; the reason instead if it must be skipped."""
        hidden = tapped.target_hidden
        if not bool(torch.isfinite(hidden.sum())):
            return "target produced non-finite hidden states"
        training = self._config.training
        shape = self.drafter.shape
        blocks = draw_blocks(
            tapped.batch,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            num_anchors=training.anchors_per_row,
            gamma=self._gamma,
            seed=self._config.seed,
        )
        if not bool(blocks.block_valid.any()):
            return "no anchor"
        blocks = AnchoredBlocks(**{name: tensor.to(self.device) for name, tensor in vars(blocks).items()})
        if training.target_features == "zero":
            hidden = torch.zeros_like(hidden)
        bfloat16 = training.autocast == "bfloat16"
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=bfloat16):
            states = block_states(self.drafter, self._ends, hidden.to(self.device, torch.float32), blocks)
            sums = weighted_cross_entropy(states, blocks, self._ends.head)
        if not bool(torch.isfinite(sums.loss_sum)):
            return "loss is not finite"
        sums.loss_sum.backward()
        self._window.add(tapped, blocks, sums)
        return None

    def _check_skips(self, reason: str, number: int) -> None:
        skipped = sum(self._window.skipped.values()) + sum(n for name, n in self.counters.items() if name.startswith("skipped: "))
        seen = self.counters["applied"] + skipped
        if seen >= MIN_JUDGED and skipped > self._config.training.max_skipped * seen:
            raise ValueError(
                f"{skipped} of {seen} micro-batches were skipped (training.max_skipped "
                f"{self._config.training.max_skipped:.0%}); the last, number {number}: {reason}"
            )

    def _apply(self, position: int) -> StepMetrics:
        """The optimizer step of the window: gradients / weight, clip, AdamW. A non-finite gradient leaves everything as it was."""
        window, training = self._window, self._config.training
        rate = learning_rate(self.step, total=self.total_steps, training=training)
        norm, applied = math.nan, False
        if window.weight_sum > 0:
            for parameter in self.drafter.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(window.weight_sum)
            norm = float(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), training.clip))
            applied = math.isfinite(norm)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self.updates += 1
        if window.weight_sum > 0:  # a window of skipped micro-batches is no judgement of the gradient
            self._judge(applied, norm)
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.position = position
        self.counters["applied"] += window.micro_batches - sum(window.skipped.values())
        self.counters.update({f"skipped: {reason}": count for reason, count in window.skipped.items()})
        self.counters["steps not applied"] += not applied
        now = time.perf_counter()
        metrics = StepMetrics(
            step=self.step,
            position=position,
            epoch=self._epoch,
            micro_batches=window.micro_batches,
            skipped=dict(window.skipped),
            rows=window.rows,
            tokens=window.tokens,
            computed_tokens=window.computed_tokens,
            blocks=window.blocks,
            loss_sum=window.loss_sum,
            weight_sum=window.weight_sum,
            correct=tuple(window.correct.tolist()),
            counted=tuple(window.counted.tolist()),
            accepted_sum=window.accepted_sum,
            learning_rate=rate,
            gradient_norm=norm,
            applied=applied,
            seconds=now - (self._since or now),
        )
        self._since = now
        self._window = Window(self.drafter.shape.block_size)
        return metrics

    def _judge(self, applied: bool, norm: float) -> None:
        self._bad_steps = 0 if applied else self._bad_steps + 1
        if self._bad_steps == 3:
            raise ValueError(
                f"three optimizer steps in a row without a finite gradient (last norm {norm}); lower the learning rate"
            )

    def snapshot(self) -> TrainState:
        """Private copies of everything that the next step would change."""
        return TrainState(
            step=self.step,
            position=self.position,
            weights=clone(dict(self.drafter.named_parameters())),
            moments=clone(read_moments(self.drafter, self._optimizer)),
            counters={**self.counters, "updates": self.updates},
        )

    def restore(self, state: TrainState) -> None:
        """Continue as if the step after `state` were the next one."""
        self.drafter.load_state_dict(state.weights, strict=True)
        counters: dict[str, Any] = dict(state.counters)
        self.updates = counters.pop("updates")
        self.counters = Counter(counters)
        write_moments(self.drafter, self._optimizer, state.moments, self.updates)
        self.step, self.position = state.step, state.position
