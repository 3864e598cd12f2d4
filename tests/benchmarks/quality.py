"""How good a drafter gets in so many CPU-seconds of training, whatever decides it: objective, optimizer, layout.

    python -m tests.benchmarks.quality stories --dir DIR --seconds 60 120 240 --set training.loss=kl --set training.loss=lk

Each --set is a variant of the setting, one or several SECTION.FIELD=VALUE; without one the setting itself. Settings:

    stories      that in which public trainers were measured: the target stories260K (DFLASH_TEST_ASSETS), 1500 of its own texts, 60
                 held-out openings; taps 1, 2, 3; 3 layers of hidden 64, 4/2 heads of 16, MLP 172; block 8; 16 rows x 12 anchors a step
    quickstart   configs/quickstart.yaml, 60 of its held-out prompts

fp32, one thread. Seconds are CPU-seconds of training steps without the target's; the schedule is as long as so many steps. DIR keeps
the texts and what the target says about them.
"""

import argparse
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch.nn.utils.rnn import pad_sequence

from dflash_core import preparation
from dflash_core.config import Config
from dflash_core.data.batches import BufferPool, assemble
from dflash_core.data.chat import open_chat, served_ids
from dflash_core.data.plan import lay_out, plan
from dflash_core.data.prompts import read_prompt_sets
from dflash_core.data.reader import TokenDataset, find_shards
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.replay import replay_drafter
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


def stories_setting(root: Path) -> dict[str, Any]:
    """Values of the setting `stories`; writes the target's texts where they are not there."""
    if not (root / "texts.jsonl").exists():
        write_texts(root)
    return {
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": str(root / "texts.jsonl"), "max_length": 320, "min_kept": 0.8},
        "drafter": {"num_layers": 3, "block_size": 8, "target_layer_ids": [1, 2, 3], "mask_token_id": 3}
        | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 172},
        "training": {"tokens_per_batch": 5120, "anchors_per_row": 12, "anchors_per_batch": 192, "learning_rate": 1.6e-2},
        "pipeline": {},
        "evaluation": {"prompts": str(root / "openings.jsonl"), "max_new_tokens": 200, "dtype": "float32"},
    }


def quickstart_setting() -> dict[str, Any]:
    """Values of the setting `quickstart`."""
    values = yaml.safe_load(Path("configs/quickstart.yaml").read_text(encoding="utf-8"))
    values["training"].pop("max_steps")
    values["evaluation"]["num_prompts"] = HELD_OUT
    return values


def changed(values: dict[str, Any], root: Path, changes: list[str]) -> Config:
    """The setting with `training.loss=kl` and the like changed."""
    values = json.loads(json.dumps(values)) | {"name": "quality", "places": {"runs": str(root / "runs")}}
    values["training"]["epochs"] = 10_000
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
        run = RunDirectory(root=Path(config.places.runs) / config.name, state="new")  # variants share the shards
        run.root.mkdir(parents=True, exist_ok=True)
        preparation.prepare(config, run)
        self.config = config
        self.shape = resolve(config, read_facts(config.target.path))
        self.dataset = TokenDataset([find_shards(run.shards)])
        self.ends = load_ends(config.target.path, dtype="float32", device="cpu", attention="auto")
        kept = run.root / "taps.pt"
        if not kept.exists():
            replica = TapReplica(
                config.target.path,
                layer_ids=self.shape.target_layer_ids,
                dtype="float32",
                device="cpu",
                attention="auto",
                teacher=True,
            )
            rows = [tap(replica, self.dataset.row(i)[0].tolist()) for i in range(len(self.dataset))]
            torch.save((rows, [(text, first, tap(replica, text).target_hidden) for text, first in answers(config)]), kept)
        self.rows, self.held_out = torch.load(kept, weights_only=False)

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
        trainer, seconds, losses = self.trainer(seed, steps), [], []
        for tapped in self.batches(seed):
            start = time.process_time()
            metrics = trainer.train(tapped)
            seconds.append(time.process_time() - start)
            losses = [*losses[-49:], metrics.loss_sum / metrics.weight_sum]
            if trainer.done:
                break
        drafter, size = trainer.drafter, trainer.drafter.shape.block_size
        drafter.load_state_dict(trainer.snapshot().drafter)  # with training.ema the running mean, as exports take it
        rounds = [
            replay_drafter(drafter, self.ends, text[:first], text[first:], taps, block_size=size)
            for text, first, taps in self.held_out
        ]
        return {
            "seed": seed,
            "steps": steps,
            "cpu_s": round(sum(seconds), 1),
            "ms_a_step": round(1e3 * median(seconds), 1),
            "loss": round(sum(losses) / len(losses), 4),
            "acceptance_length": round(acceptance_length(rounds), 3),
        }


def tap(replica: TapReplica, ids: list[int]) -> TappedBatch:
    """What the target says about one row."""
    return replica.tap(make_batch([(ids, [1] * len(ids))]))


def answers(config: Config) -> Iterator[tuple[list[int], int]]:
    """(text, number of its first generated token) of every held-out prompt, greedy."""
    model = load_model(config.target.path, dtype="float32", device="cpu", attention="auto")
    stop_ids = read_facts(config.target.path).eos_ids
    chat = open_chat(load_tokenizer(config.target.path), stop_ids=frozenset(stop_ids), date=None, thinking=None)
    for prompt in read_prompt_sets(config.evaluation)[0].prompts:
        ids = torch.tensor([served_ids(chat, prompt[:1])])
        limit = config.evaluation.max_new_tokens
        text = model.generate(ids, max_new_tokens=limit, do_sample=False, eos_token_id=list(stop_ids), pad_token_id=stop_ids[0])
        yield text[0].tolist(), ids.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=["stories", "quickstart"])
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, nargs="*", default=[60, 120, 240])
    parser.add_argument("--steps", type=int, nargs="*", default=[], help="instead of --seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--set", nargs="+", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    root = arguments.dir / arguments.setting
    values = stories_setting(root) if arguments.setting == "stories" else quickstart_setting()
    for changes in arguments.set or [[]]:
        bench = Bench(changed(values, root, changes))
        counts = arguments.steps or [int(seconds / bench.step_seconds()) for seconds in arguments.seconds]
        for steps, seed in itertools.product(counts, arguments.seeds):
            print(json.dumps({"set": changes, **bench.train(seed, steps)}), flush=True)


if __name__ == "__main__":
    main()
