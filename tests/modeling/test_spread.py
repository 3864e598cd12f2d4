"""A target whose layers are spread over devices: the same states and texts, and nothing of a layer anywhere but on its device.

There is one real device here, so equality is that of two names of it; what crosses over is seen with torch's `meta` device, which
has shapes and no values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dflash_core.config import PipelineConfig
from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.speculate import decode
from dflash_core.devices import all_devices, devices_of_rank
from dflash_core.modeling.spread import spread
from dflash_core.modeling.target import TapReplica, decoder_of, load_model
from tests.decoding.texts import LAYERS, NEVER, Oracle, alone, prompt_of
from tests.fakes import make_batch, save_target


class Reached(Exception):
    """The pass came to the end of the layers."""


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("spread"), num_hidden_layers=6, initializer_range=0.3, seed=2)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors(list(value.values()))
    return [each for part in value for each in tensors(part)] if isinstance(value, tuple | list) else []


def crossing(model: Any, ids: torch.Tensor) -> list[set[str]]:
    """Devices of what each layer is given in a pass of `model` over [cpu, meta], which ends where the states would come back."""
    decoder = decoder_of(model)
    spread(model, decoder, ["cpu", "meta"])
    seen: list[set[str]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append({each.device.type for each in (*tensors(args), *tensors(kwargs), *module.parameters())})

    def end(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise Reached(args[0].device)

    for layer in decoder.layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    decoder.norm.register_forward_pre_hook(end, with_kwargs=True, prepend=True)
    with pytest.raises(Reached, match="meta"), torch.no_grad():
        model(input_ids=ids)
    return seen


@pytest.mark.parametrize("padded", [False, True])
def test_each_layer_gets_all_on_its_device(target_path: Path, padded: bool) -> None:
    model = load_model(str(target_path), dtype="float32", device="cpu", attention="auto")
    if padded:  # so that there is a mask
        forward = model.forward
        mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        model.forward = lambda **inputs: forward(**inputs, attention_mask=mask)
    assert crossing(model, torch.arange(8).view(2, 4)) == [{"cpu"}] * 3 + [{"meta"}] * 3
    assert model.lm_head.weight.device.type == decoder_of(model).norm.weight.device.type == "cpu"


@pytest.mark.parametrize("changes", [{}, {"packed": True}, {"teacher": True}])
def test_states_are_those_of_one_device(target_path: Path, changes: dict[str, bool]) -> None:
    batch = make_batch([(list(range(4, 24)), [1] * 20), (list(range(40, 51)), [1] * 11)])
    one, three = (
        TapReplica(str(target_path), layer_ids=(0, 2, 4), dtype="float32", device=device, attention="auto", **changes).tap(batch)
        for device in ("cpu", "cpu+cpu+cpu")
    )
    assert torch.equal(three.target_hidden, one.target_hidden)
    if changes.get("teacher"):
        assert three.last_hidden is not None
        assert one.last_hidden is not None
        assert torch.equal(three.last_hidden, one.last_hidden)


def test_a_full_replica_is_whole_and_cut_again(target_path: Path) -> None:
    replica = TapReplica(str(target_path), layer_ids=(0, 2), dtype="float32", device="cpu+cpu", attention="auto", full=True)
    assert len(decoder_of(replica._whole[0]).layers) == 3  # type: ignore[index]
    with replica.whole() as (model, _):
        assert len(decoder_of(model).layers) == 6


def test_texts_and_caches_are_those_of_one_device(target_path: Path) -> None:
    """Rejected drafts are taken back, and one request leaves the batch before the other."""
    prompts, limits, found = [prompt_of(3), prompt_of(4, 5)], [12, 30], []
    for device in ("cpu", "cpu+cpu"):
        target = DecodingTarget(
            load_model(str(target_path), dtype="float32", device=device, attention="auto"), LAYERS, device="cpu"
        )
        known = [[*prompt, *alone(target, prompt, 40)] for prompt in prompts]
        batch = decode(target, prompts, limits=limits, stop_ids=NEVER, proposer=Oracle(known, 7, wrong=0.3))
        assert [list(each.tokens) for each in batch] == [
            text[len(prompt) :][:limit] for text, prompt, limit in zip(known, prompts, limits, strict=True)
        ]
        found.append([(each.tokens, each.accepted, each.drafted) for each in batch])
    assert found[0] == found[1]
    assert 0 < sum(found[0][1][1]) < sum(found[0][1][2])


def test_names_of_several_devices() -> None:
    section = PipelineConfig(targets=("cuda:0+cuda:1", "cuda:2+cuda:3"), drafter="cuda:4", ranks=2)
    assert all_devices(section) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4")
    second = devices_of_rank(section, 1)
    assert (second.targets, second.drafter) == (("cuda:5+cuda:6", "cuda:7+cuda:8"), "cuda:9")
    assert devices_of_rank(PipelineConfig(targets=("cpu+cpu",)), 1).targets == ("cpu+cpu",)
