"""The composition root: every part is built from Config here and fitted to the others. Read this first.

    check    config against the target, before anything heavy           -> DrafterShape
    prepare  conversations -> token rows -> shards/                      -> Manifest     (preparation.py)
    train    shards -> pipeline -> checkpoints/, metrics.jsonl           -> TrainResult    (evaluations.jsonl: watching.py)
    export   newest checkpoint -> export/ (and other formats of it)      -> path
    evaluate export, decoded in fresh processes                          -> AcceptanceReport    (measurement.py)
    report   everything above -> report.json, report.md
    judge    export beside the drafter in use -> gates                   -> Decision

All of it is plain Python without Prefect or MLflow; `flows` calls these functions in this order.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from dflash_core import opening, preparation
from dflash_core.config import Config
from dflash_core.data.batches import BufferPool, assemble, prefetched
from dflash_core.data.plan import Layout, lay_out, limit_lengths, plan, share_of_rank
from dflash_core.data.prompts import read_prompt_sets
from dflash_core.data.reader import TokenDataset
from dflash_core.decoding.export import WEIGHTS, write_export
from dflash_core.decoding.speculators import write_speculators
from dflash_core.decoding.warm_start import check_start, start_weights
from dflash_core.devices import all_devices, devices_of_rank, home, parts
from dflash_core.files import write_json
from dflash_core.measurement import evaluate as evaluate
from dflash_core.measurement import judge as judge
from dflash_core.measurement import lineage as lineage
from dflash_core.measurement import measure_endpoint as measure_endpoint
from dflash_core.measurement import write_report as write_report
from dflash_core.modeling.attention import check_backend
from dflash_core.modeling.census import read_census
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, check_padding, choose_attention, load_ends, read_facts
from dflash_core.planning import cost
from dflash_core.records import Batch, DrafterShape, PlannedBatch, StepMetrics, TappedBatch, TargetFacts, TrainResult, TrainState
from dflash_core.rundir import RunDirectory, config_fingerprint
from dflash_core.sizes import batch_bytes, needs_teacher, resolve, total_steps
from dflash_core.training.checkpoint import clean, environment, latest, load_checkpoint, prune, save_checkpoint
from dflash_core.training.gang import Gang
from dflash_core.training.metrics import MetricsFile
from dflash_core.training.observation import observe
from dflash_core.training.pipeline import run_pipeline
from dflash_core.training.result import Lap, ledger, make_result
from dflash_core.training.timeline import write_timeline
from dflash_core.training.trainer import Trainer
from dflash_core.training.transfer import Carrier
from dflash_core.training.work import FULL, STAGES, Limits, Outcome, Work
from dflash_core.watching import Watch

LOG = logging.getLogger(__name__)
NOTHING = torch.zeros(0)  # hidden states of a micro-batch without rows


def check(config: Config) -> tuple[TargetFacts, DrafterShape]:
    """Everything that can be wrong and can be seen without weights. Raises ValueError."""
    preparation.check(config)
    read_prompt_sets(config.evaluation)
    if len(parts(drafter := config.pipeline.drafter)) > 1:
        raise ValueError(f"pipeline.drafter {drafter!r}: a drafter is on one device; targets may be spread over several")
    for rank in range(config.pipeline.ranks):
        pipeline = devices_of_rank(config.pipeline, rank)
        for device in all_devices(pipeline):
            check_device(device)
            choose_attention(config.target.attention, device)
    check_backend(config.training.attention, config.pipeline.drafter)
    facts = read_facts(config.target.path)
    shape = resolve(config, facts)
    if (start := config.training.warm_start) and Path(start).is_dir():  # a run that has begun does not need it any more
        check_start(Path(start), shape)
    return facts, shape


def check_device(name: str) -> None:
    """Raises ValueError unless `name` is "cpu" or a CUDA device of this machine, as "cuda:0"."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise ValueError(f"pipeline: device {name!r} is not known; write cpu or cuda:0")
    if kind == "cuda" and int(number or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"pipeline: device {name!r}: this machine has {count} CUDA devices, numbered from 0")


# ---- training --------------------------------------------------------------------------------------------------------


async def train(
    config: Config,
    run: RunDirectory,
    stop: anyio.Event,
    on_step: Callable[[StepMetrics, int], None],
    *,
    imports_s: float = 0.0,
    gang: Gang | None = None,
) -> TrainResult:
    """Trains to the end or to a stop request, resuming from the newest checkpoint. `on_step(metrics, total_steps)` after each step.

    `gang`: the ranks that do so together, of which this is one; rank 0 writes the run's files, others their own under ranks/.
    """
    lap = Lap({"imports": round(imports_s, 3)})
    facts = read_facts(config.target.path)
    with opening.open_data(config, run, vocab_size=facts.vocab_size) as dataset:
        lap("open")
        return await _train_on(dataset, config, run, facts, stop, on_step, lap, gang or Gang())


async def _train_on(
    dataset: TokenDataset,
    config: Config,
    run: RunDirectory,
    facts: TargetFacts,
    stop: anyio.Event,
    on_step: Callable[[StepMetrics, int], None],
    lap: Lap,
    gang: Gang,
) -> TrainResult:
    if gang.rank == 0:
        clean(run.checkpoints)
    pipeline_of_rank = devices_of_rank(config.pipeline, gang.rank)
    config = config.model_copy(update={"pipeline": pipeline_of_rank})
    own = run.of_rank(gang.rank)
    shape = resolve(config, facts)
    lengths = limit_lengths(dataset.lengths, most=config.data.max_length, too_long=config.training.too_long)
    layout = lay_out(lengths, dataset.supervised, training=config.training)
    steps = total_steps(config.training, config.training.epochs * layout.micro_batches)
    lap("plan")
    trainer = _trainer(config, run, shape, steps, gang)
    depends_on = {"config_fingerprint": config_fingerprint(config), "data_fingerprint": dataset.manifest().fingerprint}
    departures = _resume(trainer, run, depends_on, gang.size)
    first = trainer.position
    watched = config.during_training.eval_every is not None and gang.rank == 0
    targets = _Targets(config, shape, full=watched)
    check_padding(targets.replicas[0], config.training, max_length=config.data.max_length, vocab_size=shape.vocab_size)
    watch = Watch(config, run, shape, facts, full=lambda: targets.replicas[FULL]) if watched else None
    lap("model")
    cuda = any(home(device).startswith("cuda") for device in config.pipeline.targets)
    pool = BufferPool(tokens=config.training.tokens_per_batch, pinned=cuda)

    observation, outcome = observe(STAGES, total_steps=steps, **_flops(config, shape, lengths)), Outcome()
    metrics_file = MetricsFile(own.metrics, trainer.step)

    def log(metrics: StepMetrics) -> None:
        metrics = dataclasses.replace(metrics, observed=observation.sample(metrics))
        metrics_file.write(metrics)
        on_step(metrics, steps)

    def save(state: TrainState) -> None:
        if gang.rank == 0:
            save_checkpoint(run.checkpoints, state, depends_on=depends_on, ranks=gang.size)
            real = watch.real if watch else None
            prune(run.checkpoints, keep=config.pipeline.keep_checkpoints, real=real, evaluating=outcome.evaluating)

    work = Work(
        plan=prefetched(_batches(layout, config, shape, first, gang), dataset),
        first=first,
        read=lambda planned: assemble(planned, dataset, lengths=lengths, pool=pool),
        taps=tuple(partial(targets.tap, number) for number in targets.replicas),
        rebuild=targets.rebuild,
        trainer=trainer,
        log=log,
        save=save,
        **_evaluations(watch, trainer.step),
    )
    try:
        await run_pipeline(work, _limits(config, gang), observation, stop, outcome)
    except Exception as error:
        error.add_note(f"micro-batches of this process: {ledger(trainer, outcome)}")
        raise
    finally:
        metrics_file.close()
        write_timeline(own.timeline, observation.clocks.values())
    result = make_result(
        own,
        trainer,
        outcome,
        observation,
        metrics_file,
        anchors_per_row=config.training.anchors_per_row,
        startup_s=lap.seconds,
        departures=departures,
        evaluation=watch.summary(outcome) if watch else None,
    )
    write_json(own.training, dataclasses.asdict(result))
    return result


def _batches(layout: Layout, config: Config, shape: DrafterShape, first: int, gang: Gang) -> Iterator[PlannedBatch]:
    """This rank's micro-batches from number `first` on."""
    batches = plan(
        layout,
        seed=config.seed,
        epochs=config.training.epochs,
        bytes_per_token=batch_bytes(shape, 1, config.target.dtype, teacher=needs_teacher(config.training)),
        position=first,
    )
    if gang.size == 1:
        return batches
    share = config.training.accumulate // gang.size
    return share_of_rank(batches, rank=gang.rank, ranks=gang.size, accumulate=share, first=first)


class _Targets:
    """The target replicas of this rank by number, and the way of their hidden states to the drafter's device."""

    def __init__(self, config: Config, shape: DrafterShape, *, full: bool) -> None:
        """`full`: the first one holds the whole target."""
        self._config, self._shape, self._full = config, shape, full
        self.replicas = {number: self._load(number) for number in range(len(config.pipeline.targets))}
        self._carriers = [Carrier(device, config.pipeline.drafter) for device in config.pipeline.targets]

    def tap(self, number: int, batch: Batch) -> TappedBatch:
        """Hidden states from replica `number`, on the drafter's device."""
        if not batch.plan.rows:
            return TappedBatch(batch=batch, target_hidden=NOTHING)
        return self._carriers[number](lambda: self.replicas[number].tap(batch))

    def rebuild(self, number: int) -> None:
        """Loads replica `number` anew."""
        self.replicas.pop(number, None)  # the new one needs its room
        self.replicas[number] = self._load(number)

    def _load(self, number: int) -> TapReplica:
        config, device = self._config, self._config.pipeline.targets[number]
        return TapReplica(
            config.target.path,
            layer_ids=self._shape.target_layer_ids,
            dtype=config.target.dtype,
            device=device,
            attention=config.target.attention,
            packed=config.training.batching == "packed",
            teacher=needs_teacher(config.training),
            full=self._full and number == FULL,
        )


def _evaluations(watch: Watch | None, step: int) -> dict[str, Any]:
    """The parts of Work that evaluate snapshots of a run that stands at `step`; none where evaluation is off."""
    return {"evaluate": watch.evaluate, "evaluated": watch.real.keys(), "late": watch.late(step)} if watch else {}


def _limits(config: Config, gang: Gang) -> Limits:
    every = config.during_training.eval_every
    return Limits(
        readers=config.pipeline.readers,
        ahead_bytes=config.pipeline.ahead_bytes,
        checkpoint_every=config.training.checkpoint_every,
        evaluate_every=every or sys.maxsize,
        evaluate_s=config.during_training.limit_s if every else 0.0,
        together=gang.size > 1,
        stop_deadline_s=config.pipeline.stop_deadline_s,
        stall_s=config.pipeline.stall_s,
        first_batch_s=config.pipeline.first_batch_s,
        rebuilds=config.pipeline.rebuilds,
    )


def _flops(config: Config, shape: DrafterShape, lengths: np.ndarray) -> dict[str, Any]:
    """What the model FLOP utilisation needs, where the peak of the devices is given."""
    if config.pipeline.peak_tflops is None:
        return {}
    mean = float(lengths.mean()) if len(lengths) else 1.0
    costs = cost(config, shape, read_census(config.target.path), row_tokens=mean, anchors=config.training.anchors_per_row)
    devices = len(all_devices(config.pipeline))
    return {
        "peak_flops": devices * config.pipeline.peak_tflops * 1e12,
        "step_flops": partial(costs.of_step, block_size=shape.block_size),
    }


def _trainer(config: Config, run: RunDirectory, shape: DrafterShape, steps: int, gang: Gang) -> Trainer:
    device = config.pipeline.drafter
    ends = load_ends(config.target.path, dtype="float32", device=device, attention=config.target.attention)
    drafter = new_drafter(shape, config.seed)
    if config.training.warm_start and latest(run.checkpoints) is None:
        drafter.load_state_dict(start_weights(Path(config.training.warm_start), shape), strict=True)
    return Trainer(drafter, ends, config, total_steps=steps, device=device, gang=gang)


def _resume(trainer: Trainer, run: RunDirectory, depends_on: dict[str, Any], ranks: int) -> tuple[str, ...]:
    """Puts the trainer where the newest checkpoint stands; returns what keeps the rest from being bit-identical."""
    path = latest(run.checkpoints)
    if path is None:
        return ()
    state, stored = load_checkpoint(path)
    if stored["depends_on"] != depends_on:
        raise ValueError(f"{path} was made with {stored['depends_on']}, this run has {depends_on}; --fresh starts anew")
    trainer.restore(state)
    now = environment(ranks=ranks)
    changed = tuple(
        f"{key}: {stored['environment'].get(key)} -> {now[key]}" for key in now if stored["environment"].get(key) != now[key]
    )
    for change in changed:
        LOG.warning("resumed with another %s: the rest is not bit-identical to an uninterrupted run", change)
    return changed


# ---- export ----------------------------------------------------------------------------------------------------------


def export(config: Config, run: RunDirectory) -> Path:
    """The newest checkpoint's weights as a drafter that serving engines load."""
    path = latest(run.checkpoints)
    if path is None:
        raise ValueError(f"{run.checkpoints}: no checkpoint to export; train first")
    state, _ = load_checkpoint(path)
    shape = resolve(config, read_facts(config.target.path))
    written = write_export(run.export, state.drafter, shape, target=config.target.path)
    export_formats(config, run)
    return written


def export_formats(config: Config, run: RunDirectory) -> None:
    """The export in the other formats that are asked for, where they are not there or older."""
    if not config.export.speculators:
        return
    ours, other = (place / WEIGHTS for place in (run.export, run.export_speculators))
    if not other.is_file() or other.stat().st_mtime_ns < ours.stat().st_mtime_ns:
        write_speculators(run.export, run.export_speculators, target=config.target.path)
