"""A run that starts from another drafter is that drafter at its first step, whatever layout it came in, and begins only once."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from dflash_core import assembly, opening, preparation
from dflash_core.config import Config
from dflash_core.data.batches import BufferPool, assemble
from dflash_core.data.plan import lay_out, plan
from dflash_core.decoding.export import load_export
from dflash_core.decoding.warm_start import check_start, start_weights
from dflash_core.modeling.target import TapReplica, load_ends
from dflash_core.records import StepMetrics, TrainResult
from dflash_core.rundir import RunDirectory, check_experiment, config_fingerprint, open_run
from dflash_core.training.checkpoint import latest, load_checkpoint
from dflash_core.training.metrics import step_row
from dflash_core.training.trainer import Trainer
from tests.decoding.directories import LAYOUTS, copies, edit_config, edit_tensors
from tests.fakes import VOCAB, make_config, make_shape

MEASURED = ("loss_sum", "weight_sum", "correct", "counted", "accepted_sum", "gradient_norm")


def train(config: Config, run: RunDirectory, *, stop_at: int = 0) -> TrainResult:
    """Trains in this process; requests a stop when step `stop_at` is logged."""

    async def main() -> TrainResult:
        stop = anyio.Event()

        def on_step(metrics: StepMetrics, total: int) -> None:
            if metrics.step == stop_at:
                anyio.from_thread.run_sync(stop.set)

        return await assembly.train(config, run, stop, on_step)

    return anyio.run(main)


def rows(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    """The directory of a run that was trained and exported, its shards beside."""
    root = tmp_path_factory.mktemp("source")
    training = {"epochs": 30, "max_steps": 30, "learning_rate": 2e-2, "checkpoint_every": 30}
    config = make_config(root, target_dir, name="source", training=training)
    run = open_run(config)
    preparation.prepare(config, run)
    train(config, run)
    assembly.export(config, run)
    return run.root


@pytest.fixture
def make(source: Path, tmp_path: Path, target_dir: Path) -> Callable[..., tuple[Config, RunDirectory]]:
    """`make(name, start, **training)`: a run of six steps on the same rows that starts from `start`."""

    def run_of(name: str, start: Path | None, **training: Any) -> tuple[Config, RunDirectory]:
        own = {"epochs": 4, "max_steps": 6, "warm_start": str(start) if start else None, **training}
        config = make_config(tmp_path, target_dir, name=name, training=own)
        run = open_run(config)
        shutil.copytree(source / "shards", run.shards)
        return config, run

    return run_of


def first_step(config: Config, run: RunDirectory, export: Path) -> dict[str, Any]:
    """What the exported drafter makes of the run's first micro-batch."""
    _, shape = assembly.check(config)
    drafter = load_export(export).requires_grad_(True)
    ends = load_ends(config.target.path, dtype="float32", device="cpu", attention="auto")
    trainer = Trainer(drafter, ends, config, total_steps=6, device="cpu")
    replica = TapReplica(config.target.path, layer_ids=shape.target_layer_ids, dtype="float32", device="cpu", attention="auto")
    with opening.open_data(config, run, vocab_size=VOCAB) as dataset:
        layout = lay_out(dataset.lengths, dataset.supervised, training=config.training)
        planned = next(iter(plan(layout, seed=config.seed, epochs=4, bytes_per_token=1, position=0)))
        batch = assemble(planned, dataset, lengths=dataset.lengths, pool=BufferPool(tokens=512, pinned=False))
        metrics = trainer.train(replica.tap(batch))
    assert metrics is not None
    return json.loads(json.dumps(step_row(metrics)))


@pytest.mark.parametrize("layout", ["ours", "torchspec", "speculators"])
def test_the_first_step_has_the_loss_and_acceptance_of_the_drafter_it_came_from(
    layout: str, make: Callable[..., Any], source: Path, tmp_path: Path
) -> None:
    start = tmp_path / layout
    shutil.copytree(source / "export", start)
    LAYOUTS[layout](start)
    config, run = make("warm", start)
    train(config, run)
    expected, found = first_step(config, run, source / "export"), rows(run)[0]
    assert {key: found[key] for key in MEASURED} == {key: expected[key] for key in MEASURED}
    cold, cold_run = make("cold", None)
    train(cold, cold_run)
    random = rows(cold_run)[0]
    assert found["loss"] < random["loss"] - 0.2
    assert found["simulated_acceptance_length"] > random["simulated_acceptance_length"]


def test_a_resumed_run_does_not_read_it_again(make: Callable[..., Any], source: Path, tmp_path: Path) -> None:
    """Stopped after three steps and its start deleted, it ends with the weights of a run that was never stopped."""
    start = tmp_path / "start"
    shutil.copytree(source / "export", start)
    config, straight = make("straight", start)
    fingerprint = config_fingerprint(config)
    train(config, straight)
    other, run = make("stopped", start)
    assert train(other, run, stop_at=3).stopped
    shutil.rmtree(start)
    assert config_fingerprint(other) == fingerprint
    assembly.check(other)
    assert open_run(other).state == "resume"
    assert train(other, run).step == 6
    weights = [load_checkpoint(path)[0].weights for path in map(latest, (straight.checkpoints, run.checkpoints)) if path]
    assert len(weights) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_content_of_the_start_belongs_to_the_experiment(make: Callable[..., Any], source: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(source / "export", start)
    config, run = make("warm", start)
    before = config_fingerprint(config)
    recorded = json.loads((run.root / "run.json").read_text())
    assert recorded["config_fingerprint"] == before
    (start / "README.md").write_text("other words")
    assert config_fingerprint(config) == before
    edit_tensors(start, lambda tensors: tensors["norm.weight"].add_(1))
    assert config_fingerprint(config) != before
    with pytest.raises(ValueError, match=r"another experiment.*warm_start\.model\.safetensors: '[0-9a-f]{64}' -> '[0-9a-f]{64}'"):
        open_run(config)


def test_another_machine_goes_on_without_the_start(make: Callable[..., Any], source: Path, tmp_path: Path) -> None:
    """Where only the run's copy is fetched, its record says what it started from; a start that is there must be that one."""
    start = tmp_path / "start"
    shutil.copytree(source / "export", start)
    config, run = make("warm", start)
    record = (run.root / "run.json").read_text()
    elsewhere = config.model_copy(update={"places": config.places.model_copy(update={"runs": str(tmp_path / "elsewhere")})})
    edit_tensors(start, lambda tensors: tensors["norm.weight"].add_(1))
    with pytest.raises(ValueError, match=r"s3://here belongs to another experiment.*warm_start\.model\.safetensors"):
        check_experiment(record, elsewhere, "s3://here")
    shutil.rmtree(start)
    check_experiment(record, elsewhere, "s3://here")


def test_a_start_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path, target_dir: Path, source: Path) -> None:
    config = make_config(tmp_path, target_dir, training={"warm_start": str(tmp_path / "exprot")})
    for fresh in (False, True):
        with pytest.raises(ValueError, match=r"training\.warm_start '.*exprot': no directory with \.safetensors files; name an"):
            open_run(config, fresh=fresh)
    assert not (tmp_path / "runs").exists()
    begun = make_config(tmp_path, target_dir, training={"warm_start": str(source / "export")})
    root = open_run(begun).root
    gone = begun.model_copy(update={"training": begun.training.model_copy(update={"warm_start": str(tmp_path / "exprot")})})
    with pytest.raises(ValueError, match="no directory with"):
        open_run(gone, fresh=True)
    assert (root / "run.json").is_file()  # not set aside


# ---- what fits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_hidden_layers 2, here 3: set drafter.num_layers"),
        ({"intermediate_size": 64}, "intermediate_size 48, here 64: set drafter.intermediate_size"),
        ({"num_heads": 8}, "num_attention_heads 4, here 8: set drafter.num_heads"),
        ({"num_kv_heads": 4}, "num_key_value_heads 2, here 4: set drafter.num_kv_heads"),
        ({"head_dim": 16}, "head_dim 8, here 16: set drafter.head_dim"),
        (
            {"target_layer_ids": (0, 1)},
            r"dflash_config.target_layer_ids \[0, 1, 2\], here \[0, 1\]: set drafter.target_layer_ids",
        ),
        ({"mask_token_id": 7}, "dflash_config.mask_token_id 3, here 7: set drafter.mask_token_id"),
        ({"num_target_layers": 6}, "num_target_layers 4, here 6: that is a drafter of another target"),
        ({"hidden_size": 64, "num_layers": 1}, "hidden_size 32, here 64: .*; num_hidden_layers 2, here 1"),
    ],
)
def test_every_difference_is_named_with_its_remedy(export: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"export does not fit this run: {message}"):
        check_start(export, make_shape(**changes))


def test_from_anchor_drafters_and_those_that_say_too_little_are_refused(export: Path) -> None:
    edit_config(export, lambda c: c.update(sample_from_anchor=True))
    with pytest.raises(ValueError, match=r"sample_from_anchor True, here None: its slot k predicts the token after anchor \+ k"):
        check_start(export, make_shape())
    edit_config(export, lambda c: [c.pop("sample_from_anchor"), c["dflash_config"].update(sample_from_anchor=True)])
    with pytest.raises(ValueError, match="sample_from_anchor True, here None"):
        check_start(export, make_shape())
    edit_config(export, lambda c: [c["dflash_config"].pop("sample_from_anchor"), c["dflash_config"].pop("target_layer_ids")])
    with pytest.raises(ValueError, match=r"config\.json does not say dflash_config\.target_layer_ids; write what it was trained"):
        check_start(export, make_shape())


def test_missing_and_unknown_tensors_are_refused(export: Path) -> None:
    edit_tensors(export, lambda t: t.update({"markov_w1.weight": t.pop("layers.1.mlp.up_proj.weight")}))
    with pytest.raises(ValueError, match=r"missing \['layers.1.mlp.up_proj.weight'\], unknown \['markov_w1.weight'\]"):
        check_start(export, make_shape())


def test_what_training_adapts_to_is_logged_and_so_is_every_tensor_left_out(
    export: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_tensors(export, lambda t: t.update({**copies(), "verifier_lm_head.weight": torch.ones(VOCAB, 32)}))
    edit_config(export, lambda c: c.update(layer_types=["sliding_attention", "full_attention"], sliding_window=64))
    edit_config(export, lambda c: c["dflash_config"].update(use_swa=False))  # says no more than its absence
    with caplog.at_level(logging.INFO):
        weights = start_weights(export, make_shape(block_size=8, vocab_size=310, rope_theta=1e6))
    assert len(weights) == 25
    assert [re.sub(r"^\S+ ", "", record.getMessage()) for record in caplog.records if record.levelno == logging.WARNING] == [
        "left out, a copy of the target's embedding: embed_tokens.weight",
        "left out, a copy of the target's head: lm_head.weight, verifier_lm_head.weight",
        "has block_size 4, this run 8: training has to adapt to it",
        "has rope_theta 10000.0, this run 1000000.0: training has to adapt to it",
        "has layer_types ['sliding_attention', 'full_attention'], this run ['full_attention', 'full_attention']: training has to adapt to it",
        "has sliding_window 64, this run None: training has to adapt to it",
        "has vocab_size 300, this run 310: training has to adapt to it",
    ]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert told == [f"training starts from {export}: 25 tensors, dflash layout"]
