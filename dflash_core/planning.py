"""What a run needs and how fast it can be, before a GPU is used: FLOPs, memory, disk and days from the configs alone.

    Census (target's config), DrafterShape, Config --cost--> Cost: FLOPs of a data token in the target and in the drafter
    Cost, Device x count --topologies--> tokens/s of sharing every device, and of each split t targets + d drafters

    rate of a split = min(t x target's rate, d x drafter's rate) on one device each; of sharing, n / (sum of both times)

Matrix products count 2 FLOPs a parameter and token forward, 2 for the gradient of the input and 2 for that of the weights; the
frozen head has no gradient of its weights, the drafter's `fc` none of its input.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.config import Config, TrainingConfig
from dflash_core.devices import parts
from dflash_core.modeling.census import Census
from dflash_core.modeling.drafter import tensor_shapes
from dflash_core.records import DrafterShape, StepMetrics
from dflash_core.sizes import DTYPE_BYTES, EVALUATED_BLOCKS, MOMENTS, MUON_STEPS, batch_bytes, needs_teacher

TOKEN_BYTES = 5  # of a shard: id and mask
DISK_BYTES_S = 1.0e9  # assumed, with hashing
LOGIT_COPIES = 3  # logits, their gradient and one temporary of the loss
SAVED_WIDTHS = 10  # of a drafter layer's hidden size, kept for the backward pass


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as it is assumed: dense bf16 FLOP/s, memory, and the shares of it that target and drafter reach."""

    name: str
    flops: float
    memory: float
    target_mfu: float
    drafter_mfu: float


DEVICES = {
    device.name: device
    for device in (
        Device(name="rtx-pro-6000", flops=503.8e12, memory=96e9, target_mfu=0.55, drafter_mfu=0.45),
        Device(name="h200", flops=989.5e12, memory=141e9, target_mfu=0.45, drafter_mfu=0.435),
        Device(name="h100", flops=989.5e12, memory=80e9, target_mfu=0.45, drafter_mfu=0.435),
    )
}


def parse_devices(text: str) -> tuple[int, Device]:
    """`4xrtx-pro-6000` -> (4, that device). Raises ValueError."""
    count, _, name = text.partition("x")
    if not count.isdecimal() or int(count) < 1 or name not in DEVICES:
        raise ValueError(f"--devices {text!r}: write COUNTxNAME such as 4xrtx-pro-6000; known are {', '.join(DEVICES)}")
    return int(count), DEVICES[name]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """FLOPs. A data token is a real token of the conversations."""

    target: float  # a data token, forward, up to the last tap
    context: float  # a data token in the drafter: its keys and values
    block: float  # a token of a block in the drafter, forward and backward
    block_tokens: float  # a data token, in the mean
    update: float = 0.0  # a data token, of the optimizer

    @property
    def drafter(self) -> float:
        """Of the drafter, a data token."""
        return self.context + self.block_tokens * self.block + self.update

    def of_step(self, metrics: StepMetrics, *, block_size: int) -> float:
        """FLOPs of a step's real tokens: padding counts as nothing."""
        return metrics.tokens * (self.target + self.context) + metrics.blocks * block_size * self.block


def cost(config: Config, shape: DrafterShape, counted: Census, *, row_tokens: float, anchors: float) -> Cost:
    """FLOPs of rows of `row_tokens` tokens with `anchors` blocks, in the mean."""
    run = len(counted.layers) if needs_teacher(config.training) else max(shape.target_layer_ids) + 1
    earlier = row_tokens / 2  # tokens that one looks at, in the mean
    attention = 4 * earlier * counted.attention_width * sum(counted.attends[:run])
    width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, taps = shape.hidden_size, len(shape.target_layer_ids)
    layer = 2 * hidden * (width + key_width) + 3 * hidden * shape.intermediate_size
    near = min(earlier, shape.sliding_window or math.inf)  # that a sliding layer looks at
    seen = len(shape.sliding_layers) * near + (shape.num_layers - len(shape.sliding_layers)) * earlier
    looks = 12 * (seen + shape.block_size * shape.num_layers) * width
    return Cost(
        target=2 * sum(counted.active[:run]) + attention,
        context=4 * taps * hidden * hidden + 6 * 2 * hidden * key_width * shape.num_layers,
        block=6 * layer * shape.num_layers + 4 * hidden * shape.vocab_size + looks,
        block_tokens=anchors * shape.block_size / row_tokens,
        update=update_flops(config.training, shape) / (config.training.tokens_per_batch * config.training.accumulate),
    )


def update_flops(training: TrainingConfig, shape: DrafterShape) -> float:
    """Of one optimizer step, where they count: Muon's products of each matrix."""
    if training.optimizer != "muon":
        return 0.0
    sides = [sorted(size) for size in tensor_shapes(shape).values() if len(size) == 2]
    return float(sum(MUON_STEPS * (4 * m * m * n + 2 * m**3) for m, n in sides))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def drafter_parameters(shape: DrafterShape) -> int:
    """Of all trained tensors."""
    return sum(math.prod(size) for size in tensor_shapes(shape).values())


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes on a device or disk, by what they are for."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def target_room(config: Config, shape: DrafterShape, counted: Census) -> Room:
    """A device with one replica: no layer after the last tap, no head; where training is evaluated, all of it (the first replica).

    Of a target over several devices, the mean of them.
    """
    run = len(counted.layers) if needs_teacher(config.training) else max(shape.target_layer_ids) + 1
    size, tokens = DTYPE_BYTES[config.target.dtype], config.training.tokens_per_batch
    tapped = batch_bytes(shape, tokens, config.target.dtype, teacher=needs_teacher(config.training))
    widest = (4 * shape.hidden_size + 3 * shape.intermediate_size) * tokens * size
    weights = (counted.embedding + sum(counted.layers[:run])) * size / min(len(parts(name)) for name in config.pipeline.targets)
    rooms = {"weights": weights, "activations": widest, "taps": tapped}
    return Room(parts={**rooms, **_evaluation_parts(config, shape, counted, run)})


def _evaluation_parts(config: Config, shape: DrafterShape, counted: Census, run: int) -> dict[str, float]:
    """What evaluating snapshots adds to the first replica: the rest of the target, a copy of the drafter, caches and logits."""
    during, size = config.during_training, DTYPE_BYTES[config.target.dtype]
    if during.eval_every is None:
        return {}
    rest = sum(counted.layers[run:]) + (0 if counted.tied else counted.head)
    tokens = config.evaluation.batch_size * (config.data.max_length + during.max_new_tokens)
    cache = 2 * shape.num_kv_heads * shape.head_dim * (len(counted.layers) + shape.num_layers) * tokens
    logits = EVALUATED_BLOCKS * shape.block_size * shape.vocab_size
    return {
        "rest for evaluations": rest * size,
        "drafter for evaluations": drafter_parameters(shape) * size,
        "caches and logits for evaluations": (cache + logits) * size,
    }


def drafter_room(config: Config, shape: DrafterShape, counted: Census, ranks: int) -> Room:
    """The drafter's device: states, the target's embedding and head, one micro-batch, and the hidden states under credit.

    Of the states, ranks have weights and gradients each and share out the rest, as whole tensors. Gradients are there twice where a
    rank trains several micro-batches a step: those of the window and those of the micro-batch, which may not fit and be split.
    """
    gradients = 8 if config.training.accumulate > ranks else 4
    size = 2 if config.training.autocast == "bfloat16" else 4
    block_tokens = config.training.anchors_per_batch * shape.block_size
    wide = SAVED_WIDTHS * shape.hidden_size + 3 * shape.intermediate_size + 4 * shape.num_heads * shape.head_dim
    ends = counted.embedding + (0 if counted.tied else counted.head)
    return Room(
        parts={
            "states": (4 + gradients + kept_bytes(config.training) / ranks) * drafter_parameters(shape),
            "embedding and head": 4 * ends,
            "activations": block_tokens * wide * shape.num_layers * size + LOGIT_COPIES * 2**28,
            "credits": config.pipeline.ahead_bytes,
        }
    )


def disk_room(config: Config, shape: DrafterShape, *, tokens: float) -> Room:
    """Of the run directory."""
    parameters = drafter_parameters(shape)
    kept = config.pipeline.keep_checkpoints + 2  # the best one, and one being written
    kept += config.during_training.eval_every is not None  # and one being evaluated
    return Room(
        parts={
            "checkpoints": saved_bytes(config.training) * parameters * kept,
            "export": 2 * parameters,
            "shards": TOKEN_BYTES * tokens,
        }
    )


def saved_bytes(training: TrainingConfig) -> int:
    """Of a trained parameter in a checkpoint: the fp32 master, and what is kept beside it."""
    return 4 + kept_bytes(training)


def kept_bytes(training: TrainingConfig) -> int:
    """Of a trained parameter beside itself: moments, and the running mean where there is one."""
    return 4 * (len(MOMENTS[training.optimizer]) + (training.ema is not None))


def save_seconds(config: Config, shape: DrafterShape) -> float:
    """Of one checkpoint on a disk of DISK_BYTES_S."""
    return saved_bytes(config.training) * drafter_parameters(shape) / DISK_BYTES_S


# ---- topologies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A way to use the devices. `targets` = `drafters` = all of them: every device does both in turn."""

    targets: int
    drafters: int
    shared: bool
    rate: float  # real tokens a second
    fits: bool  # in memory

    @property
    def name(self) -> str:
        return "shared" if self.shared else f"{self.targets}+{self.drafters}"

    @property
    def even(self) -> bool:
        """Whether each rank gets as many targets as the others."""
        return self.targets % self.drafters == 0


def token_seconds(costs: Cost, device: Device) -> tuple[float, float]:
    """(target, drafter): seconds of one device for a data token."""
    return costs.target / (device.flops * device.target_mfu), costs.drafter / (device.flops * device.drafter_mfu)


def topologies(costs: Cost, count: int, device: Device, *, target: Room, drafter: Callable[[int], Room]) -> list[Topology]:
    """All ways to use `count` devices, the fastest first. `drafter(ranks)` is the room of one of so many drafters."""
    target_s, drafter_s = token_seconds(costs, device)
    both = target.total + drafter(count).total <= device.memory
    found = [Topology(targets=count, drafters=count, shared=True, rate=count / (target_s + drafter_s), fits=both)]
    for targets in range(1, count):
        apart = max(target.total, drafter(count - targets).total) <= device.memory
        rate = min(targets / target_s, (count - targets) / drafter_s)
        found.append(Topology(targets=targets, drafters=count - targets, shared=False, rate=rate, fits=apart))
    return sorted(found, key=lambda topology: -topology.rate)
