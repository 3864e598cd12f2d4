"""The synchronous half of training on one rank: it knows tensors and the optimizer, nothing of tasks and channels.

    TappedBatch --backward on sums--> window of `accumulate` micro-batches --divide by its weight, clip, AdamW--> StepMetrics

Gradients are sums until the step, so they do not depend on how rows were split into micro-batches. A micro-batch that does not
fit the memory is trained in two halves; one whose states or loss are not finite is skipped; a step whose gradient is not, too.
"""

import logging
import math
import time
from collections import Counter
from typing import Any

import torch

from dflash_core.config import Config
from dflash_core.modeling.anchors import draw_blocks
from dflash_core.modeling.blocks import at_labels, block_states
from dflash_core.modeling.drafter import Drafter
from dflash_core.modeling.loss import block_loss, slots_that_fit
from dflash_core.modeling.target import TargetEnds
from dflash_core.records import Batch, StepMetrics, TappedBatch, TrainState
from dflash_core.sizes import loss_gamma
from dflash_core.training.checkpoint import clone
from dflash_core.training.gang import Gang
from dflash_core.training.halves import give_memory_back, name_memory_error, out_of_memory, tapped_halves
from dflash_core.training.optimizer import (
    Average,
    learning_rate,
    make_optimizers,
    moment_names,
    read_moments,
    update,
    write_moments,
)
from dflash_core.training.window import BAD_LOSS, BAD_STATES, IDLE, NO_ANCHOR, Window

LOG = logging.getLogger(__name__)
MIN_JUDGED = 20  # micro-batches, and steps, before the share of skipped ones can fail the run
IN_A_ROW = 3  # bad micro-batches or bad steps that fail it
QUALITY_RATE = 0.02


class Trainer:
    """Drafter, optimizer and the open window. `train`, `finish` and `snapshot` are what the pipeline calls.

    `counters` are of the run, all its ranks and processes; `ledger` counts what this rank did in this process.
    """

    def __init__(
        self, drafter: Drafter, ends: TargetEnds, config: Config, *, total_steps: int, device: str, gang: Gang | None = None
    ) -> None:
        self.drafter = drafter.to(device)
        self.device = device
        self.total_steps = total_steps
        self.step = self.position = self.updates = 0
        self.counters: Counter[str] = Counter()
        self.ledger: Counter[str] = Counter()
        self._gang = gang or Gang()
        self._share = config.training.accumulate // self._gang.size  # micro-batches of this rank a step
        self.quality = 0.0  # simulated acceptance length, averaged over about 1 / QUALITY_RATE steps
        self._ends, self._config = ends, config
        self._gamma = loss_gamma(config)
        self._parameters = dict(self.drafter.named_parameters())
        self._owners = self._gang.owners(self._parameters)
        self._own = {name: value for name, value in self._parameters.items() if self._owners[name] == self._gang.rank}
        self._optimizers = make_optimizers(self._own, config.training)
        if config.training.compile:
            for layer in self.drafter.layers:
                layer.compile(dynamic=True)
        self._average = Average(self._own, config.training.ema) if config.training.ema else None
        self._window = Window(drafter.shape.block_size)
        self._since: float | None = None  # when the step in work began; start-up is reported apart
        self._epoch = 0
        self._bad_steps = self._bad_micro_batches = 0  # in a row

    @property
    def done(self) -> bool:
        """Whether all steps are applied."""
        return self.step >= self.total_steps

    @property
    def open_micro_batches(self) -> int:
        """Micro-batches trained since the last step; a stop drops them and the next run reads them again."""
        return self._window.micro_batches

    @property
    def departures(self) -> tuple[str, ...]:
        """What this run did, in all its processes, that an uninterrupted one on another day might not do."""
        kinds = ("skipped: ", "split: ", "bad gradient")
        return tuple(
            f"{name}: {count}" for name, count in sorted(self.counters.items())
            if name.startswith(kinds) and name != f"skipped: {NO_ANCHOR}"
        )  # fmt: skip

    def train(self, tapped: TappedBatch) -> StepMetrics | None:
        """One micro-batch, forward and backward; the step's metrics when it closes the window."""
        self._one_thread()
        self._since = self._since or time.perf_counter()
        window, number = self._window, tapped.batch.plan.number
        window.micro_batches += 1
        window.splits["target"] += tapped.split
        self._epoch = tapped.batch.plan.epoch
        reason = self._in_memory(tapped) if tapped.batch.plan.rows else IDLE
        if reason:
            window.skipped[reason] += 1
            self._check_skips(reason, number)
        else:
            self._bad_micro_batches = 0
        return self._apply() if window.micro_batches == self._share else None

    def finish(self) -> StepMetrics | None:
        """The last, shorter window when the data has ended."""
        if self._window.micro_batches == 0 or self.done:
            return None
        self._one_thread()
        return self._apply()

    def _one_thread(self) -> None:
        """The order of a CPU's sums must not depend on the machine; torch keeps the number for each calling thread."""
        if self.device == "cpu":
            torch.set_num_threads(1)

    def _in_memory(self, tapped: TappedBatch) -> str | None:
        """`_forward_backward`, in two halves where memory is short; the gradients of a try that failed are forgotten."""
        parameters = list(self.drafter.parameters())
        window = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        parts = None
        try:
            reason = self._forward_backward(tapped)
        except Exception as error:
            if not out_of_memory(error):
                raise
            parts = tapped_halves(tapped)
            if parts is None:
                name_memory_error(error, tapped.batch, "the drafter")
                raise
        if parts is not None:
            LOG.warning("micro-batch %d is trained in two halves: out of memory in the drafter", tapped.batch.plan.number)
            reason = self._in_halves(tapped.batch, parts)
        for parameter, before in zip(parameters, window, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        return reason

    def _in_halves(self, batch: Batch, parts: tuple[TappedBatch, TappedBatch]) -> str | None:
        self.drafter.zero_grad(set_to_none=True)
        give_memory_back()
        try:
            reasons = [self._forward_backward(part) for part in parts]
        except Exception as error:
            if out_of_memory(error):
                name_memory_error(error, batch, "the drafter")
            raise
        self._window.splits["drafter"] += 1
        return reasons[0] if all(reasons) else None

    def _forward_backward(self, tapped: TappedBatch) -> str | None:
        """Adds this micro-batch's gradient sums to the window; the reason instead if it must be skipped."""
        hidden = tapped.target_hidden
        if not bool(torch.isfinite(hidden.sum())):
            return BAD_STATES
        training = self._config.training
        shape = self.drafter.shape
        blocks = draw_blocks(
            tapped.batch,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            num_anchors=training.anchors_per_row,
            gamma=self._gamma,
            seed=self._config.seed,
            first_slot=shape.first_slot,
        )
        if not bool(blocks.block_valid.any()):
            return NO_ANCHOR
        blocks = blocks.to(self.device)
        if training.target_features == "zero":
            hidden = torch.zeros_like(hidden)
        bfloat16 = training.autocast == "bfloat16"
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16, enabled=bfloat16):
            context = self.drafter.context(hidden.to(self.device, torch.float32))
            states = block_states(self.drafter, self._ends.embed, context, blocks, backend=training.attention)
            sums = block_loss(
                states,
                blocks,
                self._ends.head,
                terms=training.loss,
                dpace_alpha=training.dpace_alpha if training.loss_weights == "dpace" else None,
                teacher_states=None if tapped.last_hidden is None else at_labels(tapped.last_hidden.to(self.device), blocks),
                slots_at_once=slots_that_fit(shape.vocab_size, device=self.device),
            )
        if not bool(torch.isfinite(sums.loss_sum)):
            return BAD_LOSS
        sums.loss_sum.backward()
        self._window.add(tapped, blocks, sums)
        return None

    def _check_skips(self, reason: str, number: int) -> None:
        open_ones = sum(self._window.skipped.values()) - self._window.skipped[IDLE]
        skipped = open_ones + sum(n for name, n in self.counters.items() if name.startswith("skipped: "))
        seen = self.counters["applied"] + skipped
        if seen >= MIN_JUDGED and skipped > self._config.training.max_skipped * seen:
            raise ValueError(
                f"{skipped} of {seen} micro-batches were skipped (training.max_skipped "
                f"{self._config.training.max_skipped:.0%}); the last, number {number}: {reason}"
            )
        if reason not in (IDLE, NO_ANCHOR):
            self._bad_micro_batches += 1
        if self._bad_micro_batches == IN_A_ROW:
            raise ValueError(f"{IN_A_ROW} micro-batches in a row could not be trained; the last, number {number}: {reason}")

    def _apply(self) -> StepMetrics:
        """The optimizer step of the window: gradients / weight, clip, AdamW. A non-finite gradient leaves everything as it was."""
        window, training = self._window, self._config.training
        own = Counter({f"skipped: {reason}": count for reason, count in window.skipped.items()})
        own["applied"] = window.micro_batches - own.total()
        asked = window.over_all(self._gang)
        if window.weight_sum > 0:
            self._gang.add_gradients(self.drafter.parameters())
        rate = learning_rate(self.step, total=self.total_steps, training=training)
        norm, applied = math.nan, False
        if window.weight_sum > 0:
            for parameter in self.drafter.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(window.weight_sum)
            norm = float(torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), training.clip))
            applied = math.isfinite(norm)
        if applied:
            update(self._optimizers, rate)
            self.updates += 1
            if self._average:
                self._average.add(self.updates)
            for name, parameter in self._parameters.items():
                self._gang.spread(parameter.data, self._owners[name])
        if window.weight_sum > 0:  # a window of skipped micro-batches is no judgement of the gradient
            self._judge(applied, norm)
        self.drafter.zero_grad(set_to_none=True)
        self.step += 1
        self.ledger.update(own)
        micro_batches = window.micro_batches - window.skipped.pop(IDLE, 0)
        self.position += micro_batches
        self.counters["applied"] += micro_batches - sum(window.skipped.values())
        self.counters.update({f"skipped: {reason}": count for reason, count in window.skipped.items()})
        self.counters.update({f"split: {where}": count for where, count in window.splits.items() if count})
        self.counters["steps not applied"] += not applied
        now = time.perf_counter()
        metrics = StepMetrics(
            step=self.step,
            position=self.position,
            epoch=self._epoch,
            micro_batches=micro_batches,
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
        if metrics.drafting:
            length = 1 + metrics.accepted_sum / metrics.drafting
            self.quality = self.quality + QUALITY_RATE * (length - self.quality) if self.quality else length
        self._since = now
        self._window = Window(self.drafter.shape.block_size)
        if asked:
            self._gang.agree()
        return metrics

    def _judge(self, applied: bool, norm: float) -> None:
        if applied:
            self._bad_steps = 0
            return
        self._bad_steps += 1
        self.counters["bad gradients"] += 1
        bad, seen, most = self.counters["bad gradients"], self.step + 1, self._config.training.max_skipped
        if self._bad_steps == IN_A_ROW or (seen >= MIN_JUDGED and bad > most * seen):
            raise ValueError(
                f"{bad} of {seen} optimizer steps had no finite gradient, {self._bad_steps} in a row (limits: training.max_skipped "
                f"{most:.0%}, {IN_A_ROW} in a row; last norm {norm}); lower the learning rate"
            )

    def snapshot(self) -> TrainState:
        """Private copies of everything that the next step would change. All ranks take one together; rank 0 gets the tensors."""
        owned = {name: (value, self._owners[name]) for name, value in self._parameters.items()}
        training, collect = self._config.training, self._gang.collect
        moments = {kind: owned[name] for name, value in self._parameters.items() for kind in moment_names(name, value, training)}
        return TrainState(
            step=self.step,
            position=self.position,
            weights=clone(self._parameters) if self._gang.rank == 0 else {},
            moments=collect(read_moments(self._own, self._optimizers), moments) if self.updates else {},
            average=collect(self._average.mean, owned) if self._average else None,
            counters={**self.counters, "updates": self.updates, "quality": self.quality},
        )

    def restore(self, state: TrainState) -> None:
        """Continue as if the step after `state` were the next one."""
        self.drafter.load_state_dict(state.weights, strict=True)
        counters: dict[str, Any] = dict(state.counters)
        self.updates, self.quality = counters.pop("updates"), counters.pop("quality", 0.0)
        self.counters = Counter(counters)
        write_moments(self._own, self._optimizers, state.moments, self.updates)
        if self._average:
            assert state.average is not None, "training.ema is part of the config that the checkpoint depends on"
            self._average.mean = {name: state.average[name].to(self.device, copy=True) for name in self._own}
        self.step, self.position = state.step, state.position
