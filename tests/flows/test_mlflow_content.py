"""A drafter on its way to a real MLflow server whose connection breaks (CASES J8)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from dflash_core.files import file_sha256
from dflash_core.rundir import RunDirectory
from flows.mlflow_content import MODEL_TAG, log_drafter
from tests.data.faulty_proxy import faulty_proxy

SIZE = 20 * 2**20


@pytest.mark.slow
def test_an_upload_that_breaks_is_tried_again_and_one_that_keeps_breaking_is_no_model(
    tmp_path: Path, mlflow_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at 60 % of the weights. What is on this disk stays, and the next try sends it."""
    run = RunDirectory(root=tmp_path / "run", state="new")
    run.export.mkdir(parents=True)
    (run.export / "config.json").write_text("{}")
    weights = run.export / "model.safetensors"
    weights.write_bytes(os.urandom(SIZE))
    before = file_sha256(weights)
    report = {"name": "drafter", "training": {"step": 7}}
    cuts: list[Callable[[int], bool]] = []
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")
    with faulty_proxy(mlflow_server, share=0.0, cuts_upload=lambda size: size >= SIZE and cuts[-1](size)) as (address, counts):
        client = MlflowClient(tracking_uri=address)

        def models(run_id: str) -> list[str]:
            found = client.search_logged_models([client.get_run(run_id).info.experiment_id])
            return [model.status.value for model in found if model.source_run_id == run_id]

        run_id = client.create_run("0").info.run_id
        cuts.append(lambda size: counts["upload"] < 2)
        model_id = log_drafter(client, run_id, run, report)
        assert counts["upload"] == 2
        assert models(run_id) == ["READY"]
        stored = next((tmp_path / "artifacts").rglob(f"{model_id}/**/model.safetensors"))
        assert file_sha256(stored) == before

        run_id = client.create_run("0").info.run_id
        cuts.append(lambda size: True)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        with pytest.raises((MlflowException, OSError)):
            log_drafter(client, run_id, run, report)
        assert models(run_id) == ["FAILED"]
        assert MODEL_TAG not in client.get_run(run_id).data.tags
        assert file_sha256(weights) == before

        cuts.append(lambda size: False)
        log_drafter(client, run_id, run, report)
        assert sorted(models(run_id)) == ["FAILED", "READY"]
