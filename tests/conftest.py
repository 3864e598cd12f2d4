"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest
import torch

from tests import fakes

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target with its tokenizer; only read."""
    return fakes.save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def assets_dir() -> Path:
    """The public assets named by DFLASH_TEST_ASSETS; tests that need them skip without."""
    value = os.environ.get("DFLASH_TEST_ASSETS", "")
    if not value or not Path(value).is_dir():
        pytest.skip("DFLASH_TEST_ASSETS names no directory")
    return Path(value)
