"""What each serving engine would do with a drafter directory, ours or not: `python -m flows.evaluate --check-export DIR`.

    config.json, header of model.safetensors --read_export--> Export --check_export--> Finding(engine, level, text) ...

Nothing is loaded or run: names, shapes and settings decide. What an engine gets wrong silently costs acceptance and nothing else, so
losslessness would not show it. The engines' rules are those of their versions of August 2026.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

RENAMED = {  # tensor names of other trainers: ours
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
PREFIXES = ("dflash_module.", "model.")
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")
LAYER = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") + tuple(
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)
Level = Literal["refused", "differs", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that an engine does: refused (it does not load), differs (it serves another drafter, silently), or a note."""

    engine: str
    level: Level
    text: str


@dataclass(frozen=True, kw_only=True)
class Export:
    """What a drafter directory says about itself, whichever format it has."""

    config: dict[str, Any]  # as stored
    model: dict[str, Any]  # sizes of the layers: `config`, or its transformer_layer_config
    speculators: bool
    shapes: dict[str, tuple[int, ...]]  # by the name that our format has
    renamed: tuple[str, ...]  # stored names that differ from it
    dtypes: frozenset[str]

    def find(self, key: str) -> Any:
        """A DFlash setting, nested or at the top; None where absent."""
        nested = self.config.get("dflash_config") or {}
        return nested.get(key, self.config.get(key))

    @property
    def layer_ids(self) -> list[int] | None:
        """Tapped layers, counted as the output of layer i."""
        if self.speculators:
            return [i - 1 for i in self.config.get("aux_hidden_state_layer_ids", [])] or None
        return self.find("target_layer_ids")


def read_export(directory: Path) -> Export:
    """Config and tensor header of a drafter directory. Raises ValueError where it is none, or not in safetensors."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory}: no config.json, so this is no drafter directory")
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory}: no .safetensors file; other formats can run code when they are loaded and are not opened")
    config = json.loads(path.read_text(encoding="utf-8"))
    stored: dict[str, tuple[int, ...]] = {}
    dtypes = set()
    for file in files:
        for name, (shape, dtype) in _header(file).items():
            stored[name] = shape
            dtypes |= {dtype} if name not in ("t2d", "d2t") else set()
    speculators = config.get("speculators_model_type") == "dflash"
    return Export(
        config=config,
        model=config.get("transformer_layer_config", {}) if speculators else config,
        speculators=speculators,
        shapes={our_name(name): shape for name, shape in stored.items()},
        renamed=tuple(sorted(name for name in stored if our_name(name) != name)),
        dtypes=frozenset(dtypes),
    )


def _header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and precision of each tensor of a file."""
    try:
        with safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except SafetensorError as error:
        raise ValueError(f"{file}: damaged or incomplete ({error}); copy or export it again") from error


def our_name(name: str) -> str:
    """A tensor's name in our format, from that of any common layout."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def check_export(directory: Path) -> list[Finding]:
    """All findings about a drafter directory; without one that is refused or differs, every engine serves what was trained."""
    export = read_export(directory)
    found = [*_tensors(export), *_settings(export), *_rope(export), *_windows(export), *_layout(export)]
    return found or [Finding(engine="all", level="note", text="nothing is wrong")]


def _all(level: Level, text: str) -> Finding:
    return Finding(engine="all", level=level, text=text)


def _tensors(export: Export) -> Iterator[Finding]:
    layers = export.model.get("num_hidden_layers", 0)
    wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    wanted |= {f"layers.{i}.{name}.weight" for i in range(layers) for name in LAYER}
    if missing := sorted(wanted - export.shapes.keys()):
        yield Finding(engine="SGLang", level="differs", text=f"missing tensors stay random, silently: {', '.join(missing)}")
        yield Finding(engine="vLLM, transformers", level="refused", text=f"missing tensors: {', '.join(missing)}")
    biases = {name for name in export.shapes if name.endswith("_proj.bias")} if export.model.get("attention_bias") else set()
    if unknown := sorted(export.shapes.keys() - wanted - set(TARGETS_OWN) - biases):
        yield Finding(engine="SGLang", level="differs", text=f"unknown tensors are left out, silently: {', '.join(unknown)}")
        yield Finding(engine="vLLM", level="refused", text=f"unknown tensors: {', '.join(unknown)}")
    if export.renamed:
        names = ", ".join(export.renamed)
        yield _all("refused", f"tensors have another layout's names (SGLang knows the prefix model., vLLM encoder.): {names}")
    ids, hidden, fc = export.layer_ids, export.model.get("hidden_size"), export.shapes.get("fc.weight")
    if ids and hidden and fc and fc != (hidden, len(ids) * hidden):
        yield _all("refused", f"fc.weight is {list(fc)}; {len(ids)} tapped layers of {hidden} need {[hidden, len(ids) * hidden]}")
    dtype = str(export.config.get("dtype") or export.config.get("torch_dtype"))
    short = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(dtype, dtype)
    if export.dtypes != {short}:
        yield _all("note", f"dtype says {dtype}, the tensors are {', '.join(sorted(export.dtypes))}")


def _settings(export: Export) -> Iterator[Finding]:
    for key in ("mask_token_id",) if export.speculators else ("mask_token_id", "target_layer_ids"):
        if export.find(key) is None:
            yield _all("differs", f"{key} is missing, so each engine guesses")
    mask, vocab = export.find("mask_token_id"), export.model.get("vocab_size") or export.config.get("draft_vocab_size")
    if mask is not None and vocab and not 0 <= mask < vocab:
        yield _all("refused", f"mask_token_id {mask} is outside the vocabulary of {vocab}")
    ids, layers = export.layer_ids or [], export.config.get("num_target_layers")
    if any(a >= b for a, b in itertools.pairwise(ids)):
        yield _all("note", f"target_layer_ids {ids} do not rise")
    if layers and any(i >= layers - 1 or i < 0 for i in ids):
        yield _all("differs", f"target_layer_ids {ids}: the last layer ({layers - 1}) or none of the target's, seen before the final "
                   "norm by engines and after it by transformers")  # fmt: skip
    aux = export.find("eagle_aux_hidden_state_layer_ids")
    if not export.speculators and aux is not None and aux != [i + 1 for i in ids]:
        yield Finding(engine="vLLM", level="differs", text=f"eagle_aux_hidden_state_layer_ids {aux} go before target_layer_ids and "
                      "are counted one higher")  # fmt: skip
    if export.speculators:
        yield Finding(engine="transformers (z-lab)", level="refused", text="speculators format; z-lab's loader, SGLang and MLX do not "
                      "know it")  # fmt: skip
    else:
        names = export.config.get("architectures") or []
        if names != ["DFlashDraftModel"]:
            yield Finding(engine="vLLM, SGLang", level="refused", text=f"architectures {names}; they know DFlashDraftModel")
        if layers is None:
            yield Finding(engine="transformers (z-lab)", level="refused", text="num_target_layers is missing")


def _rope(export: Export) -> Iterator[Finding]:
    old, new = export.model.get("rope_theta"), export.model.get("rope_parameters") or {}
    theta = new.get("rope_theta")
    if old is None and theta is None:
        yield _all("differs", "no rope_theta: engines take 1e6 or 1e4, whatever was trained")
    elif old is None:
        yield Finding(
            engine="MLX and older loaders", level="differs", text="rope_theta only inside rope_parameters: they take a default"
        )
    elif theta is not None and theta != old:
        yield _all("differs", f"rope_theta {old} and rope_parameters.rope_theta {theta} contradict each other")
    scaling, own = export.model.get("rope_scaling"), {key: value for key, value in new.items() if key != "rope_theta"}
    if scaling and own and own != scaling:
        yield _all("differs", f"rope_scaling {scaling} and rope_parameters {own} contradict each other")
    if leaked := sorted(key for key in new if key.startswith("mrope") or key == "partial_rotary_factor"):
        yield _all("differs", f"rope_parameters has the target's {', '.join(leaked)}: only a part of each head would be rotated")


def _windows(export: Export) -> Iterator[Finding]:
    types, layers = export.model.get("layer_types"), export.model.get("num_hidden_layers")
    if types is not None and len(types) != layers:
        yield _all("refused", f"layer_types has {len(types)} entries for {layers} layers")
    sliding = "sliding_attention" in (types or ())
    causal = export.config.get("is_causal", (export.config.get("dflash_config") or {}).get("causal"))
    if export.find("use_swa"):
        yield Finding(
            engine="SGLang", level="differs", text="dflash_config.use_swa is not known there: windows become full attention"
        )
    if sliding and "full_attention" in (types or ()):
        yield Finding(engine="vLLM", level="note", text="layers of both kinds need VLLM_USE_V2_MODEL_RUNNER=1")
    if sliding and causal is False:
        yield Finding(engine="SGLang", level="differs", text="sliding layers are always causal inside the block there")
    if sliding and causal is not False:
        yield Finding(
            engine="transformers (z-lab)", level="differs", text="sliding layers see the whole context and block under sdpa"
        )
    if not sliding and causal is True:
        yield Finding(engine="SGLang", level="differs", text="is_causal is not read: full layers see the whole block there")


def _layout(export: Export) -> Iterator[Finding]:
    outer, inner = export.config.get("block_size"), (export.config.get("dflash_config") or {}).get("block_size")
    size = outer if outer is not None else inner
    if size is None:
        yield _all("differs", "block_size is missing: SGLang takes 16")
        return
    if outer is None:
        yield Finding(engine="transformers (z-lab)", level="refused", text="block_size is missing at the top level")
    if None not in (outer, inner) and outer != inner:
        yield _all("differs", f"block_size {outer} and dflash_config.block_size {inner} contradict each other")
    if export.config.get("sample_from_anchor") or export.find("shift_label"):
        yield _all(
            "differs",
            "slot k predicts the token after anchor + k (from-anchor layout): engines read slot k as anchor + k, or refuse it",
        )
        return
    yield Finding(engine="vLLM", level="note", text=f'serve with {{"method": "dflash", "num_speculative_tokens": {size - 1}}}')
    yield Finding(
        engine="SGLang", level="note", text=f"serve with --speculative-algorithm DFLASH --speculative-num-draft-tokens {size}"
    )
