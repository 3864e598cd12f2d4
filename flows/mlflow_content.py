"""What an MLflow run shows besides the points of its steps: the data it reads, its report, and the drafter as a model.

All functions take the client and the run's id; they raise what MLflow raises, and calling one again adds nothing twice.
"""

import json
import time
from pathlib import Path
from typing import Any

from dflash_core.config import Config
from dflash_core.decoding.report import DEFINITION
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory
from flows.metric_names import report_points
from flows.registry import content_hash

DIGEST_LENGTH = 36  # MLflow's limit
MODEL_TAG = "drafter"  # of the run: "<hash of the export> <id of its logged model>"


def show_data(client: Any, run_id: str, config: Config, run: RunDirectory, manifest: Manifest) -> None:
    """The data set as the run's input, and the picture of it; drawn here, since matplotlib takes a second to import."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    from dflash_core.data.statistics import draw

    places = list(config.data.shards) or [source.path for source in config.data.conversations]
    profile = {
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "supervised": manifest.supervised,
        "shards": len(manifest.shards),
    }
    dataset = Dataset(
        name=config.name,
        digest=manifest.fingerprint[:DIGEST_LENGTH],
        source_type="s3" if any(place.lower().startswith("s3://") for place in places) else "local",
        source=json.dumps({"uri": places[0], "all": places}),
        profile=json.dumps(profile),
    )
    client.log_inputs(run_id, datasets=[DatasetInput(dataset=dataset, tags=[InputTag("mlflow.data.context", "training")])])
    if "statistics" in manifest.ledger:  # shards from elsewhere have none
        draw(manifest.ledger, run.picture)
        client.log_artifact(run_id, str(run.picture))


def publish_report(client: Any, run_id: str, run: RunDirectory, report: dict[str, Any]) -> None:
    """The measured numbers, on the run and on the drafter's model; report and timeline as files."""
    from mlflow.entities import Metric

    from dflash_core.training.timeline import draw_timeline

    step = report["training"]["step"]
    model_id = log_drafter(client, run_id, run, report)
    now = int(time.time() * 1000)
    points = [Metric(name, value, now, step, model_id=model_id) for name, value in report_points(report)]
    client.log_batch(run_id, metrics=points)
    if run.timeline.is_file():
        draw_timeline(run.timeline, run.timeline_picture)
    pictures = (run.timeline_picture, run.acceptance_picture, run.training_picture)
    for file in filter(Path.is_file, (run.report, run.report_text, run.timeline, *pictures)):
        client.log_artifact(run_id, str(file))


def log_drafter(client: Any, run_id: str, run: RunDirectory, report: dict[str, Any]) -> str:
    """The export as a logged model of the run; returns its id. Uploaded once for the same content; READY only when it is whole."""
    from mlflow.entities import LoggedModelOutput

    content = content_hash(run.export)
    logged = client.get_run(run_id)
    known, _, model_id = logged.data.tags.get(MODEL_TAG, "").partition(" ")
    if known == content:
        return model_id
    tags = {"export_sha256": content, "acceptance_length_definition": DEFINITION}
    model = client.create_logged_model(
        logged.info.experiment_id, name=report["name"], source_run_id=run_id, model_type="dflash-drafter", tags=tags
    )
    try:
        client.log_model_artifacts(model.model_id, str(run.export))
    except Exception:
        client.finalize_logged_model(model.model_id, "FAILED")
        raise
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, report["training"]["step"])])
    client.set_tag(run_id, MODEL_TAG, f"{content} {model.model_id}")
    return str(model.model_id)
