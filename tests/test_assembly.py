"""The composition root: what it refuses before anything is written."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from transformers import Gemma2Config

from dflash_core import assembly, measurement, preparation
from dflash_core.config import Config
from dflash_core.decoding.evaluate import EvaluationJob, measure
from dflash_core.decoding.export import read_shape
from dflash_core.opening import open_data, shard_places
from dflash_core.records import TrainResult
from dflash_core.rundir import RunDirectory, open_run
from tests.fakes import IM_END, MASK, chats, make_config, save_target, write_jsonl


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"conversations": "tarin.jsonl"}}, rf"data\.conversations 'tarin\.jsonl': no such path in {Path.cwd()};"),
        ({"evaluation": {"prompts": "nowhere.jsonl"}}, rf"evaluation\.prompts 'nowhere\.jsonl': no such file in {Path.cwd()}$"),
        ({"target": {"path": "no_such_model"}}, rf"target\.path 'no_such_model': no such directory in {Path.cwd()},"),
        ({"target": {"attention": "flash_attention_2"}}, r"flash_attention_2 needs CUDA"),
        ({"drafter": {"target_layer_ids": [1, 3]}}, r"layer 3 is the last"),
        ({"drafter": {"target_layer_ids": [1, 4]}}, r"outside 0\.\.2 \(the target has 4 layers\)"),
        ({"drafter": {"target_layer_ids": [1, 1]}}, r"not rising strictly"),
        ({"drafter": {"target_layer_ids": None, "num_layers": 3}}, r"\[1, 1, 1\].*set drafter\.target_layer_ids"),
        ({"drafter": {"mask_token_id": 300}}, r"mask_token_id 300: outside the target's 300 embedding rows"),
        ({"drafter": {"mask_token_id": IM_END}}, r"mask_token_id 2 is the target's eos token"),
        ({"drafter": {"mask_token_id": 0}}, r"mask_token_id 0 is the target's pad token"),
        ({"pipeline": {"targets": ["cpux"]}}, r"device 'cpux' is not known; write cpu or cuda:0"),
        ({"pipeline": {"targets": ["cpu+cpux"]}}, r"device 'cpux' is not known; write cpu or cuda:0"),
        ({"pipeline": {"drafter": "cpu+cpu"}}, r"pipeline\.drafter 'cpu\+cpu': a drafter is on one device"),
        ({"pipeline": {"drafter": "cpu:1"}}, r"device 'cpu:1' is not known"),
        ({"pipeline": {"targets": ["cpu", "cuda:99"]}}, r"device 'cuda:99': this machine has \d+ CUDA devices"),
        ({"pipeline": {"ahead_bytes": 1000}}, r"ahead_bytes 1000 is below 589824"),
        ({"data": {"max_length": 513}, "training": {"tokens_per_batch": 513}}, r"max_length 513 is above the target's 512"),
    ],
)
def test_check_refuses_before_anything_is_written(tmp_path: Path, target_dir: Path, sections: dict[str, Any], words: str) -> None:
    config = make_config(tmp_path, target_dir, **sections)
    with pytest.raises(ValueError, match=words):
        assembly.check(config)
    assert not Path(config.places.runs).exists()


def test_check_gives_the_facts_and_the_drafters_sizes(tmp_path: Path, target_dir: Path) -> None:
    facts, shape = assembly.check(make_config(tmp_path, target_dir))
    stored = json.loads((target_dir / "config.json").read_text())
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (
        stored["num_hidden_layers"],
        stored["hidden_size"],
        stored["vocab_size"],
    )
    assert facts.eos_ids == (IM_END,)
    assert (shape.target_layer_ids, shape.block_size, shape.hidden_size) == ((0, 1, 2), 4, 32)


def prepared(config: Config) -> RunDirectory:
    run = open_run(config)
    preparation.prepare(config, run)
    return run


def train(config: Config, run: RunDirectory) -> TrainResult:
    async def main() -> TrainResult:
        return await assembly.train(config, run, anyio.Event(), lambda metrics, total: None)

    return anyio.run(main)


def logged(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_packed_target_trains_the_same_drafter_from_the_same_plan(tmp_path: Path, target_dir: Path) -> None:
    """The drafter sees rows in any case; only the target's rounding differs, and what it computes."""
    losses = []
    for batching in ("padded", "packed"):
        config = make_config(tmp_path, target_dir, name=batching, training={"batching": batching, "epochs": 2})
        run = prepared(config)
        assert train(config, run).ledger["skipped"] == {}
        losses.append([row["loss"] for row in logged(run)])
    assert len(losses[0]) >= 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_all_variants_of_a_drafter_for_a_gemma_are_trained_exported_and_decoded(tmp_path: Path) -> None:
    """Scaled embeddings, bounded logits, a teacher; windows of both kinds of model; the anchor's slot drafts."""
    target = save_target(
        tmp_path / "target", family=Gemma2Config, seed=2, initializer_range=0.3, final_logit_softcapping=20.0, sliding_window=16,
        query_pre_attn_scalar=8,
    )  # fmt: skip
    drafter = {"num_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = make_config(
        tmp_path,
        target,
        drafter={**drafter, "sample_from_anchor": True},
        training={"loss": {"ce": 0.5, "tv": 0.5}, "loss_weights": "dpace", "epochs": 3, "learning_rate": 5e-3},
        pipeline={"ahead_bytes": 2**25},
    )
    facts, shape = assembly.check(config)
    assert facts.logit_softcap == shape.logit_softcap == 20.0
    run = prepared(config)
    assert train(config, run).ledger["skipped"] == {}
    rows = logged(run)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert all(row["counted"][0] == row["blocks"] for row in rows)
    export = assembly.export(config, run)
    assert read_shape(export)[0] == shape
    job = EvaluationJob(
        export=str(export), shards=shard_places(config, run), target=str(target), attention="auto", device="cpu",
        evaluation=config.evaluation,
    )  # fmt: skip
    measured = measure(job).results
    assert [one.drafted.tokens for one in measured] == [one.target.tokens for one in measured]
    assert max(max(one.drafted.drafted, default=0) for one in measured) == 4


def test_equal_batching_computes_no_padding(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir, training={"batching": "equal"})
    run = prepared(config)
    result = train(config, run)
    assert result.step == result.total_steps > 3
    assert sum(row["rows"] for row in logged(run)) == 24
    assert all(row["tokens"] == row["computed_tokens"] for row in logged(run))


def test_rows_of_the_shards_above_max_length_are_refused_or_cut(tmp_path: Path, target_dir: Path) -> None:
    run = prepared(make_config(tmp_path, target_dir))
    shorter = {"data": {"max_length": 60}, "training": {"tokens_per_batch": 120, "anchors_per_batch": 32}}
    with pytest.raises(ValueError, match=r"rows are longer than data\.max_length 60"):
        train(make_config(tmp_path, target_dir, **shorter), run)
    shorter["training"]["too_long"] = "cut"
    train(make_config(tmp_path, target_dir, **shorter), run)
    rows = logged(run)
    assert sum(row["rows"] for row in rows) == 24
    assert max(row["computed_tokens"] for row in rows) == 120


@pytest.mark.slow
def test_a_config_with_only_what_is_required_goes_from_conversations_to_a_measured_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All defaults but for short texts, on a target with layers enough for them and a token that it does not use itself."""
    save_target(tmp_path / "target", num_hidden_layers=12, max_position_embeddings=4096)
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "c.jsonl", chats(24))
    write_jsonl(tmp_path / "p.jsonl", [{"turns": ["Tell me about the red lamp."]}])
    values = {
        "target": {"path": "target"},
        "data": {"conversations": "c.jsonl"},
        "evaluation": {"prompts": "p.jsonl", "max_new_tokens": 9},
    }
    config = Config.model_validate({"name": "least", **values, "drafter": {"mask_token_id": MASK}})
    assembly.check(config)
    run = open_run(config)
    manifest = preparation.prepare(config, run)
    with open_data(config, run, vocab_size=300) as dataset:
        ids, mask = dataset.row(0)
        assert len(ids) == len(mask) > 0

    async def work() -> TrainResult:
        stop = anyio.Event()
        result = await assembly.train(config, run, stop, lambda metrics, total: None)
        assembly.export(config, run)
        acceptance = await measurement.evaluate(config, run, stop)
        assert acceptance is not None
        assert measurement.write_report(config, run, acceptance)["acceptance_length"] >= 1
        return result

    assert anyio.run(work).step == config.training.epochs
    assert manifest.rows == 24
