"""A drafter from a short training of the quickstart, damaged copies of its export, and clients that read them in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file, save_file

from dflash_core import assembly, preparation
from dflash_core.data.chat import open_chat, served_ids
from dflash_core.data.prompts import read_prompt_sets
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.modeling.target import read_facts
from dflash_core.rundir import open_run
from flows.settings import load_config
from tests.serving.answers import Answer, Job, read_answers
from tests.serving.reference import Reference, own_answers

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs/quickstart"
SERVING = ROOT / ".venv-serving"
PYTHON = {"vllm": SERVING / "bin/python", "zlab": SERVING / "bin/python", "transformers": Path(sys.executable)}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(SERVING / "cache"),
}
FEW = 10  # prompts for a damaged export


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of half the quickstart's steps."""
    changes = {
        "target.path": str(QUICKSTART / "target"),
        "data.conversations": str(QUICKSTART / "conversations.jsonl"),
        "training.max_steps": 90,
        "during_training.eval_every": None,
        "evaluation.prompts": str(QUICKSTART / "prompts.jsonl"),
        "places.runs": str(tmp_path_factory.mktemp("runs")),
    }
    config = load_config(str(ROOT / "configs/quickstart.yaml"), changes)
    run = open_run(config)
    preparation.prepare(config, run)
    anyio.run(assembly.train, config, run, anyio.Event(), lambda metrics, total: None)
    return assembly.export(config, run)


def changed(config: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**config, "dflash_config": {**config["dflash_config"], **values}}


DAMAGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "taps": lambda config: changed(config, target_layer_ids=[i + 1 for i in config["dflash_config"]["target_layer_ids"]]),
    "mask": lambda config: changed(config, mask_token_id=2),  # the stop token; ids that never occur have much the same embedding
    "rope": lambda config: {**config, "rope_theta": 1e5, "rope_parameters": {**config["rope_parameters"], "rope_theta": 1e5}},
    "layout": dict,  # keys and values change names
}


@pytest.fixture(scope="session")
def damaged(export: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of the export with one thing wrong, which every client loads without a word."""
    root = tmp_path_factory.mktemp("damaged")
    for name, change in DAMAGES.items():
        shutil.copytree(export, root / name)
        config = root / name / "config.json"
        config.write_text(json.dumps(change(json.loads(config.read_text()))))
    weights = root / "layout/model.safetensors"
    swapped = {"k_proj": "v_proj", "v_proj": "k_proj"}
    tensors = load_file(weights)
    renamed = {".".join(swapped.get(part, part) for part in name.split(".")): tensor for name, tensor in tensors.items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    return {name: root / name for name in DAMAGES}


@pytest.fixture(scope="session")
def job(export: Path, damaged: dict[str, Path]) -> Job:
    """Forty held-out prompts for the export, the first few of them for each damaged one."""
    config = load_config(str(ROOT / "configs/quickstart.yaml"), {"evaluation.prompts": str(QUICKSTART / "prompts.jsonl")})
    target = str(QUICKSTART / "target")
    stop_ids = read_facts(target).eos_ids
    chat = open_chat(load_tokenizer(target), stop_ids=frozenset(stop_ids))
    prompts = [served_ids(chat, messages) for messages in read_prompt_sets(config.evaluation)[0].prompts[:40]]
    return Job(
        target=target,
        exports={str(export): prompts, **{str(path): prompts[:FEW] for path in damaged.values()}},
        max_new_tokens=config.evaluation.max_new_tokens,
        stop_ids=list(stop_ids),
        draft_tokens=config.drafter.block_size - 1,
    )


@pytest.fixture(scope="session")
def reference(job: Job, export: Path) -> Reference:
    """Our loop with the export as it is."""
    return own_answers(job, str(export))


@pytest.fixture(scope="session")
def answers_of(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[Answer]]]:
    """Answers of a client, which is run once."""
    file = tmp_path_factory.mktemp("job") / "job.json"
    file.write_text(json.dumps(asdict(job)))

    @cache
    def answers(client: str) -> dict[str, list[Answer]]:
        if not PYTHON[client].exists():
            pytest.fail(f"no {PYTHON[client]}: `make test-serving` builds the environment of the serving engines")
        command = [str(PYTHON[client]), "-m", f"tests.serving.client_{client}", str(file)]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == 0, f"{client}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return read_answers(done.stdout)

    return answers
