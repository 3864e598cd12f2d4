"""The frozen target: its facts, tap replicas without head or needless layers, and the embedding and head of the drafter.

    config.json --read_facts--> TargetFacts
    weights     --load_replica--> TapReplica.tap(batch) -> TappedBatch          hooks on the tapped layers
                                  check_padding: a row's states do not depend on what stands beside it
    weights     --load_ends-----> TargetEnds.embed(ids), .head(states)          frozen, shared with the drafter

Hooks, not `output_hidden_states`: on a model cut after its last tap, transformers returns that one after the final norm.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.config import TrainingConfig
from dflash_core.devices import home, parts
from dflash_core.errors import first_line
from dflash_core.files import begins_at
from dflash_core.modeling.rope import drafter_rope
from dflash_core.modeling.spread import spread
from dflash_core.records import Batch, PlannedBatch, TappedBatch, TargetFacts

PADDING_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # relative; other shapes round otherwise, layer after layer


def read_config(path: str) -> Any:
    """The transformers config of a directory or hub id. Raises ValueError where none can be read, and for that of a drafter."""
    from transformers import AutoConfig

    if not Path(path).is_dir() and (path.count("/") != 1 or path[0] in "/.~"):
        raise ValueError(f"target.path {path!r}: no such directory{begins_at(path)}, and no hub id of the form owner/name")
    file = Path(path) / "config.json"
    if file.is_file():
        _check_no_drafter(json.loads(file.read_text(encoding="utf-8")), path)
    try:
        top = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target.path {path!r}: no config of a transformers model that can be read: {first_line(error)}"
        ) from error
    _check_no_drafter(vars(top), path)
    return top


def read_facts(path: str) -> TargetFacts:
    """Sizes and special tokens from the target's config files; no weights. Raises ValueError where it is unsupported."""
    top = read_config(path)
    config = top.get_text_config()
    layer = config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config  # Gemma 4: kinds differ in size
    heads = layer.num_attention_heads
    theta, scaling = drafter_rope(getattr(config, "rope_parameters", None) or {}, source=f"target.path {path!r}")
    return TargetFacts(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=layer.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(layer, "num_key_value_heads", None) or heads,
        head_dim=getattr(layer, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        logit_softcap=softcap_of(config),
        max_positions=config.max_position_embeddings,
        eos_ids=tuple(dict.fromkeys((*_ids(config.eos_token_id), *_generation_eos(path)))),
        pad_ids=_ids(config.pad_token_id),
        bos_ids=_ids(config.bos_token_id),
    )


def softcap_of(text_config: Any) -> float | None:
    """The bound that the target's head keeps its logits within, smoothly (Gemma)."""
    return getattr(text_config, "final_logit_softcapping", None)


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _generation_eos(path: str) -> tuple[int, ...]:
    file = Path(path) / "generation_config.json"
    return _ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")) if file.is_file() else ()


def _check_no_drafter(config: dict[str, Any], path: str) -> None:
    """Raises ValueError where it is a drafter's: transformers would open that as a model with random embedding and head."""
    if {"dflash_config", "speculators_model_type"} & config.keys():
        verifier = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
        target = config.get("target_model") or verifier or "the model that it was trained for"
        raise ValueError(
            f"target.path {path!r} is a DFlash drafter, not a standalone model: it has no embedding and head of its own; name {target}"
        )


def choose_attention(wanted: str, device: str) -> str:
    """The target's attention for a device: flash-attn where it can be, SDPA else. Raises ValueError if it was asked for and cannot."""
    possible = device.startswith("cuda") and importlib.util.find_spec("flash_attn") is not None
    if wanted == "flash_attention_2" and not possible:
        raise ValueError(f"target.attention flash_attention_2 needs CUDA and the flash-attn package; device is {device}")
    if wanted == "auto":
        return "flash_attention_2" if possible else "sdpa"
    return wanted


def load_model(path: str, *, dtype: str, device: str, attention: str, layers: int | None = None) -> Any:
    """The whole causal LM in eval mode, frozen; `device` may join several, as cuda:0+cuda:1.

    `layers`: its decoder alone, with the first so many; the rest, and the head, never come to the device.
    """
    from transformers import AutoModelForCausalLM

    chosen: str | None = choose_attention(attention, device)
    if attention == "auto" and chosen == "sdpa":
        chosen = None  # transformers' own choice is the same, but for a target without SDPA, which computes eagerly
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation=chosen)
    decoder, places = decoder_of(model), parts(device)
    if layers is not None:
        model, decoder.layers = decoder, decoder.layers[:layers]
    model = model.to(device) if len(places) == 1 else spread(model, decoder, places)
    return model.eval().requires_grad_(False)


def decoder_of(model: Any) -> Any:
    """The module that holds `layers`, found by structure."""
    decoder = model.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(f"{type(model).__name__}: no list of decoder layers found, so nothing can be tapped")
    return decoder


class Taps:
    """Forward hooks that keep the outputs of some decoder layers for the last forward pass."""

    def __init__(self, decoder: Any, layer_ids: Sequence[int]) -> None:
        self._decoder = decoder
        self._seen: dict[int, Tensor] = {}
        self._ids = tuple(layer_ids)
        for i in self._ids:
            decoder.layers[i].register_forward_hook(self._keep(i))

    def _keep(self, layer_id: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._seen[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    def take(self) -> Tensor:
        """Tapped states side by side [B, T, K*H] on the embedding's device, forgotten here."""
        device = self._decoder.get_input_embeddings().weight.device
        return torch.cat([self._seen.pop(i).to(device, non_blocking=True) for i in self._ids], dim=-1)


class TapReplica:
    """One target replica, on one device or spread over several: no head, no layer after the last tap, but in a full one.

    `home`: where batches go, and where their states come from.
    `packed`: a batch is read as one row of documents without padding, each seeing itself only.
    `teacher`: all layers stay, and the state after the final norm, from which the head makes the target's distribution, is kept.
    `full`: head and later layers stay in memory for `whole`; tapping does not run them.
    """

    def __init__(
        self,
        path: str,
        *,
        layer_ids: Sequence[int],
        dtype: str,
        device: str,
        attention: str,
        packed: bool = False,
        teacher: bool = False,
        full: bool = False,
    ) -> None:
        self.path, self.dtype, self.home, self.packed, self._teacher = path, dtype, home(device), packed, teacher
        layers = sys.maxsize if teacher else max(layer_ids) + 1
        model = load_model(path, dtype=dtype, device=device, attention=attention, layers=None if full else layers)
        decoder = decoder_of(model) if full else model
        self._whole = (model, decoder.layers) if full else None
        decoder.layers = decoder.layers[:layers]
        self._decoder = decoder
        self._taps = Taps(decoder, layer_ids)

    @contextmanager
    def whole(self) -> Iterator[tuple[Any, Taps]]:
        """The causal LM with all its layers and its head, and its taps, while the block lasts; nothing may be tapped meanwhile."""
        assert self._whole is not None, "the replica was not loaded as a full one"
        model, layers = self._whole
        cut, self._decoder.layers = self._decoder.layers, layers
        try:
            yield model, self._taps
        finally:
            self._decoder.layers = cut

    def tap(self, batch: Batch) -> TappedBatch:
        """Hidden states of a right-padded batch. No mask: a causal model's real positions do not see the padding."""
        if self.home == "cpu":
            torch.set_num_threads(1)
        with torch.no_grad():
            ids = batch.input_ids.to(self.home).long()
            if self.packed:
                return TappedBatch(batch=batch, **self._tap_packed(ids, batch.lengths.to(self.home).long()))
            return TappedBatch(batch=batch, **self._read(ids))

    def _read(self, ids: Tensor, positions: Tensor | None = None) -> dict[str, Any]:
        """States of `ids` [B, T] by their name in TappedBatch."""
        last = self._decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        return {"target_hidden": self._taps.take(), **({"last_hidden": last} if self._teacher else {})}

    def _tap_packed(self, ids: Tensor, lengths: Tensor) -> dict[str, Any]:
        """States [B, T, ...], zero on padding, from one packed row [1, sum of lengths].

        Positions that begin anew tell transformers where documents end: SDPA gets a block-diagonal mask, flash-attn the bounds.
        """
        document_ids = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths)  # [sum of lengths]
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(len(document_ids), device=ids.device) - starts[document_ids]
        packed = ids[document_ids, positions].unsqueeze(0)
        unpacked = {}
        for name, states in self._read(packed, positions.unsqueeze(0)).items():
            unpacked[name] = states.new_zeros(*ids.shape, states.shape[-1])
            unpacked[name][document_ids, positions] = states.squeeze(0)
        return unpacked


def padding_error(replica: TapReplica, *, row: int, longest: int, vocab_size: int) -> float:
    """How much the taps of a row of `row` tokens change when it is padded with garbage to `longest` beside another row.

    The largest over its tokens of |change| / |state|; a target that reads each row by itself gives rounding errors only.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (2, longest), generator=generator, dtype=torch.int32)

    def states(ids: Tensor, lengths: list[int]) -> Tensor:
        plan = PlannedBatch(number=0, epoch=0, rows=tuple(range(len(lengths))), credit=0)
        mask = torch.zeros_like(ids, dtype=torch.uint8)
        batch = Batch(plan=plan, input_ids=ids, loss_mask=mask, lengths=torch.tensor(lengths, dtype=torch.int32))
        return replica.tap(batch).target_hidden[0, :row].float()

    alone, beside = states(ids[:1, :row], [row]), states(ids, [row, longest])
    size = alone.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)  # a token embedded as zeros may have a state of zeros
    return float(((beside - alone).norm(dim=-1) / size).max())


def check_padding(replica: TapReplica, training: TrainingConfig, *, max_length: int, vocab_size: int) -> None:
    """Raises ValueError, naming the target, where what stands beside a row in `training.batching` changes its hidden states.

    Dynamic rope scaling, experts of limited capacity and quantisation by tensor do that.
    """
    longest = max(1, min(max_length, training.tokens_per_batch // 2))  # of what can stand beside another row
    row = longest if training.batching == "equal" else max(1, longest // 2)
    error = padding_error(replica, row=row, longest=longest, vocab_size=vocab_size)
    if not error <= PADDING_TOLERANCE[replica.dtype]:
        remedy = {
            "padded": "set training.batching to equal, which keeps rows of one length together",
            "packed": "set training.batching to padded",
            "equal": "this target cannot read several rows at once; choose another",
        }[training.batching]
        raise ValueError(
            f"target.path {replica.path!r}: hidden states of a row of {row} tokens change by {error:.2g} (limit "
            f"{PADDING_TOLERANCE[replica.dtype]}) when another of {longest} stands beside it; {remedy}"
        )


class SoftCapped(nn.Module):
    """A head with bounded logits: cap x tanh(logits / cap)."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, states: Tensor) -> Tensor:
        return self.cap * torch.tanh(self.head(states) / self.cap)


class TargetEnds:
    """The target's frozen embedding and head, which the drafter shares; a head that bounds its logits does so here, too."""

    def __init__(self, model: Any) -> None:
        self.embed: nn.Module = model.get_input_embeddings()
        head, cap = model.get_output_embeddings(), softcap_of(model.config.get_text_config())
        self.head: nn.Module = head if cap is None else SoftCapped(head, cap)

    @property
    def head_dtype(self) -> torch.dtype:
        """Precision in which the head wants its states."""
        return next(self.head.parameters()).dtype


def load_ends(path: str, *, dtype: str, device: str, attention: str) -> TargetEnds:
    """Embedding and head alone, in `dtype`; the layers are dropped. Raises ValueError as `check_ends` does."""
    choose_attention(attention, device)
    model = load_model(path, dtype=dtype, device="cpu", attention="auto" if attention == "flash_attention_2" else attention)
    decoder = decoder_of(model)
    decoder.layers = decoder.layers[:1]
    ends = TargetEnds(model)
    check_ends(model, ends, path=path)
    ends.embed.to(device)
    ends.head.to(device)
    return ends


@torch.no_grad()
def check_ends(model: Any, ends: TargetEnds, *, path: str) -> None:
    """Raises ValueError where the target's first layer or its logits are not what `ends` make of token ids and final states.

    Some targets scale embeddings or logits outside of these modules (Granite, Cohere); drafter and engines would not.
    """
    decoder, seen = decoder_of(model), list[Tensor]()

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    hook = decoder.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    ids = torch.arange(4).unsqueeze(0)
    states = decoder(input_ids=ids, use_cache=False).last_hidden_state
    hook.remove()
    for what, own, its in (
        ("embeddings", ends.embed(ids), seen[0]),
        ("logits", ends.head(states), model(input_ids=ids, use_cache=False).logits),
    ):
        if own.shape != its.shape or not torch.allclose(own, its, rtol=1e-3, atol=1e-3 * float(its.abs().max())):
            raise ValueError(
                f"target.path {path!r}: {type(model).__name__} changes its {what} outside of the module that makes them, which a "
                "drafter sharing that module does not; such targets are not supported"
            )
