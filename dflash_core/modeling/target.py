"""The frozen target: its facts, tap replicas without head or needless layers, and the embedding and head of the drafter.

    config.json --read_facts--> TargetFacts
    weights     --load_replica--> TapReplica.tap(batch) -> TappedBatch          hooks on the tapped layers
    weights     --load_ends-----> TargetEnds.embed(ids), .head(states)          frozen, shared with the drafter

Hooks, not `output_hidden_states`: on a model cut after its last tap, transformers returns that one after the final norm.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.records import Batch, TappedBatch, TargetFacts


def read_facts(path: str) -> TargetFacts:
    """Sizes and special tokens from the target's config files; no weights. Raises ValueError where it is unsupported."""
    from transformers import AutoConfig

    if not Path(path).is_dir() and path.count("/") != 1:
        raise ValueError(f"target.path {path!r}: no such directory, and no hub id of the form owner/name")
    top = AutoConfig.from_pretrained(path)
    config = top.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0 or "rope_theta" not in rope:
        raise ValueError(f"target.path {path!r}: rope_parameters {rope} are not supported yet; plain rope_theta is")
    heads = config.num_attention_heads
    return TargetFacts(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        max_positions=config.max_position_embeddings,
        eos_ids=tuple(dict.fromkeys((*_ids(config.eos_token_id), *_generation_eos(path)))),
        pad_ids=_ids(config.pad_token_id),
        bos_ids=_ids(config.bos_token_id),
    )


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _generation_eos(path: str) -> tuple[int, ...]:
    file = Path(path) / "generation_config.json"
    return _ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")) if file.is_file() else ()


def choose_attention(wanted: str, device: str) -> str:
    """The target's attention for a device: flash-attn where it can be, SDPA else. Raises ValueError if it was asked for and cannot."""
    possible = device.startswith("cuda") and importlib.util.find_spec("flash_attn") is not None
    if wanted == "flash_attention_2" and not possible:
        raise ValueError(f"target.attention flash_attention_2 needs CUDA and the flash-attn package; device is {device}")
    if wanted == "auto":
        return "flash_attention_2" if possible else "sdpa"
    return wanted


def load_model(path: str, *, dtype: str, device: str, attention: str) -> Any:
    """The whole causal LM in eval mode, frozen."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=choose_attention(attention, device)
    )
    return model.to(device).eval().requires_grad_(False)


def decoder_of(model: Any) -> Any:
    """The module that holds `layers`, found by structure."""
    decoder = model.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(f"{type(model).__name__}: no list of decoder layers found, so nothing can be tapped")
    return decoder


class Taps:
    """Forward hooks that keep the outputs of some decoder layers for the last forward pass."""

    def __init__(self, decoder: Any, layer_ids: Sequence[int]) -> None:
        self._seen: dict[int, Tensor] = {}
        self._ids = tuple(layer_ids)
        for i in self._ids:
            decoder.layers[i].register_forward_hook(self._keep(i))

    def _keep(self, layer_id: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> Tensor:
        """Tapped states side by side [B, T, K*H], forgotten here."""
        states = torch.cat([self._seen.pop(i) for i in self._ids], dim=-1)
        return states


class TapReplica:
    """One target replica on one device: no head, no layer after the last tap."""

    def __init__(self, path: str, *, layer_ids: Sequence[int], dtype: str, device: str, attention: str) -> None:
        self.device = device
        decoder = decoder_of(load_model(path, dtype=dtype, device=device, attention=attention))
        decoder.layers = decoder.layers[: max(layer_ids) + 1]
        self._decoder = decoder
        self._taps = Taps(decoder, layer_ids)

    def tap(self, batch: Batch) -> TappedBatch:
        """Hidden states of a right-padded batch. No mask: a causal model's real positions do not see the padding."""
        if self.device == "cpu":
            torch.set_num_threads(1)
        with torch.no_grad():
            self._decoder(input_ids=batch.input_ids.to(self.device).long(), use_cache=False)
            return TappedBatch(batch=batch, target_hidden=self._taps.take())


class TargetEnds:
    """The target's frozen embedding and head, which the drafter shares."""

    def __init__(self, model: Any) -> None:
        self.embed: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()


def load_ends(path: str, *, dtype: str, device: str, attention: str) -> TargetEnds:
    """Embedding and head alone, in `dtype`; the layers are dropped."""
    return TargetEnds(load_model(path, dtype=dtype, device=device, attention=attention))
