"""Promotion against a store: what is registered, when the alias moves, and what a refused drafter keeps."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from mlflow import MlflowClient

from dflash_core import preparation
from dflash_core.config import Config
from dflash_core.data.chat import open_chat, served_ids
from dflash_core.data.prompts import read_prompt_sets
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.export import write_export
from dflash_core.decoding.speculate import decode
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, TargetEnds, load_model, read_facts
from dflash_core.records import Decision, Gate
from dflash_core.rundir import RunDirectory, config_fingerprint, open_run
from dflash_core.sizes import resolve
from dflash_core.training.trainer import Trainer
from flows.mlflow_run import tracking_uri
from flows.promote import promote
from flows.registry import Registry, open_registry
from tests import fakes


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all tests here: making its tables takes seconds."""
    return tmp_path_factory.mktemp("runs")


def exported_run(
    root: Path, target: Path, runs: Path, name: str, *, seed: int = 0, places: dict[str, str] | None = None, **sections: Any
) -> tuple[Config, RunDirectory]:
    """A run that was trained, as promotion finds it; the drafter is random. All runs of one root have the same data."""
    config = fakes.make_config(
        root, target, name=name, places={"runs": str(runs), **(places or {})},
        promotion={"model": root.name, "min_prompts": 4, "min_speedup": 1e-9}, **sections,
    )  # fmt: skip
    run = open_run(config)
    preparation.prepare(config, run)
    shape = resolve(config, read_facts(str(target)))
    write_export(run.export, new_drafter(shape, seed).state_dict(), shape, target=str(target))
    run.training.write_text(json.dumps({"checkpoint": f"checkpoints/{name}", "step": 7}))
    return config, run


def decision(**reasons: str) -> Decision:
    gates = tuple(Gate(name=name, passed=False, reason=reason) for name, reason in reasons.items())
    return Decision(promoted=not gates, gates=gates)


def register(registry: Registry, config: Config, run: RunDirectory, decided: Decision, champion: Any) -> str:
    return registry.register(config, run, decided, lineage={"target": "heron"}, judged={"why": "x"}, champion=champion)


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_the_alias_moves_for_promoted_drafters_only(tmp_path: Path, target_dir: Path, runs: Path) -> None:
    config, run = exported_run(tmp_path, target_dir, runs, f"{tmp_path.name}-a")
    registry = open_registry(config)
    assert registry.fetch_champion(tmp_path / "champion") is None
    assert register(registry, config, run, decision(lossless="3 of 4"), None) == "1"
    assert registry.champion_version() is None
    assert register(registry, config, run, decision(), None) == "2"
    champion = registry.fetch_champion(tmp_path / "champion")
    assert champion is not None
    assert champion.version == "2"
    for file in ("config.json", "model.safetensors"):
        assert (champion.directory / file).read_bytes() == (run.export / file).read_bytes()
    other_config, other = exported_run(tmp_path, target_dir, runs, f"{tmp_path.name}-b", seed=1)
    assert register(registry, other_config, other, decision(better="-0.10", sets="chat"), champion) == "3"
    assert registry.champion_version() == "2"
    client = MlflowClient(tracking_uri=tracking_uri(config))
    tags = client.get_model_version(registry.name, "3").tags
    assert tags["refused.better"] == "-0.10"
    assert tags["refused.sets"] == "chat"
    assert (tags["decision"], tags["compared_with"], tags["target"]) == ("refused", "2", "heron")
    run_id, _, path = tags["report"].removeprefix("runs:/").partition("/")
    assert json.loads(Path(client.download_artifacts(run_id, path, str(tmp_path))).read_text()) == {"why": "x"}


def test_another_champion_meanwhile_ends_the_promotion(tmp_path: Path, target_dir: Path, runs: Path) -> None:
    config, run = exported_run(tmp_path, target_dir, runs, f"{tmp_path.name}-a")
    registry = open_registry(config)
    register(registry, config, run, decision(), None)
    with pytest.raises(ValueError, match=r"another drafter became 'champion' of .* meanwhile; promote again"):
        register(registry, config, run, decision(), None)
    assert registry.champion_version() == "1"


def test_files_that_changed_in_the_store_are_found(tmp_path: Path, target_dir: Path, runs: Path) -> None:
    config, run = exported_run(tmp_path, target_dir, runs, f"{tmp_path.name}-a")
    registry = open_registry(config)
    register(registry, config, run, decision(), None)
    stored = next(file for file in (runs / "mlartifacts").rglob("drafters/*/config.json") if str(run_id(run)) in str(file))
    stored.write_text("{}")
    with pytest.raises(ValueError, match=r"version 1 of .* is not what was registered"):
        registry.fetch_champion(tmp_path / "champion")


def run_id(run: RunDirectory) -> str:
    return (run.root / "mlflow_run.txt").read_text().strip()


def test_a_store_is_needed(tmp_path: Path, target_dir: Path) -> None:
    config = fakes.make_config(tmp_path, target_dir, places={"mlflow_uri": "none"})
    with pytest.raises(ValueError, match="promotion needs MLflow's registry"):
        open_registry(config)


# ---- the flow --------------------------------------------------------------------------------------------------------


def call(config: Config, place: Path, **parameters: Any) -> Any:
    return anyio.run(partial(promote, config=str(fakes.save_config(config, place / f"{config.name}.yaml")), **parameters))


@pytest.mark.usefixtures("api")
def test_what_was_not_trained_is_bad_input(tmp_path: Path, target_dir: Path) -> None:
    config = fakes.make_config(tmp_path, target_dir)
    with pytest.raises(ValueError, match="no such run; train first"):
        call(config, tmp_path)


# ---- with a real server and drafters that learned something -----------------------------------------------------------


def learned(config: Config, steps: int) -> dict[str, torch.Tensor]:
    """Weights of a drafter that was shown the target's answers to the evaluation prompts `steps` times."""
    facts = read_facts(config.target.path)
    shape = resolve(config, facts)
    model = load_model(config.target.path, dtype="float32", device="cpu", attention="auto")
    target = DecodingTarget(model, shape.target_layer_ids, device="cpu")
    chat = open_chat(load_tokenizer(config.target.path), stop_ids=frozenset(facts.eos_ids))
    rows = []
    for messages in read_prompt_sets(config.evaluation)[0].prompts:
        prompt = served_ids(chat, messages)
        [text] = decode(target, [prompt], limits=[config.evaluation.max_new_tokens], stop_ids=frozenset(facts.eos_ids))
        rows.append(([*prompt, *text.tokens], [0] * len(prompt) + [1] * len(text.tokens)))
    trainer = Trainer(new_drafter(shape, 0), TargetEnds(model), config, total_steps=steps, device="cpu")
    replica = TapReplica(config.target.path, layer_ids=shape.target_layer_ids, dtype="float32", device="cpu", attention="auto")
    for number in range(steps):
        trainer.train(replica.tap(fakes.make_batch(rows, number=number)))
    return trainer.drafter.state_dict()


@pytest.mark.slow
@pytest.mark.usefixtures("api")
def test_of_three_drafters_the_better_one_becomes_champion_and_the_broken_one_says_why(
    tmp_path: Path, mlflow_server: str, caplog
) -> None:
    """The alias moves for the first and for the better one, and a measurement apart from any training decides it."""
    target = fakes.save_target(tmp_path / "target", initializer_range=0.3, seed=2)
    prompts = [{"turns": [row["messages"][0]["content"]]} for row in fakes.chats(8)]
    fakes.write_jsonl(tmp_path / "prompts.jsonl", prompts)
    client = MlflowClient(tracking_uri=mlflow_server)

    def run_of(name: str, steps: int) -> tuple[Config, RunDirectory]:
        training = {"learning_rate": 5e-3, "anchors_per_row": 64, "anchors_per_batch": 512, "tokens_per_batch": 4096}
        sections = {"training": training, "evaluation": {"max_new_tokens": 24}, "places": {"mlflow_uri": mlflow_server}}
        config, run = exported_run(tmp_path, target, tmp_path / "runs", name, **sections)
        write_export(run.export, learned(config, steps), resolve(config, read_facts(str(target))), target=str(target))
        return config, run

    good, run = run_of("good", 12)
    assert call(good, tmp_path, dry_run=True) == {"promoted": True, "version": None, "champion": None, "reasons": {}}
    assert "nothing was registered (dry run)" in caplog.text
    assert call(good, tmp_path) == {"promoted": True, "version": "1", "champion": "1", "reasons": {}}
    tags = client.get_model_version(tmp_path.name, "1").tags
    assert tags["config_fingerprint"] == config_fingerprint(good)
    assert tags["data_fingerprint"] == json.loads((run.shards / "manifest.json").read_text())["fingerprint"]
    assert tags["checkpoint"] == "checkpoints/good"
    caplog.clear()
    assert not call(good, tmp_path)["promoted"]
    assert "is the champion already: version 1" in caplog.text

    broken, run = run_of("broken", 1)
    weights = run.export / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused = call(broken, tmp_path)
    assert (refused["promoted"], refused["version"], refused["champion"]) == (False, "2", "1")
    assert list(refused["reasons"]) == ["export"]
    assert client.get_model_version(tmp_path.name, "2").tags["refused.export"] == refused["reasons"]["export"]

    better, _ = run_of("better", 250)
    assert call(better, tmp_path) == {"promoted": True, "version": "3", "champion": "3", "reasons": {}}
    assert client.get_model_version(tmp_path.name, "3").tags["compared_with"] == "1"

    worse, _ = run_of("worse", 11)
    refused = call(worse, tmp_path)
    assert (refused["promoted"], refused["champion"]) == (False, "3")
    assert list(refused["reasons"]) == ["better", "sets"]
    champion = client.get_model_version_by_alias(tmp_path.name, "champion")
    assert str(champion.version) == "3"
