"""The plan of micro-batches: complete, within its budgets, a pure function, random in order; and their assembly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core.config import TrainingConfig
from dflash_core.data.batches import WINDOW, assemble, count_batches, plan, row_groups
from dflash_core.data.shards import TokenDataset, write_shards
from dflash_core.records import PlannedBatch, TokenRow

TRAINING = TrainingConfig(epochs=3, tokens_per_batch=1000, anchors_per_row=40, anchors_per_batch=200)


def rows(count: int, seed: int = 0, longest: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and supervised tokens of `count` rows, long-tailed as real ones are."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(3 + rng.geometric(1 / 60, count), longest).astype(np.int32)
    supervised = np.maximum(2, (lengths * rng.random(count)).astype(np.int32))
    return lengths, supervised


def whole_plan(
    lengths: np.ndarray, supervised: np.ndarray, *, seed: int = 1, training: TrainingConfig = TRAINING, position: int = 0
) -> list[PlannedBatch]:
    return list(plan(lengths, supervised, seed=seed, training=training, bytes_per_token=24, position=position))


@pytest.mark.parametrize("count", [1, 2, 7, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5])
def test_every_row_is_in_exactly_one_micro_batch_of_an_epoch(count: int) -> None:
    lengths, supervised = rows(count)
    for epoch in range(2):
        groups = row_groups(lengths, supervised, seed=3, epoch=epoch, training=TRAINING)
        assert sorted(row for group in groups for row in group) == list(range(count))
        assert all(groups)


def test_no_rows_no_micro_batches() -> None:
    assert whole_plan(np.zeros(0, np.int32), np.zeros(0, np.int32)) == []


@pytest.mark.parametrize("seed", range(5))
def test_budgets_are_never_exceeded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    training = TrainingConfig(
        epochs=1,
        tokens_per_batch=int(rng.integers(300, 3000)),
        anchors_per_row=int(rng.integers(1, 60)),
        anchors_per_batch=int(rng.integers(60, 400)),
    )
    lengths, supervised = rows(2500, seed)
    for group in row_groups(lengths, supervised, seed=seed, epoch=0, training=training):
        chosen = list(group)
        assert len(group) * lengths[chosen].max() <= training.tokens_per_batch
        # a row of s supervised tokens has at most s - 1 anchors, each followed by a supervised token
        widest = min(int(supervised[chosen].max()) - 1, training.anchors_per_row)
        assert len(group) * widest <= training.anchors_per_batch


def test_micro_batches_are_full_and_little_is_padding() -> None:
    lengths, _ = rows(4000)
    groups = row_groups(lengths, np.full(4000, 2), seed=0, epoch=0, training=TRAINING)
    padded = sum(len(group) * int(lengths[list(group)].max()) for group in groups)
    assert lengths.sum() / padded > 0.9
    assert padded / (len(groups) * TRAINING.tokens_per_batch) > 0.75


def test_a_row_at_the_budget_is_alone() -> None:
    lengths = np.array([1000, 1000, 10, 10], np.int32)
    groups = row_groups(lengths, np.full(4, 2), seed=0, epoch=0, training=TRAINING)
    assert sorted(groups, key=min)[:2] == [(0,), (1,)]
    assert sorted(sorted(groups, key=min)[2]) == [2, 3]


def test_a_wide_row_narrows_its_own_micro_batch_only() -> None:
    lengths = np.array([10] + [20] * 19, np.int32)
    training = TrainingConfig(tokens_per_batch=1000, anchors_per_row=9, anchors_per_batch=20)
    groups = row_groups(lengths, np.array([10] + [2] * 19), seed=0, epoch=0, training=training)
    assert sorted(len(group) for group in groups) == [2, 18]


def test_the_plan_is_a_pure_function_of_its_arguments() -> None:
    lengths, supervised = rows(1500)
    np.random.seed(5)
    first = whole_plan(lengths, supervised)
    np.random.seed(6)
    assert whole_plan(lengths.copy(), supervised.copy()) == first
    assert [b.rows for b in whole_plan(lengths, supervised, seed=2)] != [b.rows for b in first]


def test_epochs_differ_and_numbers_run_on() -> None:
    lengths, supervised = rows(1500)
    batches = whole_plan(lengths, supervised)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert [batch.epoch for batch in batches] == sorted(batch.epoch for batch in batches)
    by_epoch = [[batch.rows for batch in batches if batch.epoch == epoch] for epoch in range(3)]
    assert all(sorted(row for group in groups for row in group) == list(range(1500)) for groups in by_epoch)
    assert by_epoch[0] != by_epoch[1] != by_epoch[2] != by_epoch[0]
    for epoch, groups in enumerate(by_epoch):
        assert groups == row_groups(lengths, supervised, seed=1, epoch=epoch, training=TRAINING)


def test_counting_takes_every_epoch_as_it_is() -> None:
    """Epochs differ in micro-batches where rows differ in length; `enough` ends the counting early."""
    lengths, supervised = rows(20_000)
    training = TRAINING.model_copy(update={"epochs": 3})
    each = [len(row_groups(lengths, supervised, seed=1, epoch=epoch, training=training)) for epoch in range(3)]
    assert len(set(each)) > 1
    assert count_batches(lengths, supervised, seed=1, training=training) == sum(each)
    assert count_batches(lengths, supervised, seed=1, training=training, enough=each[0]) == each[0]


def test_the_plan_from_a_position_is_the_tail_of_the_whole_plan() -> None:
    lengths, supervised = rows(400)
    batches = whole_plan(lengths, supervised)
    for position in range(len(batches) + 2):
        assert whole_plan(lengths, supervised, position=position) == batches[position:]


def test_credit_is_the_bytes_of_the_padded_batch() -> None:
    lengths, supervised = rows(300)
    for batch in whole_plan(lengths, supervised):
        assert batch.credit == 24 * len(batch.rows) * max(int(lengths[row]) for row in batch.rows)


@pytest.mark.parametrize("seed", range(4))
def test_order_is_random_with_respect_to_length(seed: int) -> None:
    lengths, supervised = rows(6000, seed)
    groups = row_groups(lengths, supervised, seed=seed, epoch=0, training=TRAINING)
    mean = np.array([lengths[list(group)].mean() for group in groups])
    ranks = np.argsort(np.argsort(mean, kind="stable"), kind="stable")
    correlation = np.corrcoef(ranks, np.arange(len(groups)))[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(groups)), f"{correlation} of {len(groups)} micro-batches"
    neighbours = np.corrcoef(ranks[:-1], ranks[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(groups)), f"neighbours alike: {neighbours}"


def test_micro_batches_mix_the_whole_file() -> None:
    """Rows that lie together in the file, as those of one source do, are spread over micro-batches and over the epoch."""
    lengths, supervised = rows(4 * WINDOW)
    groups = row_groups(lengths, supervised, seed=0, epoch=0, training=TRAINING)
    order = np.array([row for group in groups for row in group])
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.05
    assert np.median([max(group) - min(group) for group in groups if len(group) >= 4]) > 2 * WINDOW


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenDataset, list[TokenRow]]:
    rng = np.random.default_rng(0)
    lengths, _ = rows(60, longest=90)
    made = [
        TokenRow(id=str(i), input_ids=rng.integers(1, 150_000, n).tolist(), loss_mask=rng.integers(0, 2, n).tolist())
        for i, n in enumerate(lengths)
    ]
    directory = tmp_path_factory.mktemp("rows") / "shards"
    write_shards(directory, made, shard_tokens=700, fingerprint="f" * 64, ingredients={}, ledger={})
    return TokenDataset(directory), made


def test_assembled_batches_equal_a_naive_padding(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    dataset, made = stored
    for planned in whole_plan(dataset.lengths, dataset.supervised):
        batch = assemble(planned, dataset)
        longest = max(len(made[row].input_ids) for row in planned.rows)
        ids = [made[row].input_ids + [0] * (longest - len(made[row].input_ids)) for row in planned.rows]
        mask = [made[row].loss_mask + [0] * (longest - len(made[row].loss_mask)) for row in planned.rows]
        assert batch.plan is planned
        assert (batch.input_ids.dtype, batch.loss_mask.dtype, batch.lengths.dtype) == (torch.int32, torch.uint8, torch.int32)
        assert batch.input_ids.tolist() == ids
        assert batch.loss_mask.tolist() == mask
        assert batch.lengths.tolist() == [len(made[row].input_ids) for row in planned.rows]


def test_assembled_batches_do_not_share_memory_with_the_files(stored: tuple[TokenDataset, list[TokenRow]]) -> None:
    dataset, made = stored
    planned = PlannedBatch(number=0, epoch=0, rows=(5, 5, 2), credit=0)
    first = assemble(planned, dataset)
    first.input_ids.fill_(-1)
    first.loss_mask.fill_(9)
    again = assemble(planned, dataset)
    assert again.input_ids[0, : len(made[5].input_ids)].tolist() == made[5].input_ids
    assert again.input_ids[0].equal(again.input_ids[1])


def test_the_plan_of_a_stored_run_has_the_bytes_of_its_batches(
    stored: tuple[TokenDataset, list[TokenRow]], tmp_path: Path
) -> None:
    dataset, _ = stored
    for planned in whole_plan(dataset.lengths, dataset.supervised):
        assert planned.credit == 24 * assemble(planned, dataset).input_ids.numel()
