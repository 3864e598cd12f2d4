"""Imports go one way: flows -> assembly -> {training, decoding} -> {data, modeling} -> sizes, rundir -> files, config, records."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dflash_core", "flows")
EDGE_LIBRARIES = {"prefect", "mlflow", "pydantic_settings"}

BASE = {"config", "data_config", "devices", "errors", "files", "records", "sizes"}
ROOMS = BASE | {"data", "modeling"}
PIPELINE = {
    f"dflash_core.training.{name}" for name in ("pipeline", "stages", "endings", "work", "gate", "lane", "replicas", "halves")
}
MAY_IMPORT = {
    "records": set(),
    "data_config": set(),
    "config": {"data_config", "records"},
    "sizes": {"config", "data_config", "records"},
    "devices": {"config", "data_config"},
    "files": set(),
    "errors": set(),
    "rundir": BASE,
    "data": BASE | {"data"},
    "modeling": BASE | {"modeling"},
    "training": ROOMS | {"rundir", "training"},
    "decoding": ROOMS | {"rundir", "decoding"},
    "planning": ROOMS,
    "preparation": ROOMS | {"rundir"},
    "opening": ROOMS | {"rundir"},
    "copies": ROOMS | {"rundir", "training"},
    "fetching": ROOMS | {"rundir", "copies"},
    "measurement": ROOMS | {"rundir", "decoding", "preparation", "opening"},
    "watching": ROOMS | {"rundir", "training", "decoding", "preparation"},
    "assembly": ROOMS | {"rundir", "training", "decoding", "preparation", "opening", "measurement", "planning", "watching"},
    "ranks": BASE | {"rundir"},
    "rank": ROOMS | {"rundir", "training", "assembly"},
    "flows": ROOMS
    | {"rundir", "training", "decoding", "preparation", "assembly", "planning", "ranks", "copies", "fetching", "flows"},
}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(source: str, module: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere in its text, names after `from x import` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(dotted: str) -> str:
    """`dflash_core.data.shards` is in room data, `flows.train` in room flows."""
    first, *rest = dotted.split(".")
    return first if first == "flows" else rest[0] if rest else first


def forbidden(source: str, module: str) -> list[str]:
    """The imports of a module that the rule does not allow."""
    found = []
    for name in imported(source, module):
        package = name.split(".")[0]
        if package in PACKAGES:
            if module in PIPELINE:  # target and trainer come in as arguments
                allowed = room(name) in ("records", "errors") or any(
                    name == part or name.startswith(f"{part}.") for part in PIPELINE
                )
            else:
                allowed = room(name) in MAY_IMPORT[room(module)]
            if not allowed:
                found.append(name)
        elif package in EDGE_LIBRARIES and not module.startswith("flows"):
            found.append(name)
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_only_rooms_below_it(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if path.name == "__init__.py":
        assert source == "", "a package file holds nothing"
        return
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert forbidden(source, module) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dflash_core.data.shards", "from dflash_core.modeling.target import Taps"),
        ("dflash_core.modeling.target", "import dflash_core.data.shards"),
        ("dflash_core.data.shards", "def f():\n    from dflash_core import rundir"),
        ("dflash_core.training.trainer", "from dflash_core.decoding import export"),
        ("dflash_core.training.pipeline", "from dflash_core.config import Config"),
        ("dflash_core.training.stages", "from dflash_core.training.trainer import Trainer"),
        ("dflash_core.assembly", "import flows.train"),
        ("dflash_core.config", "import pydantic_settings"),
        ("dflash_core.assembly", "from mlflow import log_metric"),
        ("dflash_core.records", "from dflash_core.config import Config"),
    ],
)
def test_the_rule_itself_finds_a_wrong_edge(module: str, source: str) -> None:
    assert len(forbidden(source, module)) == 1


def test_all_rooms_were_looked_at() -> None:
    seen = {room(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in modules() if path.name != "__init__.py"}
    assert (
        {"records", "config", "rundir", "data", "modeling", "training", "decoding", "preparation", "assembly"}
        <= seen
        <= set(MAY_IMPORT)
    )
