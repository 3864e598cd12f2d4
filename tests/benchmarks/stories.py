"""How good a drafter gets in so many CPU-seconds of training: `python -m tests.benchmarks.stories --dir DIR --set training.loss=kl`.

The setting in which public trainers were measured: the target stories260K (DFLASH_TEST_ASSETS), 1500 of its own texts, 60 held-out
openings; taps 1, 2, 3; 3 layers of hidden 64, 4/2 heads of 16, MLP 172; block 8; 16 rows x 12 anchors a step; fp32, one thread.
Seconds are CPU-seconds of training steps without the target's; the rate is set for as many steps as fit. DIR keeps the texts.
"""

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.utils.rnn import pad_sequence

from dflash_core import preparation
from dflash_core.config import Config
from dflash_core.data.batches import BufferPool, assemble
from dflash_core.data.chat import open_chat, served_ids
from dflash_core.data.plan import lay_out, plan
from dflash_core.data.prompts import read_prompts
from dflash_core.data.reader import TokenDataset, find_shards
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.replay import replay_drafter
from dflash_core.decoding.speculate import DecodingTarget, greedy
from dflash_core.decoding.summary import acceptance_length
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, load_ends, load_model, read_facts
from dflash_core.records import TappedBatch
from dflash_core.rundir import RunDirectory
from dflash_core.sizes import needs_teacher, resolve
from dflash_core.training.trainer import Trainer
from tests.fakes import make_batch
from tests.slow.test_stories260k import TEMPLATE, stories

HELD_OUT, TEXTS = 60, 1500
TIMED_STEPS = 25  # of a throwaway drafter, to know how many fit


def make_config(root: Path, changes: list[str]) -> Config:
    """The setting above, with `training.loss=kl` and the like changed."""
    values: dict[str, Any] = {
        "name": "stories",
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": str(root / "texts.jsonl"), "max_length": 320, "min_kept": 0.8},
        "drafter": {"num_layers": 3, "block_size": 8, "target_layer_ids": [1, 2, 3], "mask_token_id": 3}
        | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 172},
        "training": {"epochs": 10_000, "tokens_per_batch": 5120, "anchors_per_row": 12, "anchors_per_batch": 192}
        | {"learning_rate": 1.6e-2},
        "evaluation": {"prompts": str(root / "openings.jsonl"), "max_new_tokens": 200, "dtype": "float32"},
        "places": {"runs": str(root / "runs")},
    }
    for change in changes:
        key, value = change.split("=", 1)
        section, field = key.split(".")
        values[section][field] = yaml.safe_load(value)
    return Config.model_validate(values)


def write_texts(root: Path) -> None:
    """The target beside its own texts: openings are sampled, the rest is greedy; held-out openings are in no text."""
    root.mkdir(parents=True, exist_ok=True)
    shutil.copytree(Path(os.environ["DFLASH_TEST_ASSETS"]) / "stories260K", root / "target", copy_function=shutil.copyfile)
    (root / "target").chmod(0o755)
    (root / "target" / "chat_template.jinja").write_text(TEMPLATE)
    pairs = list(stories(root / "target", TEXTS, seed=0))
    known = {opening for opening, _ in pairs}
    held_out = [opening for opening, _ in stories(root / "target", HELD_OUT + 30, seed=1) if opening not in known][:HELD_OUT]
    (root / "openings.jsonl").write_text("".join(json.dumps({"turns": [opening]}) + "\n" for opening in held_out))
    with open(root / "texts.jsonl", "w") as file:
        for opening, rest in pairs:
            messages = [{"role": "user", "content": opening}, {"role": "assistant", "content": rest}]
            file.write(json.dumps({"messages": messages}) + "\n")


class Bench:
    """Rows with what the target says about them, and held-out texts, all made once and outside of any time."""

    def __init__(self, config: Config) -> None:
        run = RunDirectory(root=Path(config.places.runs) / "stories", state="new")  # changed settings share the shards
        run.root.mkdir(parents=True, exist_ok=True)
        preparation.prepare(config, run)
        self.config = config
        self.shape = resolve(config, read_facts(config.target.path))
        self.dataset = TokenDataset([find_shards(run.shards)])
        self.ends = load_ends(config.target.path, dtype="float32", device="cpu", attention="auto")
        self.replica = TapReplica(
            config.target.path,
            layer_ids=self.shape.target_layer_ids,
            dtype="float32",
            device="cpu",
            attention="auto",
            teacher=True,
        )
        kept = Path(config.places.runs) / "taps.pt"
        if not kept.exists():
            rows = [self.tap(self.dataset.row(i)[0].tolist()) for i in range(len(self.dataset))]
            torch.save((rows, [(text, first, self.tap(text).target_hidden) for text, first in self.answers()]), kept)
        self.rows, self.held_out = torch.load(kept, weights_only=False)

    def tap(self, ids: list[int]) -> TappedBatch:
        """What the target says about one row."""
        return self.replica.tap(make_batch([(ids, [1] * len(ids))]))

    def answers(self) -> Iterator[tuple[list[int], int]]:
        """(text, number of its first generated token) of every held-out opening."""
        model = load_model(self.config.target.path, dtype="float32", device="cpu", attention="auto")
        target = DecodingTarget(model, self.shape.target_layer_ids, device="cpu")
        tokenizer = load_tokenizer(self.config.target.path)
        stop_ids = frozenset(read_facts(self.config.target.path).eos_ids)
        chat = open_chat(tokenizer, stop_ids=stop_ids, date=None, thinking=None)
        for (opening,) in read_prompts(self.config.evaluation.prompts):
            prompt = served_ids(chat, [{"role": "user", "content": opening}])
            alone, _ = greedy(target, prompt, max_new_tokens=self.config.evaluation.max_new_tokens, stop_ids=stop_ids)
            yield [*prompt, *alone.tokens], len(prompt)

    def batches(self, seed: int) -> Iterator[TappedBatch]:
        """Micro-batches as a run has them, their hidden states put together from the rows'."""
        training, lengths = self.config.training, self.dataset.lengths
        layout = lay_out(lengths, self.dataset.supervised, training=training)
        pool = BufferPool(tokens=training.tokens_per_batch, pinned=False)
        for planned in plan(layout, seed=seed, epochs=training.epochs, bytes_per_token=1, position=0):
            batch = assemble(planned, self.dataset, lengths=lengths, pool=pool)
            rows = [self.rows[row] for row in planned.rows]
            hidden = pad_sequence([row.target_hidden[0] for row in rows], batch_first=True)
            last = pad_sequence([row.last_hidden[0] for row in rows], batch_first=True) if needs_teacher(training) else None
            yield TappedBatch(batch=batch, target_hidden=hidden, last_hidden=last)

    def trainer(self, seed: int, steps: int) -> Trainer:
        config = self.config.model_copy(update={"seed": seed})
        return Trainer(new_drafter(self.shape, seed), self.ends, config, total_steps=steps, device="cpu")

    def step_seconds(self) -> float:
        """CPU-seconds of a step."""
        trainer, seconds = self.trainer(0, TIMED_STEPS), []
        for tapped in itertools.islice(self.batches(0), TIMED_STEPS):
            start = time.process_time()
            trainer.train(tapped)
            seconds.append(time.process_time() - start)
        return sum(seconds[3:]) / len(seconds[3:])

    def train(self, seed: int, steps: int) -> dict[str, Any]:
        """Trains that many steps and measures."""
        trainer, spent, last = self.trainer(seed, steps), 0.0, []
        for tapped in self.batches(seed):
            start = time.process_time()
            metrics = trainer.train(tapped)
            spent += time.process_time() - start
            last = [*last[-49:], metrics.loss_sum / metrics.weight_sum]
            if trainer.done:
                break
        drafter, size = trainer.drafter, trainer.drafter.shape.block_size
        rounds = [
            replay_drafter(drafter, self.ends, text[:first], text[first:], taps, block_size=size)
            for text, first, taps in self.held_out
        ]
        return {
            "seed": seed,
            "steps": steps,
            "cpu_s": round(spent, 1),
            "ms_a_step": round(1e3 * spent / steps, 1),
            "loss": round(sum(last) / len(last), 4),
            "acceptance_length": round(acceptance_length(rounds), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, nargs="*", default=[60, 120, 240])
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="instead of --seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.FIELD=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not (arguments.dir / "texts.jsonl").exists():
        write_texts(arguments.dir)
    bench = Bench(make_config(arguments.dir, arguments.set))
    counts = arguments.steps or [int(seconds / bench.step_seconds()) for seconds in arguments.seconds]
    for steps in counts:
        for seed in arguments.seeds:
            print(json.dumps({"set": arguments.set, **bench.train(seed, steps)}), flush=True)


if __name__ == "__main__":
    main()
