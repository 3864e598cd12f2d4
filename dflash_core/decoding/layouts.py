"""Drafter directories of every common layout, read as if they were ours.

    config.json, tensor headers --open_drafter--> DrafterFiles --check_carried, read_weights--> fp32 tensors by our names

dflash       z-lab, SpecForge, Automodel and ours; Model-Optimizer while training (prefix `dflash_module.` beside the target's tensors)
torchspec    other names of the projection and the norms; `num_target_layers` counts the taps, `target_num_hidden_layers` the layers
speculators  sizes in `transformer_layer_config`, layers counted one higher, copies of the target's embedding and head

Only safetensors are opened, and no code that a directory brings is run: pickled weights and `auto_map` can do anything.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_core.sizes import default_target_layer_ids

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
RENAMED = {  # how others begin a tensor's name: how we do
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
MODULE, PREFIX = "dflash_module.", "model."
LEFT_OUT = {  # tensors of no drafter's own, by our name: why
    "embed_tokens.weight": "a copy of the target's embedding",
    "lm_head.weight": "a copy of the target's head",
    "verifier_lm_head.weight": "a copy of the target's head",
    "verifier_norm.weight": "a copy of the target's final norm",
    "t2d": "a map of the vocabulary, which is the target's",
    "d2t": "a map of the vocabulary, which is the target's",
}
FLOATS = ("BF16", "F16", "F32")  # as safetensors spells them
Layout = Literal["dflash", "torchspec", "speculators"]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The header of one tensor."""

    name: str  # as stored
    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class DrafterFiles:
    """What a drafter directory says about itself and holds."""

    directory: Path
    layout: Layout
    stored: dict[str, Any]  # its config.json
    config: dict[str, Any]  # the same by the keys and the counting of our format; what it does not say is absent
    tensors: dict[str, StoredTensor]  # by our name
    skipped: dict[str, str]  # other tensors, by stored name: why they are left out

    @property
    def sizes(self) -> dict[str, Any]:
        """Where the sizes of the layers are stored."""
        return (self.stored.get("transformer_layer_config") or {}) if self.layout == "speculators" else self.stored

    @property
    def nested(self) -> dict[str, Any]:
        """The `dflash_config` as stored."""
        return self.stored.get("dflash_config") or {}

    @property
    def reduced_vocabulary(self) -> int | None:
        """Rows of a head of its own that has fewer than the target's; None: it has the target's vocabulary."""
        rows, all_rows = self.stored.get("draft_vocab_size"), self.config.get("vocab_size")
        return rows if rows is not None and rows != all_rows else None


def open_drafter(directory: Path) -> DrafterFiles:
    """Config and tensor headers of a drafter directory. Raises ValueError where it is none, damaged, or not in safetensors."""
    stored = _read_json(directory, CONFIG)
    tensors = list(_headers(directory))
    speculators = stored.get("speculators_model_type") == "dflash"
    torchspec = "target_num_hidden_layers" in stored or any(tensor.name.startswith("context_proj.") for tensor in tensors)
    layout: Layout = "speculators" if speculators else "torchspec" if torchspec else "dflash"
    inside = any(tensor.name.startswith(MODULE) for tensor in tensors)
    kept: dict[str, StoredTensor] = {}
    skipped: dict[str, str] = {}
    for tensor in tensors:
        own = our_name(tensor.name)
        if reason := _why_left_out(tensor.name, own, inside=inside):
            skipped[tensor.name] = reason
        elif own in kept:
            raise ValueError(f"{directory}: {kept[own].name} and {tensor.name} are both {own}; keep one of them")
        else:
            kept[own] = tensor
    config = _our_config(stored, layout)
    if "head_dim" not in config and (norm := kept.get("layers.0.self_attn.q_norm.weight")):
        config["head_dim"] = norm.shape[0]
    return DrafterFiles(directory=directory, layout=layout, stored=stored, config=config, tensors=kept, skipped=skipped)


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    if not path.is_file():
        raise ValueError(f"{directory}: no {name}, so this is no drafter directory")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON ({error}); copy or export it again") from error


def _headers(directory: Path) -> Iterator[StoredTensor]:
    """Every tensor of the directory: of the files that an index names, else of all. Raises ValueError."""
    files = sorted(directory.glob("*.safetensors"))
    places: dict[str, str] | None = None
    if (directory / INDEX).is_file():
        places = _read_json(directory, INDEX)["weight_map"]
        files = [directory / name for name in sorted(set(places.values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{directory}: {INDEX} names {', '.join(missing)}, which is not there; copy it again")
    if not files:
        raise ValueError(
            f"{directory}: no .safetensors file; other formats can run code when they are loaded and are not opened: "
            "save the weights as model.safetensors"
        )
    found = set()
    for file in files:
        for tensor in _header(file):
            found.add(tensor.name)
            yield tensor
    if places is not None and (absent := sorted(places.keys() - found)):
        raise ValueError(f"{directory}: {INDEX} names tensors that its files do not hold: {', '.join(absent)}; copy it again")


def _header(file: Path) -> list[StoredTensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return [
                StoredTensor(name=name, file=file, shape=tuple(part.get_shape()), dtype=part.get_dtype())
                for name, part in parts.items()
            ]
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or incomplete ({error}); copy or export it again") from error


def our_name(name: str) -> str:
    """A tensor's name in our format, from that of any layout."""
    name = name.removeprefix(MODULE).removeprefix(PREFIX)
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _why_left_out(name: str, own: str, *, inside: bool) -> str | None:
    """`inside`: the drafter is a module beside the target's own tensors."""
    if inside and not name.startswith(MODULE):
        return "the target's own"
    if "rotary_emb." in own or own.endswith("inv_freq"):
        return "a table of rotary positions, which rope_theta gives"
    return LEFT_OUT.get(own)


def _our_config(stored: dict[str, Any], layout: Layout) -> dict[str, Any]:
    nested = {key: value for key, value in (stored.get("dflash_config") or {}).items() if value is not None}
    config = dict(stored.get("transformer_layer_config") or {} if layout == "speculators" else stored)
    own = {key: nested.get(key, stored.get(key)) for key in ("mask_token_id", "target_layer_ids", "block_size")}
    if layout == "speculators":
        aux = stored.get("aux_hidden_state_layer_ids")
        own["target_layer_ids"] = None if aux is None else [i - 1 for i in aux]
        config.pop("num_target_layers", None)
        config["target_model"] = ((stored.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
        config["sample_from_anchor"] = stored.get("sample_from_anchor")
    elif layout == "torchspec":
        taps, layers = stored.get("num_target_layers"), stored.get("target_num_hidden_layers")
        config["num_target_layers"] = layers
        if own["target_layer_ids"] is None and taps and layers:
            own["target_layer_ids"] = list(default_target_layer_ids(layers, taps))
    rope = stored_rope(config)
    config["rope_theta"] = config.get("rope_theta", rope.get("rope_theta"))
    config["block_size"] = own["block_size"]
    config["dflash_config"] = {**nested, **{key: value for key, value in own.items() if value is not None}}
    said = ("rope_theta", "block_size", "num_target_layers", "target_model", "sample_from_anchor", "head_dim")
    return {key: value for key, value in config.items() if key not in said or value is not None}


def stored_rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary schema of the full layers; some configs have one a kind of layer."""
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def contradictions(files: DrafterFiles) -> list[str]:
    """Settings that the config says in two places, differently."""
    stored, nested, found = files.stored, files.nested, []
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        if None not in (stored.get(key), nested.get(key)) and stored[key] != nested[key]:
            found.append(f"{key} {stored[key]} and dflash_config.{key} {nested[key]} contradict each other")
    theta, other = files.sizes.get("rope_theta"), stored_rope(files.sizes).get("rope_theta")
    if None not in (theta, other) and theta != other:
        found.append(f"rope_theta {theta} and rope_parameters.rope_theta {other} contradict each other")
    return found


def check_carried(files: DrafterFiles) -> None:
    """Raises ValueError where a drafter has what ours cannot have, or says two things at once."""
    faults = contradictions(files)
    names = sorted(tensor.name for tensor in files.tensors.values())
    if biases := [name for name in names if name.endswith(".bias")]:
        faults.append(f"biases: {', '.join(biases)}")
    if fused := [name for name in names if "qkv_proj" in name or "gate_up_proj" in name]:
        faults.append(f"projections in one tensor, which have to be split first: {', '.join(fused)}")
    if quantised := [f"{t.name} {t.dtype}" for t in files.tensors.values() if t.dtype not in FLOATS]:
        faults.append(f"tensors that are no {', '.join(FLOATS)}: {', '.join(sorted(quantised))}")
    if files.reduced_vocabulary is not None:
        faults.append(f"a vocabulary of {files.reduced_vocabulary} of the target's {files.config.get('vocab_size')} tokens")
    if (activation := files.config.get("hidden_act", "silu")) != "silu":
        faults.append(f"hidden_act {activation}, not silu")
    if faults:
        raise ValueError(f"{files.directory} cannot be read as a drafter of ours: {'; '.join(faults)}")


def read_weights(files: DrafterFiles) -> dict[str, Tensor]:
    """The drafter's tensors in fp32, by our names. Raises ValueError where ours cannot have them."""
    check_carried(files)
    weights = {}
    for file in sorted({tensor.file for tensor in files.tensors.values()}):
        with safe_open(file, framework="pt") as tensors:
            for own, tensor in files.tensors.items():
                if tensor.file == file:
                    weights[own] = tensors.get_tensor(tensor.name).to(torch.float32)
    return weights
