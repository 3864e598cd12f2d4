"""The plan of micro-batches: complete, within its budgets, a pure function, random in order, resumable anywhere, fair to ranks."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dflash_core.config import TrainingConfig
from dflash_core.data.plan import epoch_order, lay_out, limit_lengths, order_statistics, plan, share_of_rank
from dflash_core.records import PlannedBatch

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
    layout = lay_out(lengths, supervised, training=training)
    return list(plan(layout, seed=seed, epochs=training.epochs, bytes_per_token=24, position=position))


def one_epoch(lengths: np.ndarray, supervised: np.ndarray, training: TrainingConfig = TRAINING, seed: int = 1) -> list[list[int]]:
    """The row numbers of each micro-batch of the first epoch."""
    training = training.model_copy(update={"epochs": 1})
    return [list(batch.rows) for batch in whole_plan(lengths, supervised, seed=seed, training=training)]


# ---- complete, within its budgets, little padding --------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 400, 3077])
@pytest.mark.parametrize("batching", ["padded", "equal", "packed"])
def test_every_row_is_in_exactly_one_micro_batch_of_each_epoch(count: int, batching: str) -> None:
    lengths, supervised = rows(count)
    batches = whole_plan(lengths, supervised, training=TRAINING.model_copy(update={"batching": batching}))
    for epoch in range(3):
        groups = [batch.rows for batch in batches if batch.epoch == epoch]
        assert sorted(row for group in groups for row in group) == list(range(count))
        assert all(groups)


def test_no_rows_no_micro_batches() -> None:
    assert whole_plan(np.zeros(0, np.int32), np.zeros(0, np.int32)) == []
    assert whole_plan(np.zeros(0, np.int32), np.zeros(0, np.int32), position=5) == []


@pytest.mark.parametrize("seed", range(8))
def test_budgets_are_never_exceeded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    training = TrainingConfig(
        tokens_per_batch=int(rng.integers(300, 3000)),
        anchors_per_row=int(rng.integers(1, 60)),
        anchors_per_batch=int(rng.integers(60, 400)),
    )
    lengths, supervised = rows(2500, seed)
    for group in one_epoch(lengths, supervised, training):
        assert len(group) * lengths[group].max() <= training.tokens_per_batch
        # a row of s supervised tokens has at most s - 1 anchors, each followed by a supervised token
        widest = min(int(supervised[group].max()) - 1, training.anchors_per_row)
        assert len(group) * widest <= training.anchors_per_batch


def long_tail(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as of long conversations: lognormal, median 900, at most 8192."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(900), 0.8, count)), 16, 8192).astype(np.int32)
    return lengths, np.maximum(2, lengths * rng.random(count)).astype(np.int32)


@pytest.mark.parametrize("tokens,anchors", [(16_384, 4096), (60_000, 2**15), (16_384, 2**30)])
def test_little_is_computed_for_nothing(tokens: int, anchors: int) -> None:
    lengths, supervised = long_tail(60_000)
    training = TrainingConfig(tokens_per_batch=tokens, anchors_per_batch=anchors)
    groups = one_epoch(lengths, supervised, training)
    padded = np.array([len(group) * int(lengths[group].max()) for group in groups])
    assert padded.sum() / lengths.sum() < 1.02
    drawn = np.minimum(supervised - 1, training.anchors_per_row)
    blocks = np.array([len(group) * int(drawn[group].max()) for group in groups])
    assert blocks.sum() / drawn.sum() < 1.2
    full = np.maximum(padded / tokens, blocks / anchors)  # of the budget that binds
    assert full.mean() > 0.85
    random = [lengths[chunk] for chunk in np.array_split(np.random.default_rng(1).permutation(len(lengths)), len(lengths) // 30)]
    assert (
        sum(len(part) * int(part.max()) for part in random) / lengths.sum() > 2.5
    )  # the same rows thirty by thirty as they come


def test_a_row_at_the_budget_is_alone() -> None:
    lengths = np.array([1000, 1000, 10, 10], np.int32)
    assert sorted(map(sorted, one_epoch(lengths, np.full(4, 2)))) == [[0], [1], [2, 3]]


def test_a_row_above_both_budgets_is_alone_too() -> None:
    lengths = np.array([5000, 10, 10], np.int32)
    assert sorted(map(sorted, one_epoch(lengths, np.array([4000, 2, 2])))) == [[0], [1, 2]]


def test_a_wide_row_narrows_its_own_micro_batch_only() -> None:
    """One row of many anchors among a thousand of its length with few: the others fill their micro-batches as if it were not there."""
    lengths = np.full(1000, 10, np.int32)
    supervised = np.full(1000, 3)
    supervised[17] = 40
    training = TrainingConfig(tokens_per_batch=1000, anchors_per_row=40, anchors_per_batch=200)
    sizes = Counter(len(group) for group in one_epoch(lengths, supervised, training))
    assert sizes == {100: 9, 99: 1, 1: 1}


def test_rows_without_tokens_weigh_one() -> None:
    lengths = np.array([0, 0, 4], np.int32)
    batches = whole_plan(lengths, np.array([0, 0, 3]))
    assert sorted(row for batch in batches for row in batch.rows) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert all(batch.credit >= 24 for batch in batches)


def test_a_limit_far_above_what_rows_have_costs_nothing() -> None:
    lengths, supervised = rows(300)
    open_end = TRAINING.model_copy(update={"anchors_per_row": 10**12, "anchors_per_batch": 10**12})
    plain = TRAINING.model_copy(update={"anchors_per_row": 300, "anchors_per_batch": 10**6})
    assert one_epoch(lengths, supervised, open_end) == one_epoch(lengths, supervised, plain)


def test_equal_batching_never_mixes_lengths() -> None:
    lengths, supervised = rows(3000)
    training = TRAINING.model_copy(update={"batching": "equal"})
    groups = one_epoch(lengths, supervised, training)
    assert all(len(set(lengths[group].tolist())) == 1 for group in groups)
    assert len(groups) > len(one_epoch(lengths, supervised))
    most = max(len(group) for group in groups)
    assert most > 20


# ---- a pure function, resumable --------------------------------------------------------------------------------------


def test_the_plan_is_a_pure_function_of_its_arguments() -> None:
    lengths, supervised = rows(1500)
    np.random.seed(5)
    first = whole_plan(lengths, supervised)
    np.random.seed(6)
    assert whole_plan(lengths.copy(), supervised.copy()) == first
    assert [b.rows for b in whole_plan(lengths, supervised, seed=2)] != [b.rows for b in first]


def test_a_known_plan_stays_as_it_is() -> None:
    """Checkpoints hold a position in this order: another one would train some rows twice and others not at all."""
    lengths = np.array([5, 9, 2, 9, 5, 7, 2, 9, 5, 7], np.int32)
    training = TrainingConfig(epochs=2, tokens_per_batch=20, anchors_per_row=4, anchors_per_batch=8)
    epochs = [(0, 4), (7, 3), (9, 8), (1, 5), (2, 6)], [(1, 3), (2, 6), (8, 0), (7, 5), (9, 4)]
    assert [batch.rows for batch in whole_plan(lengths, lengths - 1, seed=3, training=training)] == epochs[0] + epochs[1]


def test_epochs_differ_and_numbers_run_on() -> None:
    lengths, supervised = rows(1500)
    batches = whole_plan(lengths, supervised)
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert [batch.epoch for batch in batches] == sorted(batch.epoch for batch in batches)
    by_epoch = [[batch.rows for batch in batches if batch.epoch == epoch] for epoch in range(3)]
    assert by_epoch[0] != by_epoch[1] != by_epoch[2] != by_epoch[0]
    assert len({frozenset(group) for groups in by_epoch for group in groups}) > 2 * len(by_epoch[0])  # other company, too


@pytest.mark.parametrize("seed", range(4))
def test_every_epoch_has_the_micro_batches_that_the_layout_says(seed: int) -> None:
    lengths, supervised = rows(5000, seed)
    layout = lay_out(lengths, supervised, training=TRAINING)
    counts = Counter(batch.epoch for batch in plan(layout, seed=seed, epochs=3, bytes_per_token=1))
    assert counts == dict.fromkeys(range(3), layout.micro_batches)


def test_the_plan_from_a_position_is_the_tail_of_the_whole_plan() -> None:
    lengths, supervised = rows(400)
    batches = whole_plan(lengths, supervised)
    for position in range(len(batches) + 2):
        assert whole_plan(lengths, supervised, position=position) == batches[position:]


def test_resuming_a_late_epoch_looks_at_no_earlier_one() -> None:
    """To walk a million epochs of this size would take hours."""
    lengths, supervised = long_tail(50_000)
    layout = lay_out(lengths, supervised, training=TrainingConfig())
    position = 999_999 * layout.micro_batches + 17
    batch = next(plan(layout, seed=0, epochs=10**6, bytes_per_token=1, position=position))
    assert (batch.number, batch.epoch) == (position, 999_999)
    order, groups = epoch_order(layout, seed=0, epoch=999_999)
    place = groups[17]
    assert batch.rows == tuple(order[layout.starts[place] : layout.starts[place + 1]])


def test_credit_is_the_bytes_of_the_padded_batch() -> None:
    lengths, supervised = rows(300)
    for batch in whole_plan(lengths, supervised):
        assert batch.credit == 24 * len(batch.rows) * max(int(lengths[row]) for row in batch.rows)


# ---- random ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_order_is_random_with_respect_to_length(seed: int) -> None:
    lengths, supervised = rows(6000, seed)
    groups = one_epoch(lengths, supervised, seed=seed)
    mean = np.array([lengths[group].mean() for group in groups])
    ranks = np.argsort(np.argsort(mean, kind="stable"), kind="stable")
    correlation = np.corrcoef(ranks, np.arange(len(groups)))[0, 1]
    assert abs(correlation) < 4 / np.sqrt(len(groups)), f"{correlation} of {len(groups)} micro-batches"
    neighbours = np.corrcoef(ranks[:-1], ranks[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(groups)), f"neighbours alike: {neighbours}"


@pytest.mark.parametrize("seed", range(4))
def test_order_is_as_random_as_a_full_shuffle_of_as_many_pieces(seed: int) -> None:
    lengths, supervised = long_tail(20_000)
    groups = one_epoch(lengths, supervised, TrainingConfig(), seed=seed)
    found = order_statistics(lengths, np.concatenate(groups))
    shuffled = order_statistics(lengths, np.random.default_rng(seed).permutation(20_000))
    spread = 4 / np.sqrt(len(groups))  # four standard deviations of as many independent pieces
    for name, ideal in (("length_correlation", 0), ("row_correlation", 0), ("distance_moved", 1)):
        assert abs(found[name] - ideal) < spread, (name, found, shuffled)
        assert abs(shuffled[name] - ideal) < spread, (name, found, shuffled)


def test_the_statistics_see_an_order_that_is_not_random() -> None:
    lengths, _ = long_tail(5000)
    as_stored = order_statistics(lengths, np.arange(5000))
    assert as_stored["row_correlation"] == pytest.approx(1)
    assert as_stored["distance_moved"] == 0
    by_length = order_statistics(lengths, np.argsort(lengths))
    assert by_length["length_correlation"] == pytest.approx(1, abs=1e-3)
    assert order_statistics(np.array([3, 3, 1]), np.array([2, 0, 1]))["length_correlation"] == pytest.approx(np.sqrt(3) / 2)


def test_company_changes_by_epoch() -> None:
    """Two rows that shared a micro-batch seldom share the next epoch's."""
    lengths, supervised = long_tail(50_000)
    batches = whole_plan(lengths, supervised, training=TrainingConfig(epochs=2))
    group_of = np.empty((2, 50_000), np.int64)
    for batch in batches:
        group_of[batch.epoch, list(batch.rows)] = batch.number
    pairs = np.array([pair for batch in batches if batch.epoch == 0 for pair in pairwise(batch.rows)])
    assert (group_of[1, pairs[:, 0]] == group_of[1, pairs[:, 1]]).mean() < 0.5


def test_micro_batches_mix_the_whole_file() -> None:
    """Rows that lie together in the file, as those of one source do, are spread over micro-batches and over the epoch."""
    lengths, supervised = rows(4096)
    groups = one_epoch(lengths, supervised)
    order = np.array([row for group in groups for row in group])
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.05
    assert np.median([max(group) - min(group) for group in groups if len(group) >= 4]) > 2048


# ---- ranks -----------------------------------------------------------------------------------------------------------


def shares(batches: list[PlannedBatch], ranks: int, accumulate: int, first: int = 0) -> list[list[PlannedBatch]]:
    return [
        list(share_of_rank(iter(batches), rank=rank, ranks=ranks, accumulate=accumulate, first=first)) for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_ranks_train_every_row_once_an_epoch_in_equally_many_micro_batches(ranks: int, accumulate: int) -> None:
    lengths, supervised = rows(1500)
    batches = whole_plan(lengths, supervised)
    parts = shares(batches, ranks, accumulate, first=7)
    assert len({len(part) for part in parts}) == 1
    assert all([batch.number for batch in part] == list(range(7, 7 + len(part))) for part in parts)
    for epoch in range(3):
        trained = [row for part in parts for batch in part if batch.epoch == epoch for row in batch.rows]
        assert sorted(trained) == list(range(1500))
    idle = sum(not batch.rows for part in parts for batch in part)
    assert idle == -len(batches) % ranks


def test_one_rank_takes_the_plan_as_it_is() -> None:
    batches = whole_plan(*rows(500))
    assert shares(batches, 1, 4) == [batches]


@pytest.mark.parametrize("ranks", [2, 4])
def test_another_number_of_ranks_goes_on_with_the_same_data(ranks: int) -> None:
    """Ten steps of one rank, then `ranks` ranks from there: what is trained by each step is the plan's next micro-batches."""
    lengths, supervised = rows(1500)
    batches = whole_plan(lengths, supervised)
    rest = whole_plan(lengths, supervised, position=10)
    parts = shares(rest, ranks, 1)
    for step, trained in enumerate(zip(*parts, strict=True)):
        expected = batches[10 + step * ranks : 10 + (step + 1) * ranks]
        assert sorted(batch.rows for batch in trained if batch.rows) == sorted(batch.rows for batch in expected)


def test_ranks_get_close_token_counts() -> None:
    lengths, supervised = long_tail(20_000)
    training = TrainingConfig(epochs=1)
    batches = whole_plan(lengths, supervised, training=training)
    parts = shares(batches, 4, 4)
    totals = [sum(batch.credit for batch in part) for part in parts]
    assert max(totals) / min(totals) < 1.02
    steps = np.array([[batch.credit for batch in part] for part in parts])[:, : len(parts[0]) // 4 * 4].reshape(4, -1, 4).sum(2)
    dealt = (steps.max(0) / steps.mean(0)).mean()  # what a step waits for its slowest rank
    in_turn = np.array([batch.credit for batch in batches[: steps.shape[1] * 16]]).reshape(-1, 4, 4).sum(1)
    assert dealt < 1.06 < (in_turn.max(1) / in_turn.mean(1)).mean()


# ---- rows that are too long ------------------------------------------------------------------------------------------


def test_rows_above_the_limit_are_an_error_or_cut() -> None:
    lengths = np.array([4, 90, 100, 101, 250], np.int32)
    with pytest.raises(ValueError, match=r"2 of 5 rows .* data.max_length 100, the first is row 3 with 101 tokens; .*too_long"):
        limit_lengths(lengths, most=100, too_long="error")
    assert limit_lengths(lengths, most=100, too_long="cut").tolist() == [4, 90, 100, 100, 100]
    assert limit_lengths(lengths, most=250, too_long="error") is lengths


def test_more_cells_than_sixteen_bits_can_number() -> None:
    lengths = np.arange(1, 70_001, dtype=np.int32)
    training = TrainingConfig(tokens_per_batch=100_000, batching="equal")
    layout = lay_out(lengths, np.full(70_000, 2), training=training)
    assert len(layout.cells) == 70_001
    order, _ = epoch_order(layout, seed=0, epoch=0)
    assert lengths[order].tolist() == list(range(70_000, 0, -1))
