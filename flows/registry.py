"""Drafters in MLflow's registry: one registered model a target, one version a judged drafter, the alias `champion` on the one in use.

    open_registry -> Registry --fetch_champion--> Champion (files on this disk) --(measured elsewhere)--> register

A version's files lie under the hash of their content, so a later run cannot change what was registered; the hash is checked when
they come back. The alias is moved last: a promotion that is killed before leaves the old champion in use.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.config import Config, fingerprint
from dflash_core.decoding.card import CARD
from dflash_core.files import file_sha256
from dflash_core.records import Decision
from dflash_core.rundir import RunDirectory
from flows.mlflow_run import connect, first_line, own_run, shown, tracking_uri

ALIAS = "champion"
TAG_LENGTH = 4000  # below MLflow's limit


@dataclass(frozen=True, kw_only=True)
class Champion:
    """The drafter in use."""

    version: str
    directory: Path  # its export
    content: str  # hash of its files


def model_name(config: Config) -> str:
    """The registered model that this run's drafter would be a version of."""
    return config.promotion.model or f"{Path(config.target.path).name}-dflash"


def content_hash(export: Path) -> str:
    """One hash over the names and contents of an export's files, but for its card: that changes with each evaluation."""
    files = (path for path in sorted(export.iterdir()) if path.is_file() and path.name != CARD)
    return fingerprint({path.name: file_sha256(path) for path in files})


def open_registry(config: Config) -> "Registry":
    """The registry of this run's store. Raises ValueError where there is none or it does not answer."""
    uri = tracking_uri(config)
    if uri is None:
        raise ValueError("places.mlflow_uri none: promotion needs MLflow's registry; name a store or leave it out")
    client = connect(uri)
    from mlflow.exceptions import MlflowException

    try:
        client.search_registered_models(max_results=1)
    except MlflowException as error:
        raise ValueError(f"places.mlflow_uri {shown(uri)!r} does not answer: {first_line(error)}") from error
    return Registry(client, uri, model_name(config))


class Registry:
    """The versions of one registered model."""

    def __init__(self, client: Any, uri: str, name: str) -> None:
        self._client = client
        self.uri, self.name = uri, name

    def champion_version(self) -> str | None:
        """The version that the alias names; None where nothing was promoted yet."""
        from mlflow.exceptions import MlflowException

        try:
            number = self._client.get_registered_model(self.name).aliases.get(ALIAS)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return None if number is None else str(number)

    def fetch_champion(self, place: Path) -> Champion | None:
        """Downloads the champion's files below `place`. Raises ValueError where they are not what was registered."""
        number = self.champion_version()
        if number is None:
            return None
        version = self._client.get_model_version(self.name, number)
        path = version.source.removeprefix(f"runs:/{version.run_id}/")
        place.mkdir(parents=True, exist_ok=True)
        directory = Path(self._client.download_artifacts(version.run_id, path, str(place)))
        content = version.tags.get("export_sha256", "")
        if (found := content_hash(directory)) != content:
            raise ValueError(
                f"version {number} of {self.name!r} in MLflow is not what was registered: its files hash to {found[:12]}, not "
                f"{content[:12]}; move the alias {ALIAS!r} to a version that is whole, or delete it"
            )
        return Champion(version=number, directory=directory, content=content)

    def register(
        self,
        config: Config,
        run: RunDirectory,
        decision: Decision,
        *,
        lineage: Mapping[str, str],
        judged: Mapping[str, Any],
        champion: Champion | None,
    ) -> str:
        """The run's export as a new version with lineage and reasons; the alias moves to it if it is promoted.

        `judged` is kept as the version's report. Raises ValueError where another drafter became champion meanwhile.
        """
        if self.champion_version() != (champion and champion.version):
            raise ValueError(f"another drafter became {ALIAS!r} of {self.name!r} meanwhile; promote again to be compared with it")
        run_id = own_run(self._client, self.uri, config, run).info.run_id
        content = content_hash(run.export)
        place = f"drafters/{content[:12]}"
        self._client.log_artifacts(run_id, str(run.export), place)
        report = f"promotions/{content[:12]}.json"
        self._client.log_text(run_id, json.dumps(judged, indent=2, allow_nan=False), report)
        tags = {
            **lineage,
            "export_sha256": content,
            "report": f"runs:/{run_id}/{report}",
            "decision": "promoted" if decision.promoted else "refused",
            "compared_with": champion.version if champion else "nothing: the first champion",
            **{f"refused.{gate.name}": gate.reason[:TAG_LENGTH] for gate in decision.gates if not gate.passed},
        }
        self._make_model()
        version = self._client.create_model_version(self.name, f"runs:/{run_id}/{place}", run_id=run_id, tags=tags)
        if decision.promoted:
            self._client.set_registered_model_alias(self.name, ALIAS, version.version)
        return str(version.version)

    def _make_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(self.name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
