"""A random target whose greedy text varies, and a drafter that knows one of its texts by heart."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.export import write_export
from dflash_core.modeling.drafter import new_drafter
from dflash_core.modeling.target import TapReplica, TargetEnds, load_model
from dflash_core.records import DrafterShape
from dflash_core.training.trainer import Trainer
from tests.decoding.texts import LAYERS, alone, prompt_of
from tests.fakes import make_batch, make_config, make_drafter, make_shape, save_target

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def masters() -> dict[str, Tensor]:
    """fp32 weights of a small drafter."""
    return {name: value.clone() for name, value in make_drafter().state_dict().items()}


@pytest.fixture
def export(tmp_path: Path, masters: dict[str, Tensor]) -> Path:
    """The same as an exported directory, each test's own."""
    return write_export(tmp_path / "export", masters, make_shape(), target="some/target")


@pytest.fixture(scope="package")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so large that the text does not run into a loop."""
    return save_target(tmp_path_factory.mktemp("varied"), initializer_range=0.3, seed=2)


@pytest.fixture(scope="package")
def model(target_path: Path) -> Any:
    return load_model(str(target_path), dtype="float32", device="cpu", attention="auto")


@pytest.fixture(scope="package")
def target(model: Any) -> DecodingTarget:
    return DecodingTarget(model, LAYERS, device="cpu")


@pytest.fixture(scope="package")
def overfitted(target_path: Path, target: DecodingTarget, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A drafter of block size 8 trained on one text of the target's own, through taps and trainer as in a run."""
    return overfit(tmp_path_factory.mktemp("overfit"), target_path, target, make_shape(block_size=8))


@pytest.fixture(scope="package")
def overfitted_variant(target_path: Path, target: DecodingTarget, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with all variants at once: 7 slots of which the anchor's drafts too, and a layer with a window of 8 tokens."""
    shape = make_shape(block_size=7, sample_from_anchor=True, sliding_layers=(0,), sliding_window=8, rope_scaling=YARN)
    return overfit(tmp_path_factory.mktemp("variant"), target_path, target, shape)


def overfit(root: Path, target_path: Path, target: DecodingTarget, shape: DrafterShape) -> Any:
    """(prompt, text, drafter)."""
    prompt = prompt_of(5)
    text = alone(target, prompt, 56)
    assert len(set(text)) > 20  # no loop of few tokens
    steps = 260
    training = {"learning_rate": 5e-3, "anchors_per_row": 64, "anchors_per_batch": 64, "loss_decay_gamma": 50.0}
    config = make_config(root, target_path, training=training)
    model = load_model(str(target_path), dtype="float32", device="cpu", attention="auto")
    trainer = Trainer(new_drafter(shape, 0), TargetEnds(model), config, total_steps=steps, device="cpu")
    replica = TapReplica(str(target_path), layer_ids=LAYERS, dtype="float32", device="cpu", attention="auto")
    for number in range(steps):
        batch = make_batch([([*prompt, *text], [0] * len(prompt) + [1] * len(text))], number=number)
        metrics = trainer.train(replica.tap(batch))
        assert metrics is not None
    assert metrics.correct == metrics.counted
    return prompt, text, trainer.drafter.eval()
