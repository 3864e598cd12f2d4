"""The planner against the published sizes and rates of Qwen3.6-27B, whose config is written here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from dflash_core import planning
from dflash_core.config import Config
from dflash_core.modeling.census import Census, census, read_census
from dflash_core.planning import DEVICES, Cost, Room, topologies
from dflash_core.records import DrafterShape, TargetFacts
from dflash_core.sizes import resolve
from flows.plan import plan
from flows.settings import load_config
from tests.fakes import VOCAB, make_config, make_shape

GB = 1e9
TAPS = (1, 16, 31, 46, 61)


@pytest.fixture(scope="module")
def counted() -> Census:
    heads = {"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes = {"vocab_size": 248_320, "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64}
    return census(Qwen3_5TextConfig(**sizes, **heads, **linear))


SHAPE = DrafterShape(
    num_layers=5, hidden_size=5120, intermediate_size=17_408, num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=248_320,
    rms_norm_eps=1e-6, rope_theta=1e7, max_positions=262_144, block_size=16, mask_token_id=248_070, target_layer_ids=TAPS,
    num_target_layers=64,
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings: dict[str, Any] = {
        "target": {"dtype": "bfloat16"},
        "training": {"tokens_per_batch": 16_384, "anchors_per_row": 512, "anchors_per_batch": 4096, "optimizer": "adamw"},
        "pipeline": {"ahead_bytes": 8 * 2**30},
    }
    return make_config(tmp_path, "unused", **settings)


def near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 0.05 * wanted


def test_sizes(config: Config, counted: Census) -> None:
    assert sum(counted.attends) == 16
    assert near(sum(counted.layers), 24.8e9)
    assert near(planning.drafter_parameters(SHAPE), 1.73e9)
    assert near(planning.drafter_room(config, SHAPE, counted, 1).parts["states"], 28 * GB)
    assert near(planning.target_room(config, SHAPE, counted).parts["taps"] / 16_384, 51.2e3)


def test_a_sliding_layer_looks_at_its_window_only(config: Config, counted: Census) -> None:
    """12 FLOPs a token that is looked at and a value of a head, forward and backward; rows of 8,000 tokens, 4,000 of them earlier."""
    sliding = replace(SHAPE, sliding_layers=(0, 1, 2, 3), sliding_window=1000)
    full, near, far = (
        planning.cost(config, shape, counted, row_tokens=8000.0, anchors=64.0).block
        for shape in (SHAPE, sliding, replace(sliding, sliding_window=10_000))
    )
    assert full - near == pytest.approx(12 * 4 * 3000 * 32 * 128)
    assert far == full


def test_evaluating_snapshots_needs_the_whole_target_and_a_copy_of_the_drafter(config: Config, counted: Census) -> None:
    off = planning.target_room(config, SHAPE, counted)
    during = config.during_training.model_copy(update={"eval_every": 100})
    watched = config.model_copy(update={"during_training": during})
    on = planning.target_room(watched, SHAPE, counted)
    assert not [name for name in off.parts if "evaluations" in name]
    rest = on.parts["rest for evaluations"]
    assert rest == 2 * (sum(counted.layers[62:]) + counted.head)
    assert on.parts["weights"] + rest == pytest.approx(2 * (counted.embedding + sum(counted.layers) + counted.head))
    assert near(on.parts["drafter for evaluations"], 2 * 1.73e9)
    assert on.total == off.total + sum(size for name, size in on.parts.items() if "evaluations" in name)
    tokens = config.data.max_length + during.max_new_tokens
    cache, logits = 2 * 8 * 128 * (64 + 5) * tokens, 64 * 16 * 248_320
    assert on.parts["caches and logits for evaluations"] == 2 * (cache + logits)
    saves = [planning.disk_room(each, SHAPE, tokens=1e9).parts["checkpoints"] for each in (config, watched)]
    assert saves[1] == saves[0] / 5 * 6


def test_what_the_optimizer_keeps_and_computes(config: Config, counted: Census) -> None:
    def of(**training: Any) -> Config:
        return config.model_copy(update={"training": config.training.model_copy(update=training)})

    plain, muon, both = config, of(optimizer="muon"), of(optimizer="muon", ema=0.99, accumulate=4)
    parameters = planning.drafter_parameters(SHAPE)
    # weights and gradients everywhere, the rest shared out; twice the gradients of four micro-batches on one rank
    for ranks, wanted in ((1, [16, 12, 20]), (4, [10, 9, 10])):
        states = [planning.drafter_room(each, SHAPE, counted, ranks).parts["states"] for each in (plain, muon, both)]
        assert states == [each * parameters for each in wanted]
    one = make_shape(
        num_layers=1, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=2, target_layer_ids=(0,)
    )
    # fc 8x8, q and o 4x8, k and v 2x8, three of 8x16: five times 4 m^2 n + 2 m^3
    by_hand = 5 * ((4 * 64 * 8 + 2 * 512) + 2 * (4 * 16 * 8 + 2 * 64) + 2 * (4 * 4 * 8 + 2 * 8) + 3 * (4 * 64 * 16 + 2 * 512))
    assert planning.update_flops(muon.training, one) == by_hand
    costs = [planning.cost(each, SHAPE, counted, row_tokens=2000, anchors=512) for each in (plain, muon, both)]
    assert costs[0].update == 0
    assert costs[1].drafter - costs[0].drafter == pytest.approx(planning.update_flops(muon.training, SHAPE) / 16_384)
    assert costs[2].update == costs[1].update / 4


@pytest.mark.parametrize(("anchors", "gigaflops", "ratio"), [(128, 16.2, 3.0), (256, 31.5, 1.5), (512, 62.2, 0.78)])
def test_flops(config: Config, counted: Census, anchors: int, gigaflops: float, ratio: float) -> None:
    costs = planning.cost(config, SHAPE, counted, row_tokens=2000, anchors=anchors)
    assert near(costs.target, 48.4e9)
    assert near(costs.drafter, gigaflops * 1e9)
    assert near(costs.target / costs.drafter, ratio)


ROOM = Room(parts={"all": 40 * GB})


@pytest.mark.parametrize(
    ("devices", "anchors", "wanted"),
    [
        ("4xrtx-pro-6000", 128, {"shared": 16.3, "3+1": 14.0}),
        ("4xrtx-pro-6000", 256, {"shared": 12.8, "3+1": 7.2, "2+2": 11.5}),
        ("4xrtx-pro-6000", 512, {"shared": 8.9, "3+1": 3.6, "2+2": 7.3}),
        ("8xh200", 128, {"shared": 54.7, "6+2": 53.2}),
        ("8xh200", 256, {"shared": 44.0, "5+3": 41.0}),
        ("8xh200", 512, {"shared": 31.6, "4+4": 27.7}),
    ],
)
def test_rates(config: Config, counted: Census, devices: str, anchors: int, wanted: dict[str, float]) -> None:
    """Thousand real tokens a second; the last one named is the best split."""
    count, device = planning.parse_devices(devices)
    costs = planning.cost(config, SHAPE, counted, row_tokens=2000, anchors=anchors)
    found = topologies(costs, count, device, target=ROOM, drafter=lambda ranks: ROOM)
    rates = {topology.name: topology.rate / 1000 for topology in found}
    for name, rate in wanted.items():
        assert near(rates[name], rate), (name, rates[name])
    assert len(found) == count
    if anchors > 128 or count == 8:
        assert near(max(topology.rate for topology in found if not topology.shared) / 1000, list(wanted.values())[-1])


def test_what_does_not_fit_is_said(config: Config, counted: Census) -> None:
    costs = planning.cost(config, SHAPE, counted, row_tokens=2000, anchors=512)
    found = topologies(costs, 4, DEVICES["rtx-pro-6000"], target=Room(parts={"weights": 60 * GB}), drafter=lambda ranks: ROOM)
    assert {topology.name: topology.fits for topology in found} == {"shared": False, "3+1": True, "2+2": True, "1+3": True}
    assert {topology.name: topology.even for topology in found} == {"shared": True, "3+1": True, "2+2": True, "1+3": False}


@pytest.mark.parametrize("text", ["h200", "0xh200", "4xgpu", "4 h200", ""])
def test_unknown_devices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write COUNTxNAME such as 4xrtx-pro-6000; known are"):
        planning.parse_devices(text)


def simulated(tap_s: float, train_s: float, *, targets: int, window: int, items: int = 400) -> float:
    """Items a second of the pipeline by its rules alone: credit in order, the first free replica, training in order."""
    free, trained = [0.0] * targets, [0.0] * items
    for number in range(items):
        credit = trained[number - window] if number >= window else 0.0
        replica = min(range(targets), key=free.__getitem__)
        free[replica] = max(free[replica], credit) + tap_s
        trained[number] = max(free[replica], trained[number - 1] if number else 0.0) + train_s
    return (items - 100) / (trained[-1] - trained[99])  # without the fill


@pytest.mark.parametrize("targets", [1, 2, 3, 6])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 1.0, 1.5, 3.0])
def test_a_simulated_pipeline_reaches_the_predicted_rate(targets: int, ratio: float) -> None:
    costs = Cost(target=1.0, context=0.0, block=1 / ratio, block_tokens=1.0)
    device = planning.Device(name="", flops=1.0, memory=1.0, target_mfu=1.0, drafter_mfu=1.0)
    found = topologies(costs, targets + 1, device, target=ROOM, drafter=lambda ranks: ROOM)
    predicted = next(topology.rate for topology in found if topology.targets == targets and topology.drafters == 1)
    tap_s, train_s = planning.token_seconds(costs, device)
    assert near(simulated(tap_s, train_s, targets=targets, window=targets + 2), predicted)


# ---- the census ------------------------------------------------------------------------------------------------------


def test_the_census_is_that_of_the_whole_model(target_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir)
    counted = read_census(str(target_dir))
    assert counted.embedding + sum(counted.layers) + 32 == sum(p.numel() for p in model.parameters())  # and the final norm
    assert counted.tied
    assert counted.active == counted.layers
    assert all(counted.attends)
    assert (len(counted.layers), counted.attention_width, counted.head) == (4, 32, VOCAB * 32)


def test_a_token_meets_only_its_experts() -> None:
    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=[1],
    )  # fmt: skip
    counted = census(config)
    expert = 3 * 16 * 12
    assert counted.layers[0] - counted.active[0] == 6 * expert
    assert counted.layers[1] == counted.active[1] == counted.layers[0] - 8 * expert - 8 * 16 + 3 * 16 * 32
    assert counted.layers[2] == counted.layers[0]


def test_layers_of_no_types_are_all_alike() -> None:
    counted = census(Qwen3Config(vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=7, num_attention_heads=2,
                                 num_key_value_heads=1, head_dim=8, tie_word_embeddings=False))  # fmt: skip
    assert len(set(counted.layers)) == 1
    assert (len(counted.layers), counted.tied) == (7, False)


def test_the_plan_in_words(tmp_path: Path, target_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, target_dir)
    with caplog.at_level("INFO", "flows"):
        plan(config, devices="2xh200", row_tokens=None, tokens=3e9)
    text = "\n".join(caplog.messages)
    assert "rows of 2,000 tokens with 4 anchors; an epoch has 3.00 Gtok, 1 epochs" in text
    assert "2 x h200 (990 TF dense bf16, 141 GB; assumed MFU: target 45%, drafter 43.5%)" in text
    assert text.count("Ktok/s") == 2
    assert text.count("best") == 1
    assert "within the stop deadline of 20 s" in text


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("configs/qwen*.yaml")), ids=lambda path: path.stem)
def test_the_run_files_of_real_targets_are_complete(path: Path) -> None:
    """Sizes as the models' own configs have them."""
    sizes = {
        "qwen3-4b": (36, 2560, 9728, 32, 8, 128),
        "qwen3-8b": (36, 4096, 12288, 32, 8, 128),
        "qwen3.6-27b": (64, 5120, 17408, 24, 4, 256),
    }
    layers, hidden, inner, heads, kv_heads, head_dim = sizes[path.stem]
    config = load_config(str(path))
    large = path.stem == "qwen3.6-27b"
    facts = TargetFacts(
        num_layers=layers, hidden_size=hidden, intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=248_320 if large else 151_936, rms_norm_eps=1e-6, rope_theta=1e6, max_positions=40_960, eos_ids=(151_645,),
        pad_ids=(151_643,), bos_ids=(),
    )  # fmt: skip
    shape = resolve(config, facts)
    wanted = {"qwen3-4b": 0.5374e9, "qwen3-8b": 1.0486e9, "qwen3.6-27b": 1.73e9}
    assert planning.drafter_parameters(shape) == pytest.approx(wanted[path.stem], rel=1e-3)
    assert shape.target_layer_ids == (TAPS if large else (1, 9, 17, 25, 33))
    assert config.name == path.stem
