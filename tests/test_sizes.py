"""What follows from config and target: golden taps and decay, sizes, and what does not fit and how it says so."""

import math
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import Config
from dflash_core.records import TargetFacts
from dflash_core.sizes import batch_bytes, default_target_layer_ids, loss_gamma, needs_teacher, paper_gamma, resolve, total_steps
from tests.fakes import IM_END, MASK, make_config

FACTS = TargetFacts(
    num_layers=36,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=300,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=512,
    eos_ids=(IM_END, 5),
    pad_ids=(0,),
    bos_ids=(7,),
)


def config(tmp_path: Path, **sections: Any) -> Config:
    return make_config(tmp_path, "target", **sections)


def with_layers(layers: int) -> TargetFacts:
    return TargetFacts(**{**vars(FACTS), "num_layers": layers})


GOLDEN_TAPS = {
    (12, 5): [1, 3, 5, 7, 9],
    (16, 5): [1, 4, 7, 10, 13],
    (22, 5): [1, 6, 10, 14, 19],
    (24, 5): [1, 6, 11, 16, 21],
    (26, 5): [1, 6, 12, 18, 23],
    (28, 5): [1, 7, 13, 19, 25],
    (30, 5): [1, 8, 14, 20, 27],
    (32, 5): [1, 8, 15, 22, 29],
    (36, 5): [1, 9, 17, 25, 33],
    (40, 5): [1, 10, 19, 28, 37],
    (48, 5): [1, 12, 23, 34, 45],
    (61, 5): [1, 15, 30, 44, 58],
    (64, 5): [1, 16, 31, 46, 61],
    (94, 5): [1, 24, 46, 68, 91],
    (40, 8): [1, 6, 11, 16, 22, 27, 32, 37],
    (36, 3): [1, 17, 33],
    (36, 2): [1, 33],
    (36, 1): [18],
}


@pytest.mark.parametrize(("layers", "taps"), GOLDEN_TAPS)
def test_default_taps_are_the_reference_ones(layers: int, taps: int) -> None:
    assert list(default_target_layer_ids(layers, taps)) == GOLDEN_TAPS[layers, taps]


@pytest.mark.parametrize(("layers", "taps"), GOLDEN_TAPS)
def test_resolve_uses_the_rule_where_no_taps_are_named(tmp_path: Path, layers: int, taps: int) -> None:
    run = config(tmp_path, drafter={"target_layer_ids": None, "num_layers": 2, "num_taps": taps})
    shape = resolve(run, with_layers(layers))
    assert list(shape.target_layer_ids) == GOLDEN_TAPS[layers, taps]
    assert (shape.num_layers, shape.num_target_layers) == (2, layers)


def test_taps_follow_the_drafters_depth_unless_their_number_is_given(tmp_path: Path) -> None:
    run = config(tmp_path, drafter={"target_layer_ids": None, "num_layers": 3})
    assert resolve(run, FACTS).target_layer_ids == (1, 17, 33)


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(7, 4.0), (8, 4.0), (10, 5.0), (16, 7.0), (2, 4.0), (9, 4.0), (12, 5.0), (14, 7.0), (64, 7.0)]
)
def test_paper_gamma_by_block_size(block_size: int, gamma: float) -> None:
    assert paper_gamma(block_size) == gamma


def test_gamma_of_the_run_is_the_papers_unless_set(tmp_path: Path) -> None:
    assert loss_gamma(config(tmp_path, drafter={"block_size": 16})) == 7.0
    assert loss_gamma(config(tmp_path, training={"loss_decay_gamma": 2.5})) == 2.5
    assert loss_gamma(config(tmp_path, training={"loss_weights": "dpace"})) == math.inf


@pytest.mark.parametrize(("loss", "teacher"), [("ce", False), ("tv", True), ({"ce": 0.1, "kl": 0.9}, True)])
def test_the_last_state_is_carried_where_the_loss_needs_it(tmp_path: Path, loss: Any, teacher: bool) -> None:
    run = config(tmp_path, training={"loss": loss}, pipeline={"ahead_bytes": 3 * 512 * 3 * 32 * 4})
    assert needs_teacher(run.training) == teacher
    if teacher:
        with pytest.raises(ValueError, match=rf"ahead_bytes .* is below {3 * 512 * 4 * 32 * 4}"):
            resolve(run, FACTS)
    else:
        resolve(run, FACTS)


@pytest.mark.parametrize(
    ("loss", "words"), [({}, "training.loss is empty"), ("rkl", "'ce', 'soft_ce'"), ({"ce": 0}, "greater than 0")]
)
def test_wrong_losses_are_refused(tmp_path: Path, loss: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(tmp_path, training={"loss": loss})


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        ([], ["target_layer_ids", "empty"]),
        ([1, 36], ["[1, 36]", "outside", "0..34"]),
        ([-1, 3], ["[-1, 3]", "outside", "0..34"]),
        ([1, 35], ["[1, 35]", "layer 35", "last", "up to 34"]),
        ([1, 1], ["[1, 1]", "rising strictly"]),
        ([9, 3], ["[9, 3]", "rising strictly"]),
    ],
)
def test_wrong_taps_are_refused(tmp_path: Path, taps: list[int], words: list[str]) -> None:
    with pytest.raises(ValueError, match="target_layer_ids") as error:
        resolve(config(tmp_path, drafter={"target_layer_ids": taps}), FACTS)
    assert all(word in str(error.value) for word in words), error.value
    assert "default rule" not in str(error.value), "the taps were named, the rule is not to blame"


def test_wrong_taps_of_a_small_target_do_not_blame_the_rule(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\]: not rising strictly \(the target has 4 layers\)$"):
        resolve(config(tmp_path, drafter={"target_layer_ids": [2, 1]}), with_layers(4))


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6, 7])
def test_the_rule_on_a_small_target_is_refused_with_the_remedy(tmp_path: Path, layers: int) -> None:
    run = config(tmp_path, drafter={"target_layer_ids": None, "num_layers": 5})
    with pytest.raises(ValueError, match="target_layer_ids") as error:
        resolve(run, with_layers(layers))
    assert f"{layers} layers" in str(error.value)
    assert "set drafter.target_layer_ids" in str(error.value)


@pytest.mark.parametrize("taps", [[0], [34], [0, 1, 2, 34]])
def test_taps_at_the_borders_are_taken(tmp_path: Path, taps: list[int]) -> None:
    assert resolve(config(tmp_path, drafter={"target_layer_ids": taps}), FACTS).target_layer_ids == tuple(taps)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (None, ["not set"]),
        (300, ["300", "outside"]),
        (-1, ["-1", "outside"]),
        (IM_END, ["eos"]),
        (5, ["5", "eos"]),
        (0, ["pad"]),
        (7, ["bos"]),
    ],
)
def test_wrong_mask_token_is_refused(tmp_path: Path, mask: int | None, words: list[str]) -> None:
    with pytest.raises(ValueError, match="mask_token_id") as error:
        resolve(config(tmp_path, drafter={"mask_token_id": mask}), FACTS)
    assert all(word in str(error.value) for word in words), error.value


def test_mask_token_reaches_the_shape(tmp_path: Path) -> None:
    assert resolve(config(tmp_path), FACTS).mask_token_id == MASK
    assert resolve(config(tmp_path, drafter={"mask_token_id": 299}), FACTS).mask_token_id == 299


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_ahead_bytes_hold_two_micro_batches_more_than_replicas(tmp_path: Path, dtype: str, size: int) -> None:
    largest = 512 * 3 * 32 * size  # tokens_per_batch x taps x hidden
    needed = (2 + 2) * largest
    target = {"path": "target", "dtype": dtype}
    enough = config(tmp_path, target=target, pipeline={"targets": ["cpu", "cpu"], "ahead_bytes": needed})
    shape = resolve(enough, FACTS)
    assert batch_bytes(shape, 512, dtype) == largest
    small = config(tmp_path, target=target, pipeline={"targets": ["cpu", "cpu"], "ahead_bytes": needed - 1})
    with pytest.raises(ValueError, match=rf"ahead_bytes {needed - 1} is below {needed}.*raise it or lower"):
        resolve(small, FACTS)


def test_row_longer_than_the_targets_positions_is_refused(tmp_path: Path) -> None:
    run = config(tmp_path, data={"max_length": 513}, training={"tokens_per_batch": 600})
    with pytest.raises(ValueError, match=r"max_length 513 is above the target's 512 positions; lower it"):
        resolve(run, FACTS)


def test_heads_must_divide(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_heads 4 is no multiple of drafter\.num_kv_heads 3"):
        resolve(config(tmp_path, drafter={"num_kv_heads": 3}), FACTS)


def test_sizes_left_out_follow_the_target_and_given_ones_win(tmp_path: Path) -> None:
    shape = resolve(config(tmp_path), FACTS)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 2, 8, 64)
    given = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 16, "intermediate_size": 48}
    shape = resolve(config(tmp_path, drafter=given), FACTS)
    assert {key: getattr(shape, key) for key in given} == given
    assert (shape.hidden_size, shape.vocab_size, shape.rope_theta) == (32, 300, 1e6)


SLIDES, FULL = "sliding_attention", "full_attention"


def test_kinds_of_layers_reach_the_shape(tmp_path: Path) -> None:
    shape = resolve(config(tmp_path), FACTS)
    assert (shape.sliding_layers, shape.sliding_window, shape.sliding_causal) == ((), None, True)
    given = {"num_layers": 3, "layer_types": [SLIDES, SLIDES, FULL], "sliding_window": 4, "sliding_causal": False}
    shape = resolve(config(tmp_path, drafter=given), FACTS)
    assert (shape.sliding_layers, shape.sliding_window, shape.sliding_causal) == ((0, 1), 4, False)
    shape = resolve(config(tmp_path, drafter={"layer_types": [FULL]}), FACTS)
    assert (shape.sliding_layers, shape.sliding_window) == ((), None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layer_types": [FULL, SLIDES], "sliding_window": 8}, "names 2 layers, drafter.num_layers is 1; name each"),
        ({"layer_types": [SLIDES]}, r"layers \[0\] slide without a window; set drafter.sliding_window"),
        ({"sliding_window": 8}, "without a sliding layer; name them in drafter.layer_types"),
        ({"layer_types": [FULL], "sliding_window": 8}, "without a sliding layer"),
        ({"sliding_causal": False}, "without a sliding layer"),
        ({"layer_types": [SLIDES], "sliding_window": 3}, "sliding_window 3 is below drafter.block_size 4; raise it"),
    ],
)
def test_windows_that_do_not_fit_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(config(tmp_path, drafter=given), FACTS)


def test_the_label_layout_reaches_the_shape(tmp_path: Path) -> None:
    assert resolve(config(tmp_path), FACTS).first_slot == 1
    shape = resolve(config(tmp_path, drafter={"sample_from_anchor": True}), FACTS)
    assert (shape.sample_from_anchor, shape.first_slot) == (True, 0)


def test_rotary_schema_and_bounded_logits_are_the_targets(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    shape = resolve(config(tmp_path), TargetFacts(**{**vars(FACTS), "rope_scaling": yarn, "logit_softcap": 30.0}))
    assert (shape.rope_theta, shape.rope_scaling, shape.logit_softcap) == (1e6, yarn, 30.0)


@pytest.mark.parametrize(
    ("micro_batches", "accumulate", "max_steps", "steps"),
    [(14, 1, None, 14), (14, 3, None, 5), (1, 8, None, 1), (14, 3, 4, 4), (14, 3, 99, 5)],
)
def test_total_steps(tmp_path: Path, micro_batches: int, accumulate: int, max_steps: int | None, steps: int) -> None:
    run = config(tmp_path, training={"accumulate": accumulate, "max_steps": max_steps})
    assert total_steps(run.training, micro_batches) == steps
