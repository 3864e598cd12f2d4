"""Files that are complete or absent: written beside their name, `path.partial`, and renamed."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def beside(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(path.name + ".partial")


@contextmanager
def written_beside(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Write to the yielded place; it is renamed to `path` when the block ends well, and stays where it is when it does not.

    `durable`: it is on the disk before it gets its name, so that it survives a power loss.
    """
    place = beside(path)
    yield place
    if durable:
        sync(place)
    os.replace(place, path)


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """Fill the yielded directory; it takes the place of `directory`, as a whole, when the block ends well."""
    place, old = beside(directory), directory.with_name(directory.name + ".old")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    yield place
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        os.rename(directory, old)
    os.rename(place, directory)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """A JSON file, complete or absent."""
    with written_beside(path, durable=durable) as place:
        place.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    """Makes a file or a directory's entries survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
