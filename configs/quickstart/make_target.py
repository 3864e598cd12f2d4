"""Reproduces the quickstart target: `python configs/quickstart/make_target.py [--out DIR]` (about 10 CPU-minutes).

    grammar -> byte-level BPE -> Qwen3-architecture LM of 0.9 M parameters -> its own greedy answers to fresh requests

Writes into DIR (default: this folder): target/ (config, bf16 weights, tokenizer, chat template), conversations.jsonl
(training requests with the target's answers) and prompts.jsonl (held-out requests). Prints the exact match of the stored
bf16 weights on 200 held-out conversations and fails below 75 %.
"""

import argparse
import itertools
import json
import math
import re
import time
from pathlib import Path

import torch
from grammar import PARTS, STEMS, conversations
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over 4,000 training conversations, ChatML without generation tags.

    Words are learned in syllables, so that each becomes three tokens.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(conversations(seed=0, heldout=False), 4000)
    texts = (piece for messages in sample for message in messages for piece in _syllables(message["content"]))
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _syllables(text: str) -> list[str]:
    """The text, cut between the syllables of every word."""
    first, second, third = ("|".join(part) for part in (STEMS, *PARTS[1:]))
    return re.sub(rf"\b({first})({second})({third})\b", r"\1\0\2\0\3", text).split("\0")


def encode(tokenizer, messages) -> tuple[list[int], list[int]]:
    """Ids of a conversation and 1 where the assistant speaks (its end token included)."""
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        head = f"<|im_start|>{message['role']}\n"
        body = f"{message['content']}<|im_end|>"
        for text, on in ((head, 0), (body, int(message["role"] == "assistant")), ("\n", 0)):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            mask += [on] * len(piece)
    return ids, mask


def train_batches(tokenizer, rows: int):
    """Endless batches of whole conversations [rows, longest]: ids, and 1 where the assistant speaks.

    One conversation a row: packed together, an earlier one would offer other words to copy.
    """
    stream = conversations(seed=1, heldout=False)
    while True:
        pairs = [encode(tokenizer, messages) for messages in itertools.islice(stream, rows)]
        longest = max(len(ids) for ids, _ in pairs)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in pairs])
        mask = torch.tensor([mask + [0] * (longest - len(mask)) for _, mask in pairs])
        yield ids, mask


def train(model, tokenizer, steps: int, rows: int = 12) -> None:
    """AdamW 3e-3, cosine with 5 % warm-up, clip 1. Answers weigh 1, requests 0.05: their words are random."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, i - warm) / (steps - warm)))),
    )
    started = time.process_time()
    shown = []
    for step, (ids, mask) in enumerate(itertools.islice(train_batches(tokenizer, rows), steps)):
        weights = (mask[:, 1:] + 0.05 * (ids[:, 1:] != tokenizer.pad_token_id)).flatten()
        logits = model(input_ids=ids).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        ((losses * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        shown.append(losses[mask[:, 1:].flatten() == 1].mean().item())
        if step % 100 == 99 or step == steps - 1:
            print(
                f"step {step + 1:5d}  loss of answers {sum(shown) / len(shown):.4f}  {time.process_time() - started:.0f} CPU-s",
                flush=True,
            )
            shown = []


@torch.no_grad()
def answer(model, tokenizer, requests: list[list[dict]], limit: int = 120) -> list[str | None]:
    """Greedy answers of the target, a batch at a time; None where it did not stop within `limit` tokens."""
    answers: list[str | None] = []
    for start in range(0, len(requests), 64):
        texts = [
            tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in requests[start : start + 64]
        ]
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        out = model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=limit, do_sample=False
        )
        for row in out[:, inputs["input_ids"].shape[1] :].tolist():
            stop = tokenizer.eos_token_id
            answers.append(tokenizer.decode(row[: row.index(stop)]) if stop in row else None)
    return answers


def answered(model, tokenizer, rows: list[list[dict]]) -> list[list[dict] | None]:
    """The same requests with every assistant turn replaced by the target's own greedy answer; None if one never stops."""
    done: list[list[dict] | None] = [[] for _ in rows]
    for turn in range(max(len(row) for row in rows) // 2):
        open_rows = [i for i, row in enumerate(rows) if len(row) > 2 * turn and done[i] is not None]
        requests = [done[i] + [rows[i][2 * turn]] for i in open_rows]
        for i, request, text in zip(open_rows, requests, answer(model, tokenizer, requests), strict=True):
            done[i] = None if text is None else [*request, {"role": "assistant", "content": text}]
    return done


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--prompts", type=int, default=240)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    tokenizer = make_tokenizer(vocab_size=960)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, args.steps)

    target = args.out / "target"
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    wanted = list(itertools.islice(conversations(seed=2, heldout=True), 200))
    exact = sum(got == want for got, want in zip(answered(model, tokenizer, wanted), wanted, strict=True))
    print(f"exact match on held-out templates and words: {exact}/200", flush=True)

    rows = list(itertools.islice(conversations(seed=3, heldout=False), args.conversations))
    kept = [row for row in answered(model, tokenizer, rows) if row is not None]
    print(f"answered {len(kept)} of {len(rows)} requests")
    write_jsonl(args.out / "conversations.jsonl", [{"id": f"q{i:05d}", "messages": row} for i, row in enumerate(kept)])
    prompts = itertools.islice(conversations(seed=4, heldout=True), args.prompts)
    write_jsonl(args.out / "prompts.jsonl", [{"turns": [m["content"] for m in row[::2]]} for row in prompts])
    if exact < 150:
        raise SystemExit("the target does not copy well enough: exact match below 75 %")


if __name__ == "__main__":
    main()
