"""Tokenization side by side with `datasets.map`: `python -m tests.benchmarks.tokenize [--rows 400] [--rounds 5]`.

    one JSONL file of conversations --ours: selection, parts, shards with checksums--> directory      } same ids, same mask
                                    --load_dataset("json").map(apply_chat_template)--> cache file     }

Both start from the file and end with Arrow files on disk, on one thread; figures are CPU seconds of this process, children
included, and medians over rounds in which they take turns. The rows are public conversations joined to three turns and about 1,500 tokens, with
Qwen3's tokenizer, from the folder that DFLASH_TEST_ASSETS names. The template marks the answers with generation tags, which is
what datasets.map needs; ours is measured with Qwen3's own template as well, which has none.
"""

import argparse
import itertools
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

import pyarrow as pa
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_core import preparation
from dflash_core.config import Config
from dflash_core.data.reader import TokenDataset
from dflash_core.data.workers import Tokenizing
from dflash_core.rundir import open_run
from tests.data.assets import public_conversations, tokenizer_bytes
from tests.data.templates import TAGGED
from tests.fakes import make_config, save_target, write_jsonl

TOKENS = 1500  # a row, about
TURNS = 3
CHARACTERS = 4 * TOKENS
LEAST_RATIO, MOST_BYTES = 1.25, 5.2
BATCH = 64


def turns(assets: Path) -> Iterator[tuple[str, str]]:
    """(question, answer) of public conversations, over and over."""
    pairs = []
    for conversation in public_conversations(assets):
        for asked, told in itertools.pairwise(conversation.messages):
            if (asked["role"], told["role"]) == ("user", "assistant"):
                pairs.append((asked.get("content") or "", told.get("content") or ""))
    pairs = [pair for pair in pairs if all(0 < len(said) < CHARACTERS for said in pair)]
    while True:
        yield from pairs


def make_rows(assets: Path, count: int) -> list[dict[str, Any]]:
    """Conversations of TURNS turns, each row about TOKENS long: a turn is one question and as many answers as fit."""
    found, pairs = [], turns(assets)
    for number in range(count):
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            question, answer = next(pairs)
            while len(answer) < CHARACTERS / TURNS:
                answer += "\n\n" + next(pairs)[1]
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"id": f"r{number}", "messages": messages})
    return found


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process and the children it waited for, and what `work` returned."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    start = used()
    value = work()
    return used() - start, value


def ours(config: Config, how: Tokenizing) -> Path:
    """From the file to shards; returns their directory. The tokenizer is loaded before, as it is for datasets.map."""
    run = open_run(config)
    with preparation.working(run) as work:
        selected = preparation.select(config, run, work)
        with preparation.tokenizer(config, how, selected, work) as tokenize:
            ledgers = [tokenize(part) for part in selected.parts]
        preparation.shard(config, run, work, selected, ledgers)
    return run.shards


def theirs(path: Path, tokenizer: Any, cache: Path, *, batched: bool) -> Any:
    """From the file to the cache file of `map`; returns the data set."""
    import datasets

    keywords = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenize": True}

    def rows(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found = tokenizer.apply_chat_template(batch["messages"], **keywords)
        return {"input_ids": found["input_ids"], "loss_mask": found["assistant_masks"]}

    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "loss_mask": datasets.List(datasets.Value("int8"))}
    )
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    size = {"batched": True, "batch_size": BATCH} if batched else {}
    return loaded.map(rows, remove_columns=loaded.column_names, features=features, load_from_cache_file=False, **size)


def assert_equal(shards: Path, mapped: Any) -> int:
    """Every row of both has the same ids and mask; returns the number of tokens."""
    dataset = TokenDataset(shards)
    assert len(dataset) == len(mapped), (len(dataset), len(mapped), dataset.manifest().ledger["dropped"])
    for place, row in enumerate(mapped):
        ids, mask = dataset.row(place)
        assert ids.tolist() == row["input_ids"], place
        assert mask.tolist() == row["loss_mask"], place
    return int(dataset.lengths.sum())


def compare(root: Path, assets: Path, *, rows: int, rounds: int) -> bool:
    """Prints the table; returns whether the limits hold."""
    path = write_jsonl(root / "conversations.jsonl", make_rows(assets, rows))
    configs = {}
    for name, template in (("tags", TAGGED), ("own", None)):
        target = save_target(root / name, vocab_size=151_936, eos_token_id=151_645)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(tokenizer_bytes(assets, "qwen")),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )
        tokenizer.chat_template = template or (assets / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(encoding="utf-8")
        tokenizer.save_pretrained(target)
        data = {"max_length": 32_768, "near_duplicates": "off", "prompt_overlap": "off"}
        configs[name] = make_config(
            root,
            target,
            name=name,
            data=data,
            drafter={"mask_token_id": 151_669},
            training={"tokens_per_batch": 32_768},
        )
    loaded = {name: preparation.tokenizing(config, None) for name, config in configs.items()}
    tagged = preparation.tokenization.load_tokenizer(configs["tags"].target.path)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(configs["tags"], loaded["tags"]),
        "datasets.map": lambda: theirs(path, tagged, root / "cache", batched=False),
        f"datasets.map, {BATCH} at a time": lambda: theirs(path, tagged, root / "cache", batched=True),
        "ours, Qwen3's own template": lambda: ours(configs["own"], loaded["own"]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first one warms up and is compared
        values = {}
        for name, work in ways.items():
            for left in (root / "cache", root / "runs"):
                shutil.rmtree(left, ignore_errors=True)
            used, values[name] = cpu_seconds(work)
            if number:
                seconds[name].append(used)
            if name == "ours" and not number:
                shutil.copytree(values[name], root / "ours")
            elif name.startswith("datasets") and not number:
                tokens = assert_equal(root / "ours", values[name])
    return report(
        seconds, rows=rows, tokens=tokens, bytes_a_token=sum(f.stat().st_size for f in (root / "ours").glob("*.arrow")) / tokens
    )


def report(seconds: dict[str, list[float]], *, rows: int, tokens: int, bytes_a_token: float) -> bool:
    """The table, and whether the limits hold."""
    print(f"{rows:,} rows of {tokens / rows:,.0f} tokens; ids and masks equal; medians of {len(seconds['ours'])} rounds")
    for name, values in seconds.items():
        middle = statistics.median(values)
        spread = f"{min(values):.2f}-{max(values):.2f}"
        print(f"  {name:<32} {rows / middle:>7,.0f} rows a CPU-second  {tokens / middle:>10,.0f} tokens  ({spread} s)")
    ratios = {
        name: statistics.median(other / own for other, own in zip(values, seconds["ours"], strict=True))
        for name, values in seconds.items()
        if name.startswith("datasets")
    }
    print(
        f"  ratio to {'; to '.join(f'{name}: {ratio:.2f}x' for name, ratio in ratios.items())} (at least {LEAST_RATIO}x the first)"
    )
    print(f"  on disk: {bytes_a_token:.3f} bytes a token (at most {MOST_BYTES})")
    return ratios["datasets.map"] >= LEAST_RATIO and bytes_a_token <= MOST_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    assets = os.environ.get("DFLASH_TEST_ASSETS")
    if not assets:
        sys.exit("DFLASH_TEST_ASSETS names no folder of assets")
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as root:
        good = compare(Path(root), Path(assets), rows=given.rows, rounds=given.rounds)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
