"""Directories and files on S3 that are complete or absent, as they are on a disk.

    DIR --push--> PLACE/..., and PLACE/copy.json last      only what differs is sent; what DIR has not is removed
    PLACE --pull--> DIR.partial, checked, renamed to DIR   ValueError with the reason where the copy is not whole
    FILE --send_file--> object --fetch_file--> FILE        for files that stand alone

`copy.json` has each file's size, sha256 and the store's own tag (ETag), so one listing tells whether the objects are still those that
were sent. Every object carries the sha256 of its file besides, so a push that was killed sends only the rest.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_core.data.cache import patiently, pour
from dflash_core.data.storage import open_remote
from dflash_core.files import beside, file_sha256, sync, written_beside

COPY = "copy.json"
SUM = "sha256"  # key of an object's metadata
PART_BYTES, PARTS = 32 * 2**20, 2  # of a large object: as much is in memory at a time


def trouble() -> tuple[type[Exception], ...]:
    """What a store that is away, refuses or breaks off raises, after all tries."""
    import aiohttp
    from botocore.exceptions import BotoCoreError

    return (OSError, aiohttp.ClientError, BotoCoreError)


def refusals() -> tuple[type[Exception], ...]:
    """Of these, what other credentials may change."""
    from botocore.exceptions import NoCredentialsError

    return (PermissionError, NoCredentialsError)


def list_files(place: str) -> dict[str, tuple[int, str]]:
    """(bytes, ETag) of every object below `place`, by its name there."""
    client, path = open_remote(place)
    found = patiently(partial(client.find, path, detail=True), place)
    below = {
        key: info for key, info in found.items() if key.startswith(f"{path}/")
    }  # some stores list an emptied directory as itself
    return {key.removeprefix(f"{path}/"): (info["size"], info["ETag"]) for key, info in below.items()}


def read_text(place: str, name: str) -> str | None:
    """A small object, None where it is not there."""
    client, path = open_remote(place)
    try:
        content: bytes = patiently(partial(client.cat_file, f"{path}/{name}"), f"{place}/{name}")
    except FileNotFoundError:
        return None
    return content.decode(errors="replace")


# ---- one file --------------------------------------------------------------------------------------------------------


def send_file(file: Path, place: str, name: str, *, sha256: str | None = None) -> bool:
    """A file as the object `name`, unless it is there already; returns whether it was sent. It must not change meanwhile."""
    sha256 = sha256 or file_sha256(file)
    if _head(place, name) == (file.stat().st_size, sha256):
        return False
    client, path = open_remote(place)
    how = {"chunksize": PART_BYTES, "max_concurrency": PARTS, "Metadata": {SUM: sha256}}
    patiently(partial(client.put_file, str(file), f"{path}/{name}", **how), f"{place}/{name}")
    return True


def fetch_file(place: str, name: str, file: Path) -> None:
    """An object that `send_file` sent, complete or absent. Raises ValueError where there is none or it is another one."""
    head = _head(place, name)
    if head is None:
        raise ValueError(f"{place}/{name}: missing")
    _fetch(place, name, file, *head)


def _head(place: str, name: str) -> tuple[int, str] | None:
    """(bytes, sha256 of what was sent) of an object, None where it is not there."""
    client, path = open_remote(place)
    bucket, _, key = f"{path}/{name}".partition("/")
    try:
        answer = patiently(partial(client.call_s3, "head_object", Bucket=bucket, Key=key), f"{place}/{name}")
    except FileNotFoundError:
        return None
    return answer["ContentLength"], answer["Metadata"].get(SUM, "")


def _fetch(place: str, name: str, file: Path, size: int, sha256: str) -> None:
    client, path = open_remote(place)
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_beside(file) as making:
        with open(making, "wb") as out:
            found = pour(
                out, size, lambda start, stop: client.cat_file(f"{path}/{name}", start=start, end=stop), f"{place}/{name}"
            )
        if found != sha256:
            making.unlink()
            raise ValueError(
                f"{place}/{name}: its sha256 is {found[:12]}, not {sha256[:12] or 'known'}: it changed since it was sent"
            )


# ---- a directory -----------------------------------------------------------------------------------------------------


def push(directory: Path, place: str, sums: dict[str, str] | None = None) -> int:
    """Makes `place` the copy of a directory that does not change meanwhile; returns how many objects were sent, 0: it was already.

    The old copy.json goes before anything else and the new one comes last, so whoever reads meanwhile finds no copy, never a mixed one.
    `sums`: what `file_sums` of the directory gives, where that is known.
    """
    sums = sums or file_sums(directory)
    there = list_files(place)
    if is_whole(place, there) == sums:
        return 0
    if COPY in there:
        _remove(place, [COPY])
    sent = sum(send_file(directory / name, place, name, sha256=sums[name]) for name in sorted(sums, key=_manifest_last))
    _remove(place, there.keys() - sums.keys() - {COPY})
    there = list_files(place)
    copied = {name: {"bytes": there[name][0], SUM: sums[name], "etag": there[name][1]} for name in sums}
    client, path = open_remote(place)
    content = json.dumps(copied, indent=2).encode()
    patiently(partial(client.pipe_file, f"{path}/{COPY}", content), f"{place}/{COPY}")
    return sent + 1


def file_sums(directory: Path) -> dict[str, str]:
    """sha256 of every file of a directory, in hex, by its name there."""
    return {file.relative_to(directory).as_posix(): file_sha256(file) for file in directory.rglob("*") if file.is_file()}


def _manifest_last(name: str) -> tuple[bool, str]:
    """Whoever reads shards there without knowing of copy.json goes by their manifest."""
    return name == "manifest.json", name


def is_whole(place: str, there: dict[str, tuple[int, str]]) -> dict[str, str] | None:
    """sha256 of every file of a copy that is exactly as it was sent, None for one that is not. `there`: what `list_files` found."""
    if COPY not in there:
        return None
    copied = _read_copy(place)
    same = {name: (file["bytes"], file["etag"]) for name, file in copied.items()}
    return {name: file[SUM] for name, file in copied.items()} if same == {k: v for k, v in there.items() if k != COPY} else None


def pull(place: str, directory: Path) -> None:
    """The copy at `place` as a directory, which must not exist. Raises ValueError, naming the object, where it is not whole."""
    copied, there = _read_copy(place), list_files(place)
    for name, file in copied.items():
        size = there[name][0] if name in there else None
        if size != file["bytes"]:
            found = "missing" if size is None else f"{size} bytes"
            raise ValueError(f"{place}/{name}: {found}, {COPY} says {file['bytes']} bytes")
    making = beside(directory)
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        for name, file in copied.items():
            _fetch(place, name, making / name, file["bytes"], file[SUM])
    except ValueError:
        shutil.rmtree(making)
        raise
    sync(making)
    os.rename(making, directory)
    sync(directory.parent)


def remove(place: str) -> None:
    """Removes a copy; what is left of it after a kill is no copy."""
    there = list_files(place)
    _remove(place, [name for name in there if name == COPY])
    _remove(place, there.keys() - {COPY})


def _remove(place: str, names: Any) -> None:
    client, path = open_remote(place)
    for name in sorted(names):
        patiently(partial(client.rm_file, f"{path}/{name}"), f"{place}/{name}")


def _read_copy(place: str) -> dict[str, dict[str, Any]]:
    """What copy.json says. Raises ValueError where there is none, or another program's."""
    text = read_text(place, COPY)
    if text is None:
        raise ValueError(f"{place}: not complete: {COPY} missing")
    try:
        copied: dict[str, dict[str, Any]] = json.loads(text)
        for name, file in copied.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not {"bytes", SUM, "etag"} <= file.keys():
                raise ValueError(f"entry {name!r}")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{place}/{COPY}: no list of copied files ({error})") from error
    return copied
