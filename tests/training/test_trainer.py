"""Windows, sums, skips and resume of one rank, on random taps."""

import dataclasses
import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_core.decoding.export import write_export
from dflash_core.modeling.anchors import draw_blocks
from dflash_core.modeling.blocks import block_states
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.loss import block_loss
from dflash_core.modeling.target import TargetEnds, load_ends
from dflash_core.records import StepMetrics, TappedBatch
from dflash_core.training import trainer as trainer_module
from dflash_core.training.trainer import Trainer
from tests.fakes import VOCAB, make_batch, make_config, make_shape, save_target

Row = tuple[list[int], list[int]]
WIDTH = 3 * 32


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TargetEnds:
    path = save_target(tmp_path_factory.mktemp("ends"), initializer_range=0.15)
    return load_ends(str(path), dtype="float32", device="cpu", attention="auto")


@pytest.fixture
def build(ends: TargetEnds, target_dir: Path, tmp_path: Path) -> Any:
    """`build(accumulate=3, ...)`: a trainer whose training section has these changes."""

    def make(*, total_steps: int = 50, **training: Any) -> Trainer:
        training = {"warmup": 0.0, "learning_rate": 1e-2, "max_skipped": 1.0, **training}
        config = make_config(tmp_path, target_dir, training=training, seed=3)
        return Trainer(new_drafter(make_shape(), 0), ends, config, total_steps=total_steps, device="cpu")

    return make


def row(supervised: int, *, seed: int = 0, prompt: int = 4) -> Row:
    rng = random.Random(1000 * supervised + seed)
    return [rng.randrange(4, VOCAB) for _ in range(prompt + supervised)], [0] * prompt + [1] * supervised


def tapped(rows: Sequence[Row], *, number: int = 0, first_row: int = 0, epoch: int = 0) -> TappedBatch:
    """A micro-batch whose taps depend on the row's tokens alone, so that any grouping of rows has the same ones."""
    batch = make_batch(rows, number=number, first_row=first_row, epoch=epoch)
    table = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(9))
    return TappedBatch(batch=batch, target_hidden=table[batch.input_ids.long()].cumsum(1) / 4)


def spoilt(batch: TappedBatch, value: float = math.nan) -> TappedBatch:
    hidden = batch.target_hidden.clone()
    hidden[0, 1, 2] = value
    return TappedBatch(batch=batch.batch, target_hidden=hidden)


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.drafter.named_parameters() if p.grad is not None}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.snapshot().weights


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- windows ---------------------------------------------------------------------------------------------------------

ROWS = [row(n) for n in (3, 60, 11, 27, 4, 45, 8, 33)]


def split(size: int) -> list[TappedBatch]:
    return [tapped(ROWS[i : i + size], number=i // size, first_row=i) for i in range(0, 8, size)]


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_do_not_depend_on_the_split_into_micro_batches(build: Any, size: int) -> None:
    whole, parts = build(accumulate=99, anchors_per_row=6), build(accumulate=99, anchors_per_row=6)
    whole.train(split(8)[0])
    for batch in split(size):
        parts.train(batch)
    expected, found = gradients(whole), gradients(parts)
    assert len(expected) == 25
    for name in expected:
        assert float((expected[name] - found[name]).norm() / expected[name].norm()) < 1e-6, name
    a, b = whole.finish(), parts.finish()
    assert (a.blocks, a.rows, a.tokens, a.counted, a.correct) == (b.blocks, b.rows, b.tokens, b.counted, b.correct)
    assert (a.micro_batches, b.micro_batches) == (1, 8 // size)
    assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-6)
    assert b.gradient_norm == pytest.approx(a.gradient_norm, rel=1e-6)
    moments = parts.snapshot().moments
    for name, value in whole.snapshot().moments.items():
        assert float((moments[name] - value).norm() / value.norm()) < 2e-6, name


def test_metrics_are_the_sums_of_the_window(build: Any) -> None:
    trainer = build(accumulate=2, anchors_per_row=6)
    assert trainer.train(tapped(ROWS[:2])) is None
    metrics = trainer.train(tapped(ROWS[2:5], number=1, first_row=2, epoch=1))
    lengths = [len(ids) for ids, _ in ROWS[:5]]
    assert (metrics.step, metrics.position, metrics.epoch, metrics.micro_batches) == (1, 2, 1, 2)
    assert (metrics.rows, metrics.tokens) == (5, sum(lengths))
    assert metrics.computed_tokens == 2 * max(lengths[:2]) + 3 * max(lengths[2:])
    assert metrics.blocks == 2 + 6 + 6 + 6 + 3  # a supervised token before a supervised token, at most six a row
    assert metrics.counted[0] == 0
    assert metrics.counted[1] == metrics.blocks  # an anchor's next token is always trained
    assert metrics.skipped == {}
    assert metrics.applied
    assert metrics.loss_sum / metrics.weight_sum == pytest.approx(math.log(VOCAB), rel=0.2)
    assert trainer.open_micro_batches == 0


def test_a_step_is_the_written_adamw_on_the_windows_mean(build: Any, ends: TargetEnds) -> None:
    """Two steps of two micro-batches against one graph over the whole window and AdamW written out."""
    settings = {
        "accumulate": 2,
        "clip": 0.05,
        "weight_decay": 0.1,
        "betas": (0.8, 0.9),
        "learning_rate": 0.01,
        "optimizer": "adamw",
        "schedule": "cosine",
    }
    trainer, reference = build(total_steps=10, **settings), new_drafter(make_shape(), 0)
    first = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    for step in range(2):
        window = [tapped(ROWS[4 * step + 2 * i :][:2], number=2 * step + i, first_row=4 * step + 2 * i) for i in range(2)]
        for batch in window:
            metrics = trainer.train(batch)
        loss, weight = torch.zeros(()), 0.0
        for batch in window:
            blocks = draw_blocks(batch.batch, block_size=4, mask_token_id=3, num_anchors=4, gamma=4.0, seed=3)
            states = block_states(reference, ends.embed, reference.context(batch.target_hidden), blocks)
            sums = block_loss(states, blocks, ends.head, terms={"ce": 1.0})
            loss, weight = loss + sums.loss_sum, weight + float(sums.weight_sum)
        reference.zero_grad()
        (loss / weight).backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in reference.parameters()))
        assert metrics.gradient_norm == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05
        rate = 0.01 * 0.5 * (1 + math.cos(math.pi * step / 10))
        assert metrics.learning_rate == pytest.approx(rate)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                gradient = p.grad * 0.05 / (norm + 1e-6)
                first[name] = 0.8 * first[name] + 0.2 * gradient
                second[name] = 0.9 * second[name] + 0.1 * gradient**2
                mean, square = first[name] / (1 - 0.8 ** (step + 1)), second[name] / (1 - 0.9 ** (step + 1))
                p -= rate * 0.1 * p + rate * mean / (square.sqrt() + 1e-8)
        for name, p in reference.named_parameters():
            # Adam's first steps are the sign of the gradient, so single values near zero may differ
            assert float((weights(trainer)[name] - p.detach()).norm()) < 1e-3 * rate * math.sqrt(p.numel()), name


def test_terms_against_the_target_read_its_state_one_token_before_the_label(build: Any, ends: TargetEnds) -> None:
    """The loss of a step against a loop over the slots: q from the drafter, p from the target's last state at a + k - 1."""
    trainer = build(loss={"kl": 1.0, "ce": 0.5}, loss_decay_gamma=3.0)
    plain = tapped(ROWS[:2])
    last = torch.randn(*plain.batch.input_ids.shape, 32, generator=torch.Generator().manual_seed(4))
    metrics = trainer.train(TappedBatch(batch=plain.batch, target_hidden=plain.target_hidden, last_hidden=last))
    reference = new_drafter(make_shape(), 0)
    blocks = draw_blocks(plain.batch, block_size=4, mask_token_id=3, num_anchors=4, gamma=3.0, seed=3)
    with torch.no_grad():
        states = block_states(reference, ends.embed, reference.context(plain.target_hidden), blocks)
        loss = 0.0
        for b, j, k in (blocks.weights > 0).nonzero().tolist():
            log_q = ends.head(states[b, j, k]).log_softmax(-1)
            log_p = ends.head(last[b, int(blocks.anchor_positions[b, j]) + k - 1]).log_softmax(-1)
            term = (log_p.exp() * (log_p - log_q)).sum() - 0.5 * log_q[blocks.labels[b, j, k]]
            loss += float(blocks.weights[b, j, k] * term)
    assert metrics.loss_sum == pytest.approx(loss, rel=1e-5)
    assert metrics.weight_sum == pytest.approx(float(blocks.weights.sum()))


def test_a_slot_more_is_trained_where_the_anchor_drafts(ends: TargetEnds, target_dir: Path, tmp_path: Path) -> None:
    """Slot k against the token at a + k + 1 and the target's state at a + k."""
    shape = make_shape(sample_from_anchor=True)
    config = make_config(tmp_path, target_dir, training={"loss": {"kl": 1.0, "ce": 0.5}, "loss_decay_gamma": 3.0}, seed=3)
    trainer = Trainer(new_drafter(shape, 0), ends, config, total_steps=9, device="cpu")
    plain = tapped(ROWS[:2])
    last = torch.randn(*plain.batch.input_ids.shape, 32, generator=torch.Generator().manual_seed(4))
    metrics = trainer.train(TappedBatch(batch=plain.batch, target_hidden=plain.target_hidden, last_hidden=last))
    assert metrics is not None
    assert metrics.counted[0] == metrics.blocks >= metrics.counted[1] >= metrics.counted[3] > 0
    reference, loss, accepted = new_drafter(shape, 0), 0.0, 0
    blocks = draw_blocks(plain.batch, block_size=4, mask_token_id=3, num_anchors=4, gamma=3.0, seed=3)
    with torch.no_grad():
        states = block_states(reference, ends.embed, reference.context(plain.target_hidden), blocks)
        for b, j in blocks.block_valid.nonzero().tolist():
            ids, mask = ROWS[b]
            anchor, right = int(blocks.anchor_positions[b, j]), True
            for k in range(4):
                place = anchor + k + 1
                if place >= len(ids) or not mask[place]:
                    break
                log_q, log_p = ends.head(states[b, j, k]).log_softmax(-1), ends.head(last[b, place - 1]).log_softmax(-1)
                term = (log_p.exp() * (log_p - log_q)).sum() - 0.5 * log_q[ids[place]]
                loss += math.exp(-k / 3) * float(term)
                right = right and int(log_q.argmax()) == ids[place]
                accepted += right
    assert metrics.loss_sum == pytest.approx(loss, rel=1e-5)
    assert metrics.accepted_sum == accepted
    assert trainer.quality == pytest.approx(1 + accepted / metrics.blocks)


@pytest.mark.parametrize("weights", ["dpace", "none"])
def test_other_slot_weights(build: Any, weights: str) -> None:
    batch = tapped(ROWS[:3])
    decay, other = build(), build(loss_weights=weights)
    a, b = decay.train(batch), other.train(batch)
    assert a.counted == b.counted
    if weights == "none":
        assert b.weight_sum == sum(b.counted)
    else:  # a slot's weight is at least what reaching it alone would give, (1 + 1/V) / 2 a slot
        assert b.weight_sum > sum(0.5**k * count for k, count in enumerate(b.counted))
    assert all(torch.isfinite(value).all() for value in other.snapshot().weights.values())


def test_weights_move_at_a_small_rate_though_products_are_bfloat16(build: Any, ends: TargetEnds, tmp_path: Path) -> None:
    """CASES E9: weights and moments stay in float32, where a step of 1e-4 is not rounded away; the export alone is bfloat16."""
    trainer, resumed = (build(autocast="bfloat16", learning_rate=1e-4, total_steps=200) for _ in range(2))
    batches = [tapped([row(20, seed=i), row(30, seed=i + 9)], number=i) for i in range(8)]
    for number in range(200):
        trainer.train(batches[number % 8])
        if number == 100:
            resumed.restore(trainer.snapshot())
            trainer = resumed
    state = trainer.snapshot()
    norms = torch.cat([weight for name, weight in state.weights.items() if "norm" in name])
    assert float((norms != 1).float().mean()) > 0.95
    assert {tensor.dtype for tensor in (*state.weights.values(), *state.moments.values())} == {torch.float32}
    write_export(tmp_path / "export", state.weights, trainer.drafter.shape, target="t")
    assert {tensor.dtype for tensor in load_file(tmp_path / "export" / "model.safetensors").values()} == {torch.bfloat16}


def test_training_lowers_the_loss(build: Any) -> None:
    trainer = build(total_steps=30)
    batch = tapped([row(12)])
    losses = [m.loss_sum / m.weight_sum for m in (trainer.train(batch) for _ in range(30))]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.done


def test_a_last_window_may_be_shorter(build: Any) -> None:
    trainer = build(accumulate=3)
    for number in range(4):
        trainer.train(tapped([row(9)], number=number))
    assert trainer.open_micro_batches == 1
    metrics = trainer.finish()
    assert (metrics.step, metrics.position, metrics.micro_batches) == (2, 4, 1)
    assert trainer.finish() is None


# ---- skipping --------------------------------------------------------------------------------------------------------

WITHOUT_ANCHOR: Row = ([5, 6, 7, 8], [0, 1, 0, 1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_taps_skip_their_micro_batch_alone(build: Any, value: float) -> None:
    good, mixed = build(accumulate=2), build(accumulate=3)
    good.train(tapped([row(9)]))
    good.train(tapped([row(20)], number=1, first_row=1))
    mixed.train(tapped([row(9)]))
    mixed.train(spoilt(tapped([row(15)], number=1, first_row=5), value))
    metrics = mixed.train(tapped([row(20)], number=2, first_row=1))
    assert equal(weights(good), weights(mixed))
    assert metrics.skipped == {"target produced non-finite hidden states": 1}
    assert (metrics.micro_batches, metrics.rows, metrics.applied) == (3, 2, True)
    assert mixed.counters["applied"] == 2
    assert mixed.counters["skipped: target produced non-finite hidden states"] == 1


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
def test_a_window_in_which_every_micro_batch_is_bad_is_no_step_but_counts_as_one(build: Any, autocast: str) -> None:
    trainer = build(accumulate=2, autocast=autocast)
    trainer.train(tapped([row(9)]))
    trainer.train(tapped([row(11)], number=1, first_row=1))
    before = trainer.snapshot()
    trainer.train(spoilt(tapped([row(15)], number=2, first_row=2)))
    metrics = trainer.train(spoilt(tapped([row(15), row(8)], number=3, first_row=3)))
    assert (metrics.step, metrics.applied, metrics.rows, metrics.weight_sum) == (2, False, 0, 0.0)
    assert equal(weights(trainer), before.weights)
    assert equal(trainer.snapshot().moments, before.moments)
    assert trainer.counters["steps not applied"] == 1
    assert trainer.train(tapped([row(9)], number=4)) is None
    assert trainer.train(tapped([row(9)], number=5)).applied


def test_a_micro_batch_without_anchors_changes_nothing(build: Any) -> None:
    good, mixed = build(accumulate=1), build(accumulate=2)
    good.train(tapped([row(9)]))
    mixed.train(tapped([WITHOUT_ANCHOR], first_row=7))
    metrics = mixed.train(tapped([row(9)], number=1))
    assert equal(weights(good), weights(mixed))
    assert equal(good.snapshot().moments, mixed.snapshot().moments)
    assert metrics.skipped == {"no anchor": 1}


def test_windows_without_anchors_are_no_bad_gradients(build: Any) -> None:
    trainer = build()
    before = weights(trainer)
    for number in range(5):
        metrics = trainer.train(tapped([WITHOUT_ANCHOR], number=number))
        assert not metrics.applied
    assert equal(before, weights(trainer))
    assert trainer.snapshot().moments == {}
    assert trainer.train(tapped([row(9)], number=5)).applied


def poison(trainer: Trainer, on: list[bool]) -> None:
    """Gradients of one weight become infinite while `on[0]`."""
    weight = trainer.drafter.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * math.inf if on[0] else gradient)


def test_a_bad_gradient_skips_the_step(build: Any) -> None:
    trainer, on = build(), [False]
    poison(trainer, on)
    trainer.train(tapped([row(9)]))
    before = trainer.snapshot()
    on[0] = True
    metrics: StepMetrics = trainer.train(tapped([row(11)], number=1))
    after = trainer.snapshot()
    assert not metrics.applied
    assert not math.isfinite(metrics.gradient_norm)
    assert equal(before.weights, after.weights)
    assert equal(before.moments, after.moments)
    assert (after.step, after.position) == (2, 2)
    assert after.counters["steps not applied"] == 1
    on[0] = False
    assert trainer.train(tapped([row(9)], number=2)).applied
    assert all(torch.isfinite(value).all() for value in weights(trainer).values())


def test_three_bad_gradients_in_a_row_fail(build: Any) -> None:
    trainer, on = build(), [True]
    poison(trainer, on)
    number = iter(range(100))

    def step() -> None:
        trainer.train(tapped([row(9)], number=next(number)))

    step()
    step()
    on[0] = False
    step()
    on[0] = True
    step()
    step()
    with pytest.raises(ValueError, match="5 of 6 optimizer steps had no finite gradient, 3 in a row"):
        step()


def test_too_many_skipped_micro_batches_fail(build: Any) -> None:
    trainer = build(max_skipped=0.25, accumulate=4)
    good, bad = tapped([row(9)]), spoilt(tapped([row(9)]))
    for _ in range(trainer_module.MIN_JUDGED // 4):
        trainer.train(bad)
        for _ in range(3):
            trainer.train(good)
    with pytest.raises(ValueError, match=r"6 of 21 micro-batches were skipped \(training.max_skipped 25%\).*non-finite hidden"):
        trainer.train(bad)


def test_three_bad_micro_batches_in_a_row_fail(build: Any) -> None:
    trainer = build(accumulate=9)
    good, bad, idle = tapped([row(9)]), spoilt(tapped([row(9)])), tapped([WITHOUT_ANCHOR])
    for batch in (bad, bad, good, bad, idle, bad):
        trainer.train(batch)
    with pytest.raises(ValueError, match=r"3 micro-batches in a row could not be trained; the last, number 0: target produced"):
        trainer.train(bad)


def test_too_many_bad_gradients_fail_though_never_three_in_a_row(build: Any) -> None:
    trainer, on = build(max_skipped=0.2), [False]
    poison(trainer, on)
    for step in range(1, trainer_module.MIN_JUDGED):
        on[0] = step % 4 == 0
        trainer.train(tapped([row(9)], number=step))
    on[0] = True
    with pytest.raises(ValueError, match=r"5 of 20 optimizer steps had no finite gradient, 1 in a row \(limits: .* 20%"):
        trainer.train(tapped([row(9)], number=20))


# ---- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """A device that has room for so many rows, in the forward or in the backward pass of one weight."""

    def __init__(self, trainer: Trainer, *, rows: int, backward: bool) -> None:
        self.rows, self.seen = rows, 0
        layer = trainer.drafter.layers[0].mlp.up_proj
        layer.register_forward_pre_hook(lambda module, inputs: self._forward(inputs[0].shape[0], backward))
        if backward:
            layer.weight.register_hook(lambda gradient: self._check())

    def _forward(self, rows: int, backward: bool) -> None:
        self.seen = rows
        if not backward:
            self._check()

    def _check(self) -> None:
        if self.seen > self.rows:
            raise torch.OutOfMemoryError(f"no room for {self.seen} rows")


@pytest.mark.parametrize("backward", [False, True])
def test_a_micro_batch_too_large_for_the_memory_is_trained_in_halves(build: Any, backward: bool) -> None:
    """In the middle of a window, with gradients of earlier micro-batches there and half of a backward pass done."""
    plain, short = build(accumulate=3), build(accumulate=3)
    batches = [tapped(ROWS[i : i + n], number=k, first_row=i) for k, (i, n) in enumerate([(0, 2), (2, 4), (6, 2)])]
    Memory(short, rows=2, backward=backward)
    for batch in batches:
        a, b = plain.train(batch), short.train(batch)
    assert (a.rows, a.tokens, a.blocks, a.counted, a.micro_batches) == (b.rows, b.tokens, b.blocks, b.counted, b.micro_batches)
    assert b.skipped == {}
    assert b.gradient_norm == pytest.approx(a.gradient_norm, rel=1e-6)
    assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-6)
    moments = short.snapshot().moments
    for name, value in plain.snapshot().moments.items():
        assert float((moments[name] - value).norm() / value.norm()) < 2e-6, name
    assert plain.departures == ()
    assert short.departures == ("split: drafter: 1",)


@pytest.mark.parametrize(
    ("rows", "words"), [(4, "micro-batch 7 of 4 rows x 49 tokens"), (1, "micro-batch 7 of 1 rows x 31 tokens")]
)
def test_a_micro_batch_that_fits_in_no_way_fails_with_its_name(build: Any, rows: int, words: str) -> None:
    trainer = build()
    Memory(trainer, rows=0, backward=False)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train(tapped(ROWS[2 : 2 + rows] if rows > 1 else [row(27)], number=7))
    assert words in caught.value.__notes__[0]
    assert "out of memory in the drafter" in caught.value.__notes__[0]
    assert "lower training.tokens_per_batch" in caught.value.__notes__[0]


def test_an_error_other_than_memory_is_not_tried_again(build: Any) -> None:
    trainer, calls = build(), []

    def fail(module: Any, inputs: Any) -> None:
        calls.append(1)
        raise RuntimeError("something else")

    trainer.drafter.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="something else"):
        trainer.train(tapped(ROWS))
    assert calls == [1]


def test_taps_split_by_a_target_are_a_departure_that_checkpoints_keep(build: Any) -> None:
    trainer, resumed = build(), build()
    trainer.train(dataclasses.replace(tapped([row(9)]), split=True))
    trainer.train(spoilt(tapped([row(9)], number=1)))
    trainer.train(tapped([WITHOUT_ANCHOR], number=2))
    resumed.restore(trainer.snapshot())
    assert resumed.departures == ("skipped: target produced non-finite hidden states: 1", "split: target: 1")


# ---- resume ----------------------------------------------------------------------------------------------------------


def stream(count: int) -> list[TappedBatch]:
    return [
        tapped([row(5 + 3 * (i % 7), seed=i), row(30, seed=i)], number=i, first_row=2 * i, epoch=i // 8) for i in range(count)
    ]


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "muon", "ema": 0.9}])
def test_restored_training_goes_on_bit_by_bit(build: Any, optimizer: dict[str, Any]) -> None:
    straight, before, after = (build(accumulate=2, total_steps=12, **optimizer) for _ in range(3))
    batches = stream(24)
    expected = [m for m in map(straight.train, batches) if m]
    for batch in batches[:11]:  # the eleventh stays in an open window and is trained again
        before.train(batch)
    state = before.snapshot()
    assert (state.step, state.position) == (5, 10)
    after.restore(state)
    found = [m for m in map(after.train, batches[state.position :]) if m]
    assert [(m.step, m.position, m.learning_rate, m.loss_sum, m.gradient_norm) for m in found] == [
        (m.step, m.position, m.learning_rate, m.loss_sum, m.gradient_norm) for m in expected[5:]
    ]
    a, b = straight.snapshot(), after.snapshot()
    assert equal(a.weights, b.weights)
    assert equal(a.moments, b.moments)
    assert equal(a.drafter, b.drafter)
    assert (a.average is None) == (not optimizer)
    assert a.counters == b.counters


def test_a_snapshot_drafts_with_the_mean_of_the_weights(build: Any) -> None:
    plain, averaged = build(), build(ema=0.5)
    batches = stream(2)
    for trainer in (plain, averaged):
        trainer.train(batches[0])
    first = plain.snapshot()
    for trainer in (plain, averaged):
        trainer.train(batches[1])
    state, start = averaged.snapshot(), weights(build())
    assert equal(state.weights, weights(plain))  # training itself does not know of it
    for name, mean in state.drafter.items():
        by_hand = 0.25 * (2 / 11 * start[name] + 9 / 11 * first.weights[name]) + 0.75 * state.weights[name]
        assert torch.allclose(mean, by_hand, atol=1e-6), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_compiled_training_is_eager_training(build: Any) -> None:
    eager, compiled = build(), build(compile=True)
    for batch in stream(4):
        a, b = eager.train(batch), compiled.train(batch)
        assert b.loss_sum == pytest.approx(a.loss_sum, rel=1e-4)
        assert b.gradient_norm == pytest.approx(a.gradient_norm, rel=1e-3)
    assert compiled.snapshot().weights.keys() == eager.snapshot().weights.keys()


def test_the_bias_correction_counts_applied_steps_only(build: Any) -> None:
    straight, resumed, on = build(), build(), [False]
    poison(straight, on)
    batches = stream(6)
    for i, batch in enumerate(batches[:3]):
        on[0] = i == 1
        straight.train(batch)
    resumed.restore(straight.snapshot())
    on[0] = False
    for batch in batches[3:]:
        straight.train(batch)
        resumed.train(batch)
    assert equal(weights(straight), weights(resumed))


def test_a_snapshot_is_private(build: Any) -> None:
    trainer = build()
    trainer.train(stream(1)[0])
    state = trainer.snapshot()
    kept = {name: value.clone() for name, value in {**state.weights, **state.moments}.items()}
    trainer.train(tapped([row(20)], number=1))
    assert equal(kept, {**state.weights, **state.moments})
    assert not equal(state.weights, weights(trainer))
