"""A run's settings: file, then the environment for `places`, then the command line -> `Config`.

    configs/x.yaml  <  DFLASH_RUNS, DFLASH_COPIES, ...  <  --training.learning_rate 1e-3   (or a deployment's overrides)

Every layer refuses keys it does not know. Nothing here imports torch, Prefect or MLflow, so `--help` answers at once.
"""

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from dflash_core.config import Config, Places
from dflash_core.files import begins_at
from dflash_core.rundir import config_fingerprint
from flows.mlflow_run import shown
from flows.parameters import given

QUICKSTART = "configs/quickstart.yaml"
ENVIRONMENT = "DFLASH_"
TEST_ENVIRONMENT = "DFLASH_TEST_"  # read by the tests alone


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A checked config and, for each dotted key that was set, where its value came from."""

    config: Config
    origins: dict[str, str]


class _Environment(Places, BaseSettings):
    """Places from the environment."""

    model_config = SettingsConfigDict(env_prefix=ENVIRONMENT, env_ignore_empty=True)


# ---- layers ----------------------------------------------------------------------------------------------------------


def load_config(path: str, overrides: BaseModel | Mapping[str, Any] | None = None) -> Config:
    """The run of `path` with a filled-in form or dotted keys such as {"training.learning_rate": 1e-3}. Raises ValueError, one line."""
    return resolve(path, given(overrides), "overrides").config


def resolve(path: str, overrides: Mapping[str, Any], source: str) -> Resolved:
    """All layers together; `source` names where `overrides` came from. Raises ValueError, one line."""
    try:
        values = _read_yaml(path)
        origins = dict.fromkeys(leaves(values), path)
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply, or an anchor that holds itself") from None
    places = _read_environment()
    origins |= {f"places.{key}": f"environment {ENVIRONMENT}{key.upper()}" for key in places}
    _merge(values, {"places": places} if places else {})
    for key, value in overrides.items():
        layer = _nested(key, value)
        origins |= dict.fromkeys(leaves(layer), source)
        _merge(values, layer)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(detail, origins) for detail in error.errors())) from error
    return Resolved(config=config, origins=origins)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--config {path!r}: {error.strerror}{begins_at(path)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path!r}: no UTF-8 text") from error
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that there is not
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where}: no valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path}: must be a mapping of sections such as `training:`")
    return values


def _read_environment() -> dict[str, Any]:
    known = {f"{ENVIRONMENT}{name.upper()}" for name in Places.model_fields}
    for name in os.environ:
        if name.upper().startswith(ENVIRONMENT) and name.upper() not in known and not name.startswith(TEST_ENVIRONMENT):
            raise ValueError(
                f"environment {name}: unknown; the environment sets only {', '.join(sorted(known))}"
                f"{closest(name.upper(), known)}; everything else belongs into the file or on the command line"
            )
    return EnvSettingsSource(_Environment)()


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the config, in order."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from known_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def closest(key: str, known: set[str]) -> str:
    match = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""


def _beside(place: tuple[int | str, ...], model: type[BaseModel] = Config) -> Iterator[str]:
    """The keys that may stand where an unknown one does, lists walked through: data.conversations.0.wieght -> ...0.weight."""
    for part in place[:-1]:
        if isinstance(part, str):
            model = next(_sections(model.model_fields[part].annotation))
    yield from (".".join(map(str, (*place[:-1], name))) for name in model.model_fields)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _explain(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    origin = next((origin for leaf, origin in origins.items() if leaf == key or leaf.startswith(key + ".")), None)
    origin = origin or next((origin for leaf, origin in origins.items() if key.startswith(leaf + ".")), None)
    where = f" ({origin})" if key and origin else ""
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key{where}{closest(key, {*known_keys(), *_beside(detail['loc'])})}"
    message = detail["msg"].removeprefix("Value error, ")
    if not key:
        return message
    if detail["type"] == "missing":
        return f"{key}: not set; it has no default"
    value = "" if isinstance(detail["input"], dict | list | tuple) else f" {shown(repr(detail['input']))}"
    return f"{key}{value}{where}: {message[0].lower()}{message[1:]}"


# ---- showing ---------------------------------------------------------------------------------------------------------


def config_yaml(config: Config, comments: Mapping[str, str] | None = None) -> str:
    """The whole run as YAML that can be run again; `comments` stand behind the lines of their dotted keys."""
    comments = comments or {}
    lines = [f"# config_fingerprint: {config_fingerprint(config)}"]
    for name, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            lines += ["", f"{name}:"]
            lines += [f"  {_line(key, leaf, comments.get(f'{name}.{key}'))}" for key, leaf in value.items()]
        else:
            lines.append(_line(name, value, comments.get(name)))
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any, comment: str | None) -> str:
    text = yaml.safe_dump([value], default_flow_style=True, width=sys.maxsize, allow_unicode=True).strip()[1:-1]
    return f"{key}: {text}" + (f"  # {comment}" if comment else "")


def origin_comments(resolved: Resolved, path: str) -> dict[str, str]:
    """Where every value that is not the file's came from."""
    origins = {key: resolved.origins.get(key, "default") for key in known_keys()}
    return {key: origin for key, origin in origins.items() if origin != path}


def dig(values: Any, dotted: str) -> Any:
    """The value of a dotted key."""
    for part in dotted.split("."):
        values = values[part]
    return values
