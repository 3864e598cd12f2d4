"""The drafter's rotary positions, from every way that target configs write them, against the formulas written a second time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash_core.modeling.drafter import Drafter, Rotary
from dflash_core.modeling.rope import drafter_rope
from dflash_core.modeling.target import read_facts
from tests.fakes import make_shape

DIM = 16
Scaling = dict[str, Any]


def plain(theta: float) -> list[float]:
    return [theta ** (-2 * i / DIM) for i in range(DIM // 2)]


def linear(theta: float, own: Scaling) -> list[float]:
    return [each / own["factor"] for each in plain(theta)]


def llama3(theta: float, own: Scaling) -> list[float]:
    """Long waves are slowed down by the factor, short ones are kept, those between are mixed."""
    length, low, high = own["original_max_position_embeddings"], own["low_freq_factor"], own["high_freq_factor"]
    out = []
    for each in plain(theta):
        turns = length * each / (2 * math.pi)  # within the original length
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        out.append(share * each + (1 - share) * each / own["factor"])
    return out


def yarn(theta: float, own: Scaling) -> list[float]:
    """The same idea with a ramp over the numbers of the frequencies (arXiv 2309.00071)."""

    def place(turns: float) -> float:
        return DIM * math.log(own["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(own.get("beta_fast", 32)), place(own.get("beta_slow", 1))
    if own.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, DIM - 1)
    out = []
    for i, each in enumerate(plain(theta)):
        slowed = min(1.0, max(0.0, (i - first) / (last - first)))
        out.append(each * (1 - slowed) + each / own["factor"] * slowed)
    return out


LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
OSS = {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
FORMULAS = {"linear": linear, "llama3": llama3, "yarn": yarn}


@pytest.mark.parametrize("theta", [1e4, 1e6, 1.5e5])
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3, YARN, OSS])
def test_cos_and_sin_equal_the_formulas(scaling: Scaling | None, theta: float) -> None:
    rotary = Rotary(make_shape(head_dim=DIM, rope_theta=theta, rope_scaling=scaling)).to(torch.bfloat16)
    positions = [0, 1, 2, 77, 4000]
    cos, sin = rotary(torch.tensor([positions]))
    assert (cos.dtype, cos.shape) == (torch.float32, (1, 5, DIM))
    expected = plain(theta) if scaling is None else FORMULAS[scaling["rope_type"]](theta, scaling)
    size = 0.1 * math.log(scaling["factor"]) + 1 if scaling and scaling["rope_type"] == "yarn" else 1.0
    for t, position in enumerate(positions):
        for i in range(DIM):
            angle = position * expected[i % (DIM // 2)]
            assert float(cos[0, t, i]) == pytest.approx(size * math.cos(angle), abs=2e-3)  # fp32 angles of up to 4000
            assert float(sin[0, t, i]) == pytest.approx(size * math.sin(angle), abs=2e-3)


def test_a_drafter_without_memory_keeps_its_frequencies() -> None:
    with torch.device("meta"):
        drafter = Drafter(make_shape(rope_scaling=YARN))
    assert drafter.rotary.inverse == Drafter(make_shape(rope_scaling=YARN)).rotary.inverse


QWEN = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": DIM,
    "max_position_embeddings": 4096,
}
SPELLINGS: list[tuple[Scaling, float, Scaling | None]] = [
    ({"rope_theta": 5e4}, 5e4, None),
    ({"rope_theta": 5e4, "rope_scaling": None}, 5e4, None),
    ({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 8.0}}, 5e4, LINEAR),
    ({"rope_theta": 5e4, "rope_scaling": YARN}, 5e4, YARN),
    ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, 5e4, None),
    ({"rope_parameters": {**YARN, "rope_theta": 5e4}}, 5e4, YARN),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25}}, 5e4, None),
    ({"rope_parameters": {**YARN, "rope_theta": 5e4, "partial_rotary_factor": 0.25}}, 5e4, YARN),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [3, 3, 2]}}, 5e4, None),
]


@pytest.mark.parametrize(("written", "theta", "scaling"), SPELLINGS)
def test_every_spelling_of_a_target_is_read(tmp_path: Path, written: Scaling, theta: float, scaling: Scaling | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **written}))
    facts = read_facts(str(tmp_path))
    assert facts.rope_theta == theta
    assert facts.rope_scaling == scaling


def test_kinds_of_layers_follow_those_that_see_everything(tmp_path: Path) -> None:
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {**LINEAR, "rope_theta": 1e6},
    }
    sizes = {key: QWEN[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    transformers.Gemma3TextConfig(**sizes, rope_parameters=nested).save_pretrained(tmp_path)
    facts = read_facts(str(tmp_path))
    assert (facts.rope_theta, facts.rope_scaling) == (1e6, LINEAR)


def test_gpt_oss_and_the_published_qwen_3_5_are_read(tmp_path: Path) -> None:
    transformers.GptOssConfig().save_pretrained(tmp_path / "oss")
    facts = read_facts(str(tmp_path / "oss"))
    assert (facts.rope_theta, facts.rope_scaling) == (1.5e5, OSS)
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
    transformers.Qwen3_5Config(text_config={"rope_parameters": {**rope, "mrope_section": [11, 11, 10]}}).save_pretrained(
        tmp_path / "qwen"
    )
    facts = read_facts(str(tmp_path / "qwen"))
    assert (facts.rope_theta, facts.rope_scaling) == (1e7, None)


def test_a_size_of_cos_and_sin_of_its_own_is_left_to_the_target() -> None:
    """Not all engines read these keys of a yarn schema; a drafter trained without them is served alike by all."""
    own = {**YARN, "rope_theta": 1e6, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert drafter_rope(own, source="t") == (1e6, YARN)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            "rope_type dynamic is not supported; default, linear, llama3",
        ),
        ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]}, "rope_type longrope is not supported"),
        ({"rope_type": "swirl", "rope_theta": 1e4}, "rope_type swirl is not supported"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "without original_max_position_embeddings"),
        ({"rope_type": "default"}, "without rope_theta"),
        ({}, "without rope_theta"),
        ({"sliding_attention": {"rope_theta": 1e4}, "other": {"rope_theta": 1e4}}, "of sliding_attention, other, none of full"),
    ],
)
def test_what_is_not_supported_is_named(rope: Scaling, words: str) -> None:
    with pytest.raises(ValueError, match=f"some place: .*{words}"):
        drafter_rope(rope, source="some place")
