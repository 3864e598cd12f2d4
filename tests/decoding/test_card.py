"""The card says how to serve an export and what was measured, in words and in front matter that hubs read."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from dflash_core.decoding.card import card, sglang_command, vllm_command, write_card
from dflash_core.decoding.export import load_export, write_export
from dflash_core.decoding.summary import report_on
from dflash_core.records import Measurements
from tests.decoding.results import generation, measured
from tests.fakes import make_drafter, make_shape


def front_matter(text: str) -> dict[str, Any]:
    begin, front, _ = text.split("---\n", 2)
    assert begin == ""
    return yaml.safe_load(front)


def test_front_matter_names_the_base_model_of_the_hub_and_no_licence(tmp_path: Path) -> None:
    own = {"pipeline_tag": "text-generation", "tags": ["dflash", "speculative-decoding", "draft-model"]}
    assert front_matter(card(make_shape(), "Qwen/Qwen3-8B")) == {"base_model": "Qwen/Qwen3-8B", **own}
    for local in (str(tmp_path), "configs/quickstart/target"):
        assert front_matter(card(make_shape(), local)) == own


def test_commands_count_draft_tokens_as_each_engine_does() -> None:
    """15 without the anchor, 16 with it; a shell gives the engine what was meant."""
    words = shlex.split(vllm_command("Qwen/Qwen3-8B", "my drafters/b16", 16))
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "dflash", "model": "my drafters/b16", "num_speculative_tokens": 15}
    words = shlex.split(sglang_command("Qwen/Qwen3-8B", "my drafters/b16", 16))
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options == {
        "--model-path": "Qwen/Qwen3-8B",
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": "my drafters/b16",
        "--speculative-num-draft-tokens": "16",
    }


def test_what_the_drafter_is(tmp_path: Path) -> None:
    text = card(make_shape(block_size=8), "Qwen/Qwen3-8B")
    assert "`Qwen/Qwen3-8B`, not a standalone model" in text
    assert "after layers 0, 1, 2 (0-based; the output of that decoder layer)" in text
    assert "block size 8: the anchor and 7 draft tokens a pass" in text
    assert "slot k predicts the token at anchor + k" in text
    assert "mask token id 3" in text
    assert "    " + vllm_command("Qwen/Qwen3-8B", "THIS_DIRECTORY", 8) in text
    assert "    " + sglang_command("Qwen/Qwen3-8B", "THIS_DIRECTORY", 8) in text
    assert "Measured" not in text


def test_measured_numbers_by_set() -> None:
    chat = measured(prompt_set="chat", drafted=generation((0, 0), (3, 3)))
    results = [measured(prompt_set="math"), chat]
    acceptance = report_on(Measurements(results=results, counts={}), block_size=4, dtype="float32")
    report = {**dataclasses.asdict(acceptance), "lossless": "2 / 2"}
    text = card(make_shape(), "Qwen/Qwen3-8B", report=report, how="greedy, float32")
    for piece in (
        "2 held-out requests, 4 verify rounds; greedy, float32. Acceptance length: tokens committed a verify round",
        "| acceptance length, this drafter | 1.50 [1.00, 2.00] |",
        "| acceptance length, n-gram reference | 1.50 |",
        "| acceptance length, target features zeroed | 1.00 |",
        "| lossless (equal to the target alone) | 2 / 2 |",
        "| speed-up over the target alone | 2.00x [2.00, 2.00] |",
        "| math | 1 | 2 | 2.00 [2.00, 2.00] | 2.50 | 1.50 | 1.00 | 2.00x [2.00, 2.00] | 1 / 1 |",
        "| chat | 1 | 2 | 1.00 [1.00, 1.00] |",
    ):
        assert piece in text, piece
    assert "simulated (teacher-forced)" not in text
    assert front_matter(text)["base_model"] == "Qwen/Qwen3-8B"


def test_it_is_refreshed_without_touching_the_weights(tmp_path: Path) -> None:
    export = write_export(tmp_path / "export", make_drafter().state_dict(), make_shape(), target="some/target")
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in export.iterdir()}
    tensors = load_file(export / "model.safetensors")
    write_card(export, "other words")
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in export.iterdir()}
    assert before.keys() == after.keys() == {"README.md", "config.json", "model.safetensors"}
    assert [name for name in before if before[name] != after[name]] == ["README.md"]
    assert (export / "README.md").read_text() == "other words"
    assert load_export(export).state_dict().keys() == tensors.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("target", ["Qwen/Qwen3-8B", "it's here"])
def test_a_target_of_any_name_is_served(target: str) -> None:
    assert shlex.split(vllm_command(target, "d", 8))[2] == target
