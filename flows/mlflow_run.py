"""What an MLflow run of ours is made of: its store, its parameters and tags.

places.mlflow_uri --tracking_uri, connect--> client --experiment, find_run--> run
Config --flat_params, tags--> what describes it
"""

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_core import errors
from dflash_core.config import Config
from dflash_core.decoding.report import DEFINITION
from dflash_core.files import locked, written_beside
from dflash_core.rundir import RunDirectory, config_fingerprint
from flows.local_server import STARTED

EXPERIMENT = "dflash"
STORES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")  # kinds of addresses that MLflow knows
PARAM_LENGTH = 6000  # MLflow's limit
TRIMMED = " ... (trimmed)"
PASSWORD = re.compile(r"(://[^/:@\s]*):[^/@\s]*@")
ENVIRONMENT_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
SECRET = re.compile(
    r"(^|_)(password|passwd|secret|token|credentials?|(api|access|private|secret)_key)$"
)  # names of what is never shown
HIDDEN = "***"
PACKAGES = ("torch", "transformers", "prefect", "mlflow")


def tracking_uri(config: Config) -> str | None:
    """The store of this run; None where places.mlflow_uri is `none`. Raises ValueError for one that MLflow refuses."""
    uri = config.places.mlflow_uri or f"sqlite:///{Path(config.places.runs).absolute() / 'mlflow.db'}"
    if uri == "none":
        return None
    if (scheme := urlsplit(uri).scheme.partition("+")[0]) not in STORES:
        found = "MLflow keeps no runs in plain files" if scheme in ("", "file") else f"MLflow has no store of the kind {scheme}"
        raise ValueError(f"places.mlflow_uri {shown(uri)!r}: {found}; use sqlite:///PATH, http(s)://HOST or none")
    return uri


def connect(uri: str) -> Any:
    """A client of `uri`, with short patience and a quiet console. Imports MLflow, which takes a second or two."""
    for key, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(key, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):  # the first use of a SQLite file prints every migration
        logging.getLogger(name).setLevel(logging.WARNING)
    if not uri.startswith("sqlite:///"):
        return MlflowClient(tracking_uri=uri)
    with _alone(Path(uri.removeprefix("sqlite:///"))):
        return MlflowClient(tracking_uri=uri)


@contextmanager
def _alone(database: Path) -> Iterator[None]:
    """One process at a time opens a local store, which makes its tables: the lock that MLflow takes for that differs by process."""
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{database}.lock"), wait=True):
        yield


def find_run(client: Any, run_id: str) -> Any | None:
    """The run of that id; None where this store does not have it."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # another store than before
            return None
        raise


def own_run(client: Any, uri: str, config: Config, run: RunDirectory) -> Any:
    """The MLflow run of a run directory, made where it has none in this store; its id is kept in the directory."""
    record = run.root / "mlflow_run.txt"
    found = find_run(client, record.read_text(encoding="utf-8").strip()) if record.is_file() else None
    if found is None:
        found = client.create_run(experiment_id(client, uri, config), run_name=config.name)
        with written_beside(record) as place:
            place.write_text(found.info.run_id + "\n", encoding="utf-8")
    return found


def experiment_id(client: Any, uri: str, config: Config) -> str:
    """The experiment of all our runs, made where it is new; a local store keeps its artifacts beside the runs."""
    from mlflow.exceptions import MlflowException

    local = uri.startswith("sqlite:")
    place = (Path(config.places.runs).absolute() / "mlartifacts").as_uri() if local else None
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        try:
            return client.create_experiment(EXPERIMENT, artifact_location=place)
        except MlflowException:  # another process was first
            found = client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                raise
    return found.experiment_id


def tags(config: Config) -> dict[str, str]:
    """Identity of the experiment, the code, the versions and devices, and the flow run that made it."""
    from prefect.context import FlowRunContext  # not above: the settings, which --help waits for, import this module
    from prefect.utilities.urls import url_for

    found = {
        "config_fingerprint": config_fingerprint(config),
        "acceptance_length_definition": DEFINITION,
        "devices": ", ".join((*config.pipeline.targets, config.pipeline.drafter)),
        **{f"version.{package}": version(package) for package in PACKAGES},
    }
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        page = None if STARTED else url_for("flow-run", obj_id=context.flow_run.id)
        found["prefect_flow_run"] = page or str(context.flow_run.id)
    root = Path(__file__).parent.parent
    git = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if git.returncode == 0:
        found["mlflow.source.git.commit"] = git.stdout.strip()
    return found


def shown(text: str | None) -> str:
    """`text` with the passwords of its addresses hidden."""
    return PASSWORD.sub(r"\1:***@", text or "")


def without_password(config: Config) -> Config:
    """The config as it may be shown."""
    if config.places.mlflow_uri is None:
        return config
    return config.model_copy(update={"places": config.places.model_copy(update={"mlflow_uri": shown(config.places.mlflow_uri)})})


def first_line(error: Exception) -> str:
    """An error in a few words, without passwords."""
    return shown(errors.first_line(error))[:300]


def flat_params(config: Config) -> dict[str, str]:
    """Dotted keys and values as MLflow takes them; what is too long is cut with a mark, secrets are hidden by their names."""
    flat: dict[str, str] = {}

    def add(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{key}.")
            else:
                text = HIDDEN if SECRET.search(key) else str(value)
                flat[prefix + key] = text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - len(TRIMMED)] + TRIMMED

    add(without_password(config).model_dump(mode="json"), "")
    return flat
