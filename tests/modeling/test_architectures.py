"""Targets of other families, tiny and random: tapped by structure, and read alike whatever stands beside a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash_core.modeling.target import TapReplica, decoder_of, load_ends, load_model, padding_error, read_facts
from dflash_core.records import Batch, PlannedBatch
from tests.modeling.test_spread import crossing

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PLAIN = {"rope_type": "default", "rope_theta": 5e4}
THETAS = {"gemma3": 1e6, "gemma4": 1e6, "gpt_oss": 5e4, "mixtral": 5e4}  # the others: 1e4
CAPS = {"gemma2": 0.5, "gemma3": 1.0, "gemma4": 1.0}  # the others: none
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "llama, tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, **SLIDING, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN
    ),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **SLIDING, query_pre_attn_scalar=8, final_logit_softcapping=0.5),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **SLIDING, query_pre_attn_scalar=8, final_logit_softcapping=1.0),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **SIZES, **SLIDING, hidden_size_per_layer_input=0, num_kv_shared_layers=0, final_logit_softcapping=1.0
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeConfig(
        text_config={**SIZES, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}
    ),
    "qwen3_5": lambda: transformers.Qwen3_5Config(text_config={**SIZES, **LINEAR}),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SIZES, **LINEAR, **EXPERTS, shared_expert_intermediate_size=16),
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """(name, directory, the whole model); norms weigh 3, so that states before and after one cannot be confused."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]()).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(3.0)
    directory = tmp_path_factory.mktemp("family")
    model.save_pretrained(directory)
    return request.param, directory, model


def batch(ids: torch.Tensor) -> Batch:
    rows, length = ids.shape
    return Batch(
        plan=PlannedBatch(number=0, epoch=0, rows=tuple(range(rows)), credit=0),
        input_ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.uint8),
        lengths=torch.full((rows,), length, dtype=torch.int32),
    )


def test_every_layer_of_the_cut_model_equals_the_whole_one(family: tuple[str, Path, Any]) -> None:
    _, directory, model = family
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    with torch.no_grad():
        whole = model(input_ids=ids.long(), output_hidden_states=True).hidden_states
    hooked: list[Any] = [None] * 4
    for layer, module in enumerate(decoder_of(model).layers):
        module.register_forward_hook(lambda module, inputs, output, layer=layer: hooked.__setitem__(layer, output))
    with torch.no_grad():
        model(input_ids=ids.long())
    for layer in range(4):
        cut = TapReplica(str(directory), layer_ids=(layer,), dtype="float32", device="cpu", attention="auto")
        tapped = cut.tap(batch(ids)).target_hidden
        assert torch.equal(tapped, hooked[layer]), layer
        assert torch.equal(tapped, whole[layer + 1]) == (layer < 3), "the last one's output stands after the final norm there"


def test_layers_spread_over_devices_get_all_on_theirs(family: tuple[str, Path, Any]) -> None:
    _, directory, _ = family
    model = load_model(str(directory), dtype="bfloat16", device="cpu", attention="auto")  # meta multiplies experts in no other
    assert crossing(model, torch.arange(8).view(2, 4)) == [{"cpu"}] * 2 + [{"meta"}] * 2


def test_padding_is_not_felt(family: tuple[str, Path, Any]) -> None:
    _, directory, _ = family
    replica = TapReplica(str(directory), layer_ids=(0, 2), dtype="float32", device="cpu", attention="auto")
    assert padding_error(replica, row=8, longest=20, vocab_size=64) < 1e-5


def test_facts_and_ends_are_the_models_own(family: tuple[str, Path, Any]) -> None:
    name, directory, model = family
    facts = read_facts(str(directory))
    assert (facts.num_layers, facts.hidden_size, facts.num_heads, facts.head_dim, facts.vocab_size) == (4, 32, 4, 8, 64)
    assert (facts.rope_theta, facts.rope_scaling) == (THETAS.get(name, 1e4), None)
    assert facts.logit_softcap == CAPS.get(name)
    ends = load_ends(str(directory), dtype="float32", device="cpu", attention="auto")
    ids = torch.arange(64).unsqueeze(0)
    scale = 32**0.5 if "gemma" in name else 1.0
    weight = model.get_input_embeddings().weight
    replica = TapReplica(str(directory), layer_ids=(0,), dtype="float32", device="cpu", attention="auto", teacher=True)
    last = replica.tap(batch(ids.int())).last_hidden
    assert last is not None
    with torch.no_grad():
        torch.testing.assert_close(ends.embed(ids), weight[ids] * scale)
        own, plain = ends.head(last), model.get_output_embeddings()(last)
        torch.testing.assert_close(own, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)
    cap = CAPS.get(name)
    expected = plain if cap is None else cap * torch.tanh(plain / cap)
    torch.testing.assert_close(own, expected)
    assert (float(plain.abs().max()) > 1.2 * float(own.abs().max())) == (cap is not None), "logits in the tests reach the bound"


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (lambda: transformers.GraniteConfig(**SIZES, embedding_multiplier=3.0), "embeddings"),
        (lambda: transformers.GraniteConfig(**SIZES, logits_scaling=2.0), "logits"),
        (lambda: transformers.CohereConfig(**SIZES, logit_scale=0.25), "logits"),
    ],
)
def test_a_target_that_scales_outside_of_its_embedding_or_head_is_refused(
    tmp_path: Path, config: Callable[[], Any], what: str
) -> None:
    transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"target\.path .*changes its {what} outside of the module"):
        load_ends(str(tmp_path), dtype="float32", device="cpu", attention="auto")
