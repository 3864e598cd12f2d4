"""Real tokenizers, real templates and public conversations, read from the assets folder."""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_core.records import Conversation

# template: (control tokens of its models, eos_token_id of their generation config, bos, eos)
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str | None, str]] = {
    "GLM-4.6": (
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        None,
        "<|endoftext|>",
    ),
    "MiniMax-M2": (("]~!b[", "]~b]", "[e~["), ("[e~[",), "]~!b[", "[e~["),
    "Mistral-Small-3.2-24B-Instruct-2506": (
        ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]")
        + ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<s>", "</s>"),
        ("</s>",),
        "<s>",
        "</s>",
    ),
    "Qwen-Qwen2.5-7B-Instruct": (
        ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        ("<|im_end|>", "<|endoftext|>"),
        None,
        "<|im_end|>",
    ),
    "deepseek-ai-DeepSeek-V3.1": (
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")
        + ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
        + ("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ("<｜end▁of▁sentence｜>",),
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "ibm-granite-granite-4.0": (
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        ("<|end_of_text|>",),
        None,
        "<|end_of_text|>",
    ),
    "moonshotai-Kimi-K2": (
        ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "<|tool_calls_section_begin|>")
        + ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ("<|im_end|>",),
        None,
        "<|im_end|>",
    ),
    "openai-gpt-oss-120b": (
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|endoftext|>"),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        None,
        "<|return|>",
    ),
}
FAMILIES["GLM-4.7-Flash"] = FAMILIES["GLM-4.6"]
FAMILIES["Qwen-Qwen3-0.6B"] = FAMILIES["Qwen3.5-4B"] = FAMILIES["Qwen-Qwen2.5-7B-Instruct"]
FAMILIES["deepseek-ai-DeepSeek-V3.2"] = FAMILIES["deepseek-ai-DeepSeek-V3.1"]

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}


def tokenizer_bytes(assets: Path, kind: str) -> str:
    """The tokenizer.json of `qwen`, or that of Mistral's sentencepiece model."""
    if kind == "qwen":
        return lzma.decompress((assets / "tokenizers" / "qwen3_tokenizer.json.xz").read_bytes()).decode()
    return _sentencepiece(assets / "tokenizers" / "mistral_instruct_tokenizer_240323.model.v3").to_str()


def with_template(serialized: str, assets: Path, name: str) -> tuple[Any, frozenset[int]]:
    """A tokenizer with a real template, its model's control tokens added, and the stop ids of that model."""
    control, stops, bos, eos = FAMILIES[name]
    backend = Tokenizer.from_str(serialized)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (*control, *stops)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, name_or_path=name, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = (assets / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
    known = backend.get_added_tokens_decoder()
    return tokenizer, frozenset(number for number, token in known.items() if token.content in stops)


def public_conversations(assets: Path, *, every: int = 1) -> Iterator[Conversation]:
    """Each `every`-th row of the public files that has an assistant turn, in the shape that preparation hands on."""
    rows = list(_public_rows(assets / "conversations"))
    for name, row in rows[::every]:
        messages = [_message(turn) for turn in row.get("messages") or row["conversations"]]
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) and tools else tools
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or []] or None
        if any(message["role"] == "assistant" for message in messages):
            yield Conversation(id=name, messages=messages, tools=tools)


def _public_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in ("sharegpt", "sharegpt_tools"):
        for number, row in enumerate(json.loads((folder / f"{file}.json").read_text(encoding="utf-8"))):
            yield f"{file}-{number}", row
    for file in ("openai_tools", "predictable", "near_duplicates"):
        for number, line in enumerate((folder / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()):
            yield f"{file}-{number}", json.loads(line)
    turns = json.loads((folder / "missing_turns.json").read_text(encoding="utf-8"))
    yield "missing_turns", turns if isinstance(turns, dict) else {"conversations": turns[0].get("conversations", turns)}


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    if "role" in turn:
        return {key: value for key, value in turn.items() if value is not None}
    kind, said = turn["from"], turn["value"]
    if kind == "function_call":
        call = json.loads(said)
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "call12345", "type": "function", "function": call}]}
    if kind == "observation":
        return {"role": "tool", "tool_call_id": "call12345", "content": said}
    return {"role": ROLES[kind], "content": said}


def _sentencepiece(path: Path) -> Tokenizer:
    """Mistral's model file as a fast tokenizer: a BPE whose merges are all splits of a piece into two, best score first."""
    from transformers.utils import sentencepiece_model_pb2_new as protocol

    model = protocol.ModelProto()
    model.ParseFromString(path.read_bytes())
    vocab = {piece.piece: number for number, piece in enumerate(model.pieces)}
    merges = []
    for piece in model.pieces:
        if piece.type == 1:
            splits = [(piece.piece[:k], piece.piece[k:]) for k in range(1, len(piece.piece))]
            pairs = [(a, b) for a, b in splits if a in vocab and b in vocab]
            merges += [(-piece.score, pair) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda item: item[0])
    backend = Tokenizer(models.BPE(vocab, [pair for _, pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend
