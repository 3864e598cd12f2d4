"""What each serving engine would do with a drafter directory, ours or not: `python -m flows.evaluate --check-export DIR`.

    DrafterFiles (config, tensor headers) --check_export--> Finding(engine, level, text) ...

Nothing is loaded or run: names, shapes and settings decide. What an engine gets wrong silently costs acceptance and nothing else, so
losslessness would not show it. The engines' rules are those of their versions of August 2026.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_core.decoding.card import sglang_command, vllm_command
from dflash_core.decoding.export import SIZES, parse_shape
from dflash_core.decoding.layouts import FLOATS, DrafterFiles, contradictions, open_drafter, stored_rope
from dflash_core.modeling.drafter import tensor_shapes

ZLAB, GENERATE, VLLM, SGLANG, ALL = "transformers (z-lab)", "transformers generate", "vLLM", "SGLang", "all"
OLDER = "MLX and older loaders"
PRECISIONS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
KINDS = ("full_attention", "sliding_attention")
TAPS = ("mask_token_id", "target_layer_ids")
HEADS = ("domino", "dspark")  # projector types that add to the drafts
Level = Literal["refused", "differs", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that an engine does: refused (it does not load), differs (it serves another drafter, silently), or a note."""

    engine: str
    level: Level
    text: str


def check_export(directory: Path) -> list[Finding]:
    """All findings about a drafter directory; without one that is refused or differs, every engine serves what was trained.

    Raises ValueError where it is none, damaged, or not in safetensors.
    """
    files = open_drafter(directory)
    rules = (_tensors, _sizes, _vocabulary, _taps, _format, _rope, _windows, _layout, _commands)
    return [finding for rule in rules for finding in rule(files)]


def _found(engine: str, level: Level, text: str) -> Finding:
    return Finding(engine=engine, level=level, text=text)


def _tensors(files: DrafterFiles) -> Iterator[Finding]:
    """Names, shapes and precision."""
    stored = {name: tensor.shape for name, tensor in files.tensors.items()}
    wanted = _wanted_shapes(files)
    if missing := ", ".join(sorted(wanted.keys() - stored.keys())):
        yield _found(SGLANG, "differs", f"missing tensors stay random, silently: {missing}")
        yield _found(f"{VLLM}, {ZLAB}", "refused", f"missing tensors: {missing}")
    biases = {name for name in stored if name.endswith("_proj.bias")} if files.config.get("attention_bias") else set()
    if unknown := ", ".join(sorted(stored.keys() - wanted.keys() - biases)) if wanted else "":
        yield _found(SGLANG, "differs", f"unknown tensors are left out, silently: {unknown}")
        yield _found(VLLM, "refused", f"unknown tensors: {unknown}")
    for name in sorted(stored.keys() & wanted.keys()):
        if stored[name] != wanted[name]:
            taps = len(files.config["dflash_config"]["target_layer_ids"])
            why = f"{taps} tapped layers of {files.config['hidden_size']} need" if name == "fc.weight" else "the config asks for"
            yield _found(ALL, "refused", f"{name} is {list(stored[name])}; {why} {list(wanted[name])}")
    if renamed := sorted(tensor.name for name, tensor in files.tensors.items() if tensor.name != name):
        names = ", ".join(renamed)
        yield _found(
            ALL, "refused", f"tensors have another layout's names (SGLang knows the prefix model., vLLM encoder.): {names}"
        )
    if files.skipped and files.layout != "speculators":
        yield _found(
            ALL, "note", f"not the drafter's own: {'; '.join(f'{name}, {why}' for name, why in sorted(files.skipped.items()))}"
        )
    precisions = {tensor.dtype for tensor in files.tensors.values()}
    if other := sorted(precisions - set(FLOATS)):
        yield _found(ALL, "refused", f"tensors are {', '.join(other)}, and nothing says how to read them as numbers")
    dtype = str(files.stored.get("dtype") or files.stored.get("torch_dtype"))
    if precisions != {PRECISIONS.get(dtype, dtype)}:
        yield _found(ALL, "note", f"dtype says {dtype}, the tensors are {', '.join(sorted(precisions))}: engines convert them")


def _wanted_shapes(files: DrafterFiles) -> dict[str, tuple[int, ...]]:
    """By the sizes that the config says; none where one is missing, which `_sizes` finds."""
    guess = {"num_target_layers": 0, "block_size": 0, "rope_theta": 0.0}  # on which no tensor depends
    said = {key: files.config[key] for key in SIZES.values() if key in files.config and key not in guess}
    own = {"mask_token_id": 0, **files.config["dflash_config"]}
    try:
        return tensor_shapes(parse_shape({**guess, **said, "dflash_config": {key: own[key] for key in TAPS if key in own}}, ""))
    except ValueError:
        return {}


def _sizes(files: DrafterFiles) -> Iterator[Finding]:
    """What an engine would guess."""
    elsewhere = ("rope_theta", "block_size", "num_target_layers")  # rules of their own
    if absent := [key for key in SIZES.values() if key not in files.sizes and key not in elsewhere]:
        yield _found(ALL, "differs", f"{', '.join(absent)} missing: engines take those of a plain Qwen3")
    for key in TAPS:
        if key not in files.config["dflash_config"]:
            yield _found(ALL, "differs", f"{key} is missing, so each engine guesses")
    for text in contradictions(files):
        yield _found(ALL, "differs", text)


def _vocabulary(files: DrafterFiles) -> Iterator[Finding]:
    mask, rows = files.config["dflash_config"].get("mask_token_id"), files.config.get("vocab_size")
    if mask is not None and rows and not 0 <= mask < rows:
        yield _found(ALL, "refused", f"mask_token_id {mask} is outside the vocabulary of {rows}")
    if files.reduced_vocabulary is not None:
        text = f"a vocabulary of {files.reduced_vocabulary} of {rows} tokens is not read: drafts are other tokens"
        yield _found(f"{SGLANG}, {ZLAB}", "differs", text)
        if absent := [name for name in ("d2t", "lm_head.weight") if name not in files.skipped]:
            yield _found(VLLM, "refused", f"a reduced vocabulary without {', '.join(absent)}")


def _taps(files: DrafterFiles) -> Iterator[Finding]:
    """Which hidden states an engine would read."""
    ids, layers = files.config["dflash_config"].get("target_layer_ids") or [], files.config.get("num_target_layers")
    if any(a >= b for a, b in itertools.pairwise(ids)):
        yield _found(ALL, "note", f"target_layer_ids {ids} do not rise")
    if outside := [i for i in ids if i < 0 or (layers and i >= layers)]:
        yield _found(ALL, "refused", f"target_layer_ids {outside}: the target has layers 0..{layers - 1 if layers else '?'}")
    if layers and layers - 1 in ids:
        yield _found(ALL, "differs", f"target_layer_ids {ids}: the last layer ({layers - 1}), seen before the final norm by engines and "
                     "after it by transformers; SGLang may not find it at all")  # fmt: skip
    for place in (files.stored, files.nested):
        aux = place.get("eagle_aux_hidden_state_layer_ids")
        if aux is not None and aux != [i + 1 for i in ids]:
            yield _found(VLLM, "differs", f"eagle_aux_hidden_state_layer_ids {aux} go before target_layer_ids {ids} and are counted "
                         "one higher")  # fmt: skip
    if files.layout != "speculators" and layers is None:
        yield _found(ZLAB, "refused", "num_target_layers is missing")


def _format(files: DrafterFiles) -> Iterator[Finding]:
    """Whose loader knows it."""
    stored = files.stored
    if files.layout == "speculators":
        yield _found(f"{ZLAB}, {SGLANG}", "refused", "speculators format, which vLLM alone reads; MLX does not know it either")
    else:
        names = stored.get("architectures") or []
        if names != ["DFlashDraftModel"]:
            yield _found(f"{VLLM}, {SGLANG}", "refused", f"architectures {names}; they know DFlashDraftModel")
        if (kind := stored.get("model_type")) != "qwen3":
            yield _found(f"{VLLM}, {SGLANG}", "refused", f"model_type {kind}; their config loaders know qwen3")
    if files.layout != "speculators" and not files.nested:
        yield _found(f"{VLLM}, {ZLAB}", "refused", "no dflash_config: SGLang alone reads its settings at the top level")
    if (activation := files.config.get("hidden_act", "silu")) != "silu":
        yield _found(SGLANG, "refused", f"hidden_act {activation}; it knows silu")
    if (head := files.nested.get("projector_type")) in HEADS:
        yield _found(VLLM, "differs", f"projector_type {head}: its head is left out of the drafts")
    if files.layout != "speculators" and "auto_map" not in stored:
        yield _found(ZLAB, "note", "no auto_map: opened by z-lab's own class, not by AutoModel; the other engines need none")
    elif files.layout != "speculators":
        yield _found(
            ALL, "note", "auto_map names code, which AutoModel runs with trust_remote_code alone; vLLM and SGLang do not"
        )
    yield _found(
        GENERATE,
        "note",
        "takes it from load_export of this package; opened by AutoModel it would be a Qwen3 with random embedding and head",
    )


def _rope(files: DrafterFiles) -> Iterator[Finding]:
    sizes, rope = files.sizes, stored_rope(files.sizes)
    if "rope_theta" not in files.config:
        yield _found(ALL, "differs", "no rope_theta: engines take 1e6 or 1e4, whatever was trained")
    elif sizes.get("rope_theta") is None:
        yield _found(OLDER, "differs", "rope_theta only inside rope_parameters: they take a default")
    if leaked := sorted(key for key in rope if key.startswith("mrope") or key == "partial_rotary_factor"):
        yield _found(
            ALL, "differs", f"rope_parameters has the target's {', '.join(leaked)}: only a part of each head would be rotated"
        )
    old, new = (_schema(place) for place in (sizes.get("rope_scaling") or {}, rope))
    if rope and sizes.get("rope_scaling") and old != new:
        yield _found(ALL, "differs", f"rope_scaling {old} and rope_parameters {new} contradict each other")
    elif new["rope_type"] != "default" and not sizes.get("rope_scaling"):
        yield _found(OLDER, "differs", f"{new['rope_type']} scaling only inside rope_parameters: they do not scale")


def _schema(rope: dict[str, Any]) -> dict[str, Any]:
    """How positions are scaled, without the base and by the newer of two names."""
    own = {key: value for key, value in rope.items() if key not in ("type", "rope_theta")}
    return {"rope_type": rope.get("type", "default"), **own}


def _windows(files: DrafterFiles) -> Iterator[Finding]:
    """Who sees what inside a block, and how far back."""
    types, layers, nested = files.config.get("layer_types"), files.config.get("num_hidden_layers"), files.nested
    if types is None and files.layout != "speculators":
        yield _found(ZLAB, "refused", "layer_types is missing")
    elif types is not None and len(types) != layers:
        yield _found(ALL, "refused", f"layer_types has {len(types)} entries for {layers} layers")
    if other := sorted(set(types or ()) - set(KINDS)):
        yield _found(ALL, "refused", f"layer_types {', '.join(other)}; engines know {' and '.join(KINDS)}")
    sliding, mixed = "sliding_attention" in (types or ()), len(set(types or ())) == 2
    window = files.config.get("sliding_window")
    if sliding and not window:
        yield _found(ALL, "differs", "sliding layers without sliding_window: each engine takes another width, or none")
    if nested.get("use_swa"):
        yield _found(f"{SGLANG}, {ZLAB}", "differs", "dflash_config.use_swa is not known there: windows become full attention")
    if window and nested.get("swa_window_size", window) != window:
        text = f"dflash_config.swa_window_size {nested['swa_window_size']} goes before sliding_window {window}"
        yield _found(VLLM, "differs", text)
    causal = files.stored.get("is_causal", nested.get("causal"))
    if files.layout == "speculators":
        causal = not files.stored.get("sliding_window_non_causal", True)
        if causal and (not sliding or mixed):
            yield _found(
                VLLM, "differs", "without sliding_window_non_causal every layer is causal inside the block, full ones, too"
            )
    elif causal and (not sliding or mixed):
        yield _found(f"{SGLANG}, {ZLAB}", "differs", "is_causal is not read: full layers see the whole block there")
    if sliding and causal is False:
        yield _found(SGLANG, "differs", "sliding layers are always causal inside the block there")
    if sliding and causal is not False:
        yield _found(ZLAB, "differs", "sliding layers see the whole context and block under sdpa")
    if mixed:
        yield _found(VLLM, "note", "full and sliding layers together need VLLM_USE_V2_MODEL_RUNNER=1")


def _layout(files: DrafterFiles) -> Iterator[Finding]:
    """Which slot predicts which token, and how many there are."""
    outer, inner = files.stored.get("block_size"), files.nested.get("block_size")
    if outer is None and inner is None:
        yield _found(ALL, "differs", "block_size is missing: SGLang takes 16")
    elif outer is None:
        yield _found(ZLAB, "refused", "block_size is missing at the top level")
    if _from_anchor(files):
        text = "slot k predicts the token after anchor + k (from-anchor layout): engines read slot k as anchor + k, or refuse it"
        yield _found(ALL, "differs", text)


def _from_anchor(files: DrafterFiles) -> bool:
    places = (files.stored, files.nested)
    return any(place.get(key) for place in places for key in ("sample_from_anchor", "shift_label"))


def _commands(files: DrafterFiles) -> Iterator[Finding]:
    """How each engine is started with it."""
    size = files.config.get("block_size")
    if size is None or _from_anchor(files):
        return
    target = files.config.get("target_model") or "TARGET"
    yield _found(VLLM, "note", f"block_size is not read, the option counts: {vllm_command(target, str(files.directory), size)}")
    if files.layout != "speculators":
        yield _found(SGLANG, "note", f"counts the anchor, too: {sglang_command(target, str(files.directory), size)}")
