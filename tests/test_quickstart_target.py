"""What is committed under configs/quickstart/: a target that copies, and conversations that are its own answers."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart"


def _module(name: str) -> ModuleType:
    sys.path.insert(0, str(QUICKSTART))
    try:
        spec = importlib.util.spec_from_file_location(name, QUICKSTART / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(QUICKSTART))


@pytest.fixture(scope="module")
def target() -> tuple[ModuleType, Any, Any]:
    """(make_target.py as a module, model, tokenizer)."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    torch.set_num_threads(1)
    make_target = _module("make_target")
    model = Qwen3ForCausalLM.from_pretrained(QUICKSTART / "target", dtype=torch.float32).eval()
    return make_target, model, AutoTokenizer.from_pretrained(QUICKSTART / "target")


def test_it_is_small_and_bf16() -> None:
    """About a million parameters in at most 2 MB, and no generation tags in the template."""
    file = QUICKSTART / "target" / "model.safetensors"
    assert file.stat().st_size <= 2_000_000
    with safe_open(file, framework="pt") as weights:
        assert {str(weights.get_tensor(name).dtype) for name in weights.keys()} == {"torch.bfloat16"}  # noqa: SIM118
    assert "generation" not in (QUICKSTART / "target" / "chat_template.jinja").read_text().replace("add_generation_prompt", "")


def test_it_answers_unseen_requests_exactly(target: tuple[ModuleType, Any, Any]) -> None:
    """At least 75 % exact on held-out templates and words."""
    make_target, model, tokenizer = target
    wanted = list(itertools.islice(make_target.conversations(seed=2, heldout=True), 40))
    got = make_target.answered(model, tokenizer, wanted)
    assert sum(a == b for a, b in zip(got, wanted, strict=True)) >= 30


def test_held_out_requests_share_neither_template_nor_word_with_training() -> None:
    """The two parts of the grammar are disjoint, and both are large."""
    grammar = _module("grammar")
    parts = [set(grammar.templates(heldout)) for heldout in (False, True)]
    assert parts[0].isdisjoint(parts[1])
    assert min(map(len, parts)) > 100
    words = set(grammar.WORDS)
    used: list[set[str]] = []
    for heldout in (False, True):
        texts = itertools.islice(grammar.conversations(seed=5, heldout=heldout), 500)
        used.append(
            {word for row in texts for message in row for word in message["content"].strip(".").replace(".", " ").split()} & words
        )
    assert used[0].isdisjoint(used[1])
    assert len(used[1]) > 100


def test_the_conversations_are_the_targets_own(target: tuple[ModuleType, Any, Any]) -> None:
    """Greedy answers of the committed weights equal the committed ones."""
    make_target, model, tokenizer = target
    lines = (QUICKSTART / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["messages"] for line in lines[::150]]
    assert len(rows) >= 15
    assert make_target.answered(model, tokenizer, rows) == rows


def test_prompts_are_held_out() -> None:
    """At least 200 evaluation prompts, none of them in the training conversations."""
    prompts = [json.loads(line)["turns"] for line in (QUICKSTART / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = (QUICKSTART / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    trained = {json.loads(line)["messages"][0]["content"] for line in lines}
    assert len(prompts) >= 200
    assert trained.isdisjoint(turns[0] for turns in prompts)
