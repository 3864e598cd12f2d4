"""A snapshot on a borrowed replica: a drafter that knows its text, one that knows nothing, and the replica afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core import preparation
from dflash_core.decoding import snapshots
from dflash_core.decoding.snapshots import SnapshotBench
from dflash_core.modeling.drafter import Drafter, new_drafter
from dflash_core.modeling.target import TapReplica, read_facts
from dflash_core.records import DrafterShape, Evaluation, TrainState
from dflash_core.rundir import open_run
from tests.decoding.texts import LAYERS
from tests.fakes import chats, make_batch, make_config, make_shape, save_target, write_jsonl

SHAPE = make_shape(block_size=8)


def always() -> bool:
    return True


def replica_of(target: Path | str, **how: Any) -> TapReplica:
    settings = {"layer_ids": LAYERS, "dtype": "float32", "device": "cpu", "attention": "auto", "full": True, **how}
    return TapReplica(str(target), **settings)


def state_of(drafter: Drafter) -> TrainState:
    return TrainState(step=7, position=7, weights=dict(drafter.named_parameters()), moments={})


def bench_of(
    root: Path, target: Path, shape: DrafterShape = SHAPE, *, validation: Path | None = None, **sections: Any
) -> SnapshotBench:
    config = make_config(root, target, drafter={"block_size": shape.block_size, "num_layers": shape.num_layers}, **sections)
    return SnapshotBench(config, shape, read_facts(str(target)), validation=validation, date=None)


@pytest.fixture
def known(tmp_path: Path, target_path: Path, overfitted: Any, monkeypatch: pytest.MonkeyPatch) -> SnapshotBench:
    """A bench whose one prompt is the one that `overfitted` knows: 49 tokens, the first of the target, then 6 rounds of 8."""
    monkeypatch.setattr(snapshots, "_drawn_prompts", lambda *_, **__: [(0, overfitted[0])])
    return bench_of(tmp_path, target_path, during_training={"max_new_tokens": 49})


def test_a_perfect_drafter_evaluates_to_the_block_size(known: SnapshotBench, target_path: Path, overfitted: Any) -> None:
    found = known.measure(replica_of(target_path), state_of(overfitted[2]), always)
    assert found is not None
    assert (found.step, found.prompts, found.rounds, found.acceptance_length) == (7, 1, 6, 8.0)
    anchors = 48  # of 49 tokens, each that another one follows; the last ones have fewer to guess
    assert found.blocks <= anchors
    assert found.simulated_on == "decoded texts"
    assert found.seconds > 0


def test_simulated_acceptance_of_a_perfect_drafter_is_bounded_by_the_text(
    tmp_path: Path, target_path: Path, overfitted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every anchor taken: those in the last block have 6, 5, ... 1 tokens left to guess."""
    monkeypatch.setattr(snapshots, "_drawn_prompts", lambda *_, **__: [(0, overfitted[0])])
    training = {"anchors_per_row": 64, "anchors_per_batch": 64}
    bench = bench_of(tmp_path, target_path, training=training, during_training={"max_new_tokens": 49})
    found = bench.measure(replica_of(target_path), state_of(overfitted[2]), always)
    assert found is not None
    assert found.blocks == 48
    assert found.simulated_acceptance_length == pytest.approx(1 + (42 * 7 + 6 + 5 + 4 + 3 + 2 + 1) / 48)


def test_a_perfect_drafter_of_all_variants_evaluates_to_a_token_more(
    tmp_path: Path, target_path: Path, overfitted_variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real and simulated acceptance of 7 slots whose first drafts, too: as a block of 8 that does not."""
    prompt, _, drafter = overfitted_variant
    monkeypatch.setattr(snapshots, "_drawn_prompts", lambda *_, **__: [(0, prompt)])
    training = {"anchors_per_row": 64, "anchors_per_batch": 64}
    bench = bench_of(tmp_path, target_path, drafter.shape, training=training, during_training={"max_new_tokens": 49})
    found = bench.measure(replica_of(target_path), state_of(drafter), always)
    assert found is not None
    assert (found.rounds, found.acceptance_length, found.blocks) == (6, 8.0, 48)
    assert found.simulated_acceptance_length == pytest.approx(1 + (42 * 7 + 6 + 5 + 4 + 3 + 2 + 1) / 48)


def test_a_drafter_that_knows_nothing_is_near_one(known: SnapshotBench, target_path: Path) -> None:
    found = known.measure(replica_of(target_path), state_of(new_drafter(SHAPE, 3)), always)
    assert found is not None
    assert 1.0 <= found.acceptance_length < 1.5
    assert 1.0 <= found.simulated_acceptance_length < 1.5
    assert found.rounds >= 48 / 1.5


def test_the_same_snapshot_gives_the_same_values(known: SnapshotBench, target_path: Path, overfitted: Any) -> None:
    def values(found: Evaluation | None) -> tuple[Any, ...]:
        assert found is not None
        return found.rounds, found.acceptance_length, found.simulated_acceptance_length, found.blocks

    replica, state = replica_of(target_path), state_of(overfitted[2])
    assert values(known.measure(replica, state, always)) == values(known.measure(replica, state, always))


def test_the_replica_taps_the_same_bits_before_and_after(known: SnapshotBench, target_path: Path, overfitted: Any) -> None:
    batch = make_batch([(list(range(4, 60)), [1] * 56), (list(range(9, 40)), [1] * 31)])
    cut, full = replica_of(target_path, full=False), replica_of(target_path)
    wanted = cut.tap(batch).target_hidden
    assert torch.equal(full.tap(batch).target_hidden, wanted)
    weights = {name: tensor.clone() for name, tensor in overfitted[2].named_parameters()}
    known.measure(full, state_of(overfitted[2]), always)
    assert torch.equal(full.tap(batch).target_hidden, wanted)
    assert all(torch.equal(weights[name], tensor) for name, tensor in overfitted[2].named_parameters())


@pytest.mark.parametrize("asked", [0, 1, 3, 7])
def test_it_is_given_up_between_two_blocks(known: SnapshotBench, target_path: Path, overfitted: Any, asked: int) -> None:
    """Asked once before the prompts, once before each of 6 rounds, and once before the row."""
    calls = 0

    def wanted() -> bool:
        nonlocal calls
        calls += 1
        return calls <= asked

    replica = replica_of(target_path)
    assert known.measure(replica, state_of(overfitted[2]), wanted) is None
    assert calls == asked + 1
    assert torch.isfinite(replica.tap(make_batch([([5, 6, 7], [1, 1, 1])])).target_hidden).all()


def test_global_random_numbers_are_left_alone(known: SnapshotBench, target_path: Path) -> None:
    replica, state = replica_of(target_path), state_of(new_drafter(SHAPE, 3))
    before = torch.get_rng_state()
    known.measure(replica, state, always)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_rows_of_the_validation_split_are_measured_as_training_counts(tmp_path: Path, target_path: Path, batching: str) -> None:
    """Their blocks are those that training would draw in its first epoch."""
    sections = {"data": {"validation": 0.4, "max_length": 100}, "training": {"batching": batching, "anchors_per_row": 4}}
    config = make_config(tmp_path, target_path, **sections)
    run = open_run(config)
    manifest = preparation.prepare(config, run)
    assert manifest.ledger["validation_rows"] >= 4
    bench = bench_of(tmp_path, target_path, validation=run.validation, during_training={"num_rows": 3}, **sections)
    found = bench.measure(replica_of(target_path, packed=batching == "packed"), state_of(new_drafter(SHAPE, 3)), always)
    assert found is not None
    assert (found.simulated_on, found.blocks) == ("validation", 3 * 4)


def test_prompts_are_drawn_by_the_seed_and_are_the_same_every_time(tmp_path: Path, target_path: Path) -> None:
    def prompts(seed: int) -> list[Any]:
        bench = bench_of(tmp_path, target_path, evaluation={"seed": seed}, during_training={"num_prompts": 2})
        return [number for number, _, _ in bench._prompts]

    write_jsonl(tmp_path / "prompts.jsonl", [{"turns": [row["messages"][0]["content"]]} for row in chats(40)])
    assert prompts(1) == prompts(1)
    assert len({tuple(prompts(seed)) for seed in range(5)}) > 2
    assert all(len(prompts(seed)) == 2 for seed in range(3))


def test_batches_and_several_turns(tmp_path: Path, target_path: Path) -> None:
    """First turns only; decoded one by one or together the values are the same."""
    write_jsonl(tmp_path / "prompts.jsonl", [{"turns": ["Why?", "And then?"]}, {"turns": ["No"]}, {"turns": ["Tell me more."]}])
    values = set()
    for size in (1, 3):
        bench = bench_of(tmp_path, target_path, evaluation={"batch_size": size}, during_training={"max_new_tokens": 20})
        found = bench.measure(replica_of(target_path), state_of(new_drafter(SHAPE, 3)), always)
        assert found is not None
        values.add((found.prompts, found.rounds, found.acceptance_length))
    assert len(values) == 1
    assert found.prompts == 3


def test_what_cannot_be_measured_is_said_before_training(tmp_path: Path) -> None:
    small = save_target(tmp_path / "small", max_position_embeddings=16)
    data = {"max_length": 16}
    with pytest.raises(ValueError, match=r"during_training: none of 4 prompts leaves room in the target's 16 positions"):
        bench_of(tmp_path, small, data=data)
    windows = {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": True, "sliding_window": 32}
    windowed = save_target(tmp_path / "windowed", **windows)
    with pytest.raises(ValueError, match=r"evaluation\.batch_size 4: the target has sliding windows"):
        bench_of(tmp_path, windowed, evaluation={"batch_size": 8}).check(replica_of(windowed))
    with pytest.raises(
        ValueError,
        match=r"during_training\.eval_every needs decoding; .*evaluation\.block_size 9: the drafter was trained with 8",
    ):
        bench_of(tmp_path, windowed, evaluation={"block_size": 9}).check(replica_of(windowed))
