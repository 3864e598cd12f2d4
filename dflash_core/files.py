"""Files that are complete or absent: written beside their name, `path.partial`, and renamed. And locks on files."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what a network file system may answer


def begins_at(path: str) -> str:
    """For messages about a local path that is not there: where a relative one begins; nothing for others."""
    return "" if Path(path).expanduser().is_absolute() or "://" in path else f" in {Path.cwd()}"


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


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds a lock file, made where there is none; it is let go at the end of the block or of the process.

    Raises BlockingIOError where another process holds it and `wait` is off, ValueError where there can be no lock.
    """
    try:
        file = open(path, "w")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written ({error.strerror}), so nothing can be kept there; name another place"
        ) from error
    with file:
        lock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def lock(file: IO[Any], how: int) -> None:
    """fcntl.flock. Raises ValueError where the file system keeps no locks."""
    try:
        fcntl.flock(file, how)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise ValueError(
            f"{file.name}: its file system keeps no locks ({error.strerror}), so that two processes could change the same files; "
            "name a place on a local disk"
        ) from error


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
