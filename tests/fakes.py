"""Small real things that the tests share: a random target with its tokenizer, files of chat, a config.

save_target(DIR)  a Qwen3 of hidden 32 and 4 layers, and a byte-level BPE of 300 tokens with a ChatML template
write_jsonl       conversations and prompts          make_config(ROOT, TARGET, training={...})  a complete Config
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedTokenizerFast, Qwen3Config

from dflash_core.config import Config
from dflash_core.modeling.drafter import Drafter, new_drafter
from dflash_core.records import Batch, DrafterShape, PlannedBatch, StepMetrics

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
END_OF_TEXT, IM_START, IM_END, MASK = range(4)
VOCAB = 300

CHATML = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
NOUNS = ("heron", "lamp", "river", "basket", "coin", "train")
COLOURS = ("green", "red", "pale", "dark")


@functools.cache
def _tokenizer_text() -> str:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text for row in chats(60) for text in (m["content"] for m in row["messages"])], trainer)
    return bpe.to_str()


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """The shared byte-level BPE with a chat template of choice."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_text()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def save_target(
    directory: Path, *, template: str | None = CHATML, seed: int = 0, family: type[Any] = Qwen3Config, **sizes: Any
) -> Path:
    """A random float32 Qwen3 with its tokenizer in `directory`; `sizes` override its config (`num_hidden_layers=6`)."""
    tokenizer = make_tokenizer(template)
    config = family(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            **sizes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        MODEL_FOR_CAUSAL_LM_MAPPING[family](config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def chats(count: int) -> list[dict[str, Any]]:
    """Rows of one or two turns, the same for the same count, of differing length."""
    rows = []
    for i in range(count):
        noun, colour = NOUNS[i % len(NOUNS)], COLOURS[i % len(COLOURS)]
        messages = [
            {"role": "user", "content": f"Tell me about the {colour} {noun}, number {i}."},
            {"role": "assistant", "content": f"The {noun} is {colour}." + f" It has {colour} sides." * (i % 5)},
        ]
        if i % 3 == 0:
            messages += [
                {"role": "user", "content": "And its neighbour?"},
                {"role": "assistant", "content": f"The neighbour of the {noun} is not {colour}."},
            ]
        rows.append({"id": f"c{i:04d}", "messages": messages})
    return rows


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON object a line; a `str` goes in as it stands, so a broken line can be written."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def make_config(root: Path, target_path: Path | str, /, **sections: Any) -> Config:
    """A complete tiny run under `root`: its files are written where they are missing, sections override the defaults.

    `make_config(tmp_path, target, training={"accumulate": 3}, name="other")`
    """
    conversations, prompts = root / "conversations.jsonl", root / "prompts.jsonl"
    if not conversations.exists():
        write_jsonl(conversations, chats(24))
    if not prompts.exists():
        write_jsonl(prompts, [{"turns": [row["messages"][0]["content"]]} for row in chats(4)])
    values: dict[str, Any] = {
        "name": "tiny",
        "target": {"path": str(target_path), "dtype": "float32"},
        "data": {"conversations": str(conversations), "max_length": 128},
        "drafter": {"num_layers": 1, "block_size": 4, "target_layer_ids": [0, 1, 2], "mask_token_id": MASK},
        "training": {
            "epochs": 1,
            "tokens_per_batch": 512,
            "anchors_per_row": 4,
            "anchors_per_batch": 32,
            "checkpoint_every": 2,
        },
        "pipeline": {"ahead_bytes": 2**24},
        "evaluation": {"prompts": str(prompts), "max_new_tokens": 12, "dtype": "float32"},
        "places": {"runs": str(root / "runs")},
    }
    for key, value in sections.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return Config.model_validate(values)


def make_shape(**changes: Any) -> DrafterShape:
    """A small drafter that fits `save_target`."""
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_positions": 512,
        "block_size": 4,
        "mask_token_id": MASK,
        "target_layer_ids": (0, 1, 2),
        "num_target_layers": 4,
    }
    return DrafterShape(**{**sizes, **changes})


def make_drafter(*, seed: int = 1, **changes: Any) -> Drafter:
    """A drafter of `make_shape` with large random weights, norms included, so that every term of its arithmetic matters."""
    drafter = new_drafter(make_shape(**changes), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return drafter


def make_metrics(step: int, **changes: Any) -> StepMetrics:
    """What a step of two rows leaves, with these changes."""
    made = StepMetrics(
        step=step, position=step, epoch=0, micro_batches=1, skipped={}, rows=2, tokens=100, computed_tokens=128, blocks=8,
        loss_sum=10.0 / step, weight_sum=2.0, correct=(0, 4, 2, 1), counted=(0, 8, 8, 8), accepted_sum=6, learning_rate=1e-3,
        gradient_norm=0.5, applied=True, seconds=0.1,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def make_batch(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, number: int = 0, epoch: int = 0, first_row: int = 0
) -> Batch:
    """(input_ids, loss_mask) of rows as a right-padded batch; the rows are numbered from `first_row`."""
    longest = max(len(ids) for ids, _ in rows)
    plan = PlannedBatch(number=number, epoch=epoch, rows=tuple(range(first_row, first_row + len(rows))), credit=0)
    return Batch(
        plan=plan,
        input_ids=torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows], dtype=torch.int32),
        loss_mask=torch.tensor([[*mask, *[0] * (longest - len(mask))] for _, mask in rows], dtype=torch.uint8),
        lengths=torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int32),
    )


def save_config(config: Config, path: Path) -> Path:
    """A config as the YAML file that a command line reads."""
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    return path
