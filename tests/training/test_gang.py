"""Ranks as threads: one step of the gang is the step that one trainer makes of the same micro-batches."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dflash_core.config import PipelineConfig
from dflash_core.data.plan import share_of_rank
from dflash_core.devices import devices_of_rank
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TargetEnds, load_ends
from dflash_core.records import Batch, PlannedBatch, StepMetrics, TappedBatch, TrainState
from dflash_core.training.gang import Gang
from dflash_core.training.trainer import Trainer
from tests.fakes import make_config, make_shape, save_target
from tests.training.test_trainer import WITHOUT_ANCHOR, Row, row, spoilt, tapped

NOTHING = torch.zeros(0)
Rank = tuple[Trainer, list[StepMetrics], TrainState]


class Meeting:
    """Sums over threads: all wait for the last one, and all get the same tensor."""

    def __init__(self, size: int) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(size, timeout=20)

    def add(self, rank: int, values: torch.Tensor) -> None:
        self._tensors[rank] = values.clone()
        self._barrier.wait()
        values.copy_(sum(self._tensors[rank] for rank in sorted(self._tensors)))  # type: ignore[arg-type]
        self._barrier.wait()


class ThreadGang(Gang):
    """A gang whose ranks are threads of this process."""

    def __init__(self, meeting: Meeting, **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "_meeting", meeting)

    def add(self, values: torch.Tensor) -> None:
        if self.size > 1:
            self._meeting.add(self.rank, values)  # type: ignore[attr-defined]

    def spread(self, tensor: torch.Tensor, owner: int) -> None:
        if self.rank != owner:
            tensor.zero_()
        self.add(tensor)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TargetEnds:
    path = save_target(tmp_path_factory.mktemp("ends"), initializer_range=0.15)
    return load_ends(str(path), dtype="float32", device="cpu", attention="auto")


ROWS: list[list[Row]] = [[row(5 + 7 * (i % 5), seed=i), row(12 + i, seed=50 + i)] for i in range(16)]
ROWS[3] = [WITHOUT_ANCHOR]
PLANS = [PlannedBatch(number=i, epoch=0, rows=(2 * i, 2 * i + 1)[: len(ROWS[i])], credit=100 + 37 * (i % 6)) for i in range(16)]


def read_and_tap(plan: PlannedBatch, whole: PlannedBatch | None) -> TappedBatch:
    if whole is None:
        return TappedBatch(batch=Batch(plan=plan, input_ids=NOTHING, loss_mask=NOTHING, lengths=NOTHING), target_hidden=NOTHING)
    found = tapped(ROWS[whole.number], number=plan.number, first_row=whole.rows[0])
    return spoilt(found) if whole.number == 6 else found


@pytest.fixture
def run(ends: TargetEnds, tmp_path: Any, target_dir: Any) -> Callable[..., list[Rank]]:
    """`run(ranks, count)`: what each rank has after the first `count` micro-batches, six a step; `start`: the state it resumes from."""

    def train(
        ranks: int, count: int, *, stop_at: tuple[int, int] | None = None, start: TrainState | None = None, **changes: Any
    ) -> list[Rank]:
        training = {"accumulate": 6, "anchors_per_row": 6, "learning_rate": 1e-2, "warmup": 0.0, "max_skipped": 1.0, **changes}
        config = make_config(tmp_path, target_dir, training=training, seed=3)
        meeting, results = Meeting(ranks), {}
        whole = {plan.rows: plan for plan in PLANS}

        def work(rank: int) -> None:
            stopped, mine = threading.Event(), []
            gang = ThreadGang(meeting, rank=rank, size=ranks, agree=stopped.set, asked=lambda: stop_at == (rank, len(mine)))
            trainer = Trainer(new_drafter(make_shape(), 0), ends, config, total_steps=9, device="cpu", gang=gang)
            if start is not None:
                trainer.restore(start)
            first = trainer.position
            plans = iter(PLANS[first:count])
            shares = plans if ranks == 1 else share_of_rank(plans, rank=rank, ranks=ranks, accumulate=6 // ranks, first=first)
            for plan in shares:
                metrics = trainer.train(read_and_tap(plan, whole.get(plan.rows)))
                mine += [metrics] if metrics else []
                if stopped.is_set():
                    break
            last = None if stopped.is_set() else trainer.finish()
            results[rank] = trainer, [*mine, last] if last else mine, trainer.snapshot()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(ranks)]

    return train


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("count", [6, 12, 16, 13])
def test_a_gangs_steps_are_those_of_one_trainer(run: Any, ranks: int, count: int) -> None:
    """16 and 13 end within a step, so that some ranks get fewer rows than others, or none."""
    ((alone, wanted, _),) = run(1, count)
    gang = run(ranks, count)
    for trainer, found, _ in gang:
        assert [(m.step, m.position, m.micro_batches, m.rows, m.tokens, m.blocks, m.counted, m.skipped) for m in found] == [
            (m.step, m.position, m.micro_batches, m.rows, m.tokens, m.blocks, m.counted, m.skipped) for m in wanted
        ]
        first, second = found[0], wanted[0]  # before any step, so that only the order of the sums differs
        assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-6)
        assert first.loss_sum == pytest.approx(second.loss_sum, rel=1e-6)
        assert [m.loss_sum for m in found] == pytest.approx([m.loss_sum for m in wanted], rel=1e-3)
        assert trainer.position == count
        assert trainer.counters == alone.counters
        stored = gang[0][2].weights
        assert all(torch.equal(stored[name], value) for name, value in trainer.drafter.named_parameters())
    issued = sum(sum(trainer.ledger.values()) for trainer, _, _ in gang)
    idle = sum(trainer.ledger["skipped: no rows"] for trainer, _, _ in gang)
    assert issued - idle == count


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_first_moments_of_a_gang_are_those_of_one_trainer(run: Any, optimizer: str) -> None:
    """After one step they are a tenth or a twentieth of the clipped gradient."""
    ((_, _, alone),) = run(1, 6, optimizer=optimizer)
    for ranks in (2, 3):
        (_, _, found), *others = run(ranks, 6, optimizer=optimizer)
        assert found.moments.keys() == alone.moments.keys()
        for name, value in found.moments.items():
            assert float((value - alone.moments[name]).norm() / alone.moments[name].norm()) < 2e-6, name
        assert all((state.weights, state.moments) == ({}, {}) for _, _, state in others)  # rank 0 writes


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_are_shared_out_and_come_back(run: Any, optimizer: str) -> None:
    """Each rank keeps those of its own parameters; a gang goes on from what another number of ranks has stored, mean included."""
    changes = {"optimizer": optimizer, "ema": 0.9}
    whole = run(2, 16, **changes)[0][2]
    gang = run(2, 6, **changes)
    kept = [{name for name, value in trainer.drafter.named_parameters() if moments_of(trainer, value)} for trainer, _, _ in gang]
    assert kept[0] | kept[1] == {name for name, _ in gang[0][0].drafter.named_parameters()}
    assert not kept[0] & kept[1]
    sizes = [sum(gang[0][0].drafter.get_parameter(name).numel() for name in names) for names in kept]
    assert abs(sizes[0] - sizes[1]) < 0.1 * sum(sizes)
    resumed = run(2, 16, start=gang[0][2], **changes)[0][2]
    for part in ("weights", "moments", "average"):
        assert getattr(resumed, part).keys() == getattr(whole, part).keys()
        assert all(torch.equal(getattr(resumed, part)[name], value) for name, value in getattr(whole, part).items()), part
    (_, _, alone) = run(1, 16, start=gang[0][2], **changes)[0]
    three = run(3, 16, start=gang[0][2], **changes)[0][2]
    for name, value in alone.drafter.items():
        assert float((three.drafter[name] - value).norm() / value.norm()) < 1e-3, name


def moments_of(trainer: Trainer, parameter: torch.Tensor) -> bool:
    return any(parameter in optimizer.state for optimizer in trainer._optimizers)


def test_a_request_to_one_rank_stops_all_after_the_same_step(run: Any) -> None:
    gang = run(3, 16, stop_at=(1, 0))
    assert [trainer.step for trainer, _, _ in gang] == [1, 1, 1]
    assert [trainer.open_micro_batches for trainer, _, _ in gang] == [0, 0, 0]
    assert {trainer.position for trainer, _, _ in gang} == {6}


def test_each_rank_has_the_next_devices() -> None:
    section = PipelineConfig(targets=("cuda:0", "cuda:1"), drafter="cuda:2", ranks=2)
    second = devices_of_rank(section, 1)
    assert (second.targets, second.drafter) == (("cuda:3", "cuda:4"), "cuda:5")
    assert devices_of_rank(section, 0) == section
    shared = devices_of_rank(PipelineConfig(targets=("cuda:0",), drafter="cuda:0"), 3)
    assert (shared.targets, shared.drafter) == (("cuda:3",), "cuda:3")
    cpu = devices_of_rank(PipelineConfig(targets=("cpu", "cpu")), 2)
    assert (cpu.targets, cpu.drafter) == (("cpu", "cpu"), "cpu")


def test_ranks_that_cannot_share_a_step_evenly_are_refused(tmp_path: Any, target_dir: Any) -> None:
    with pytest.raises(ValueError, match=r"accumulate 6 is no multiple of pipeline\.ranks 4"):
        make_config(tmp_path, target_dir, training={"accumulate": 6}, pipeline={"ranks": 4})
