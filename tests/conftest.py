"""Fixtures for all tests."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import fakes
from tests.s3 import serve

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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real S3 server on loopback with the bucket `dflash`; the environment variables with which clients find it."""
    with serve(tmp_path_factory.mktemp("s3"), bucket="dflash") as environment:
        yield environment


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix on the S3 server, `s3://dflash/...`; this process's environment points to the server."""
    import s3fs

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # clients are kept by their arguments, which the environment is not one of
    return f"s3://dflash/{uuid.uuid4().hex}"
