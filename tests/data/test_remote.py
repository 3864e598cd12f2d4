"""Copies of directories on a real S3 server: equal to their source, or no copies."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_core.data import cache as cache_module
from dflash_core.data import remote, storage
from dflash_core.data.remote import COPY, fetch_file, list_files, pull, push, send_file
from dflash_core.data.storage import forget_clients, open_remote
from tests.data.faulty_proxy import faulty_proxy

ROOT = Path(__file__).parents[2]
PUSH = "import sys; from pathlib import Path; from dflash_core.data.remote import push; push(Path(sys.argv[1]), sys.argv[2])"


def make(directory: Path, files: int = 5, *, seed: int = 0) -> Path:
    """Files of random bytes, one of them empty, one in a directory of its own."""
    chance = random.Random(seed)
    directory.mkdir()
    (directory / "inner").mkdir()
    (directory / "inner" / "empty").write_bytes(b"")
    for number in range(files):
        (directory / f"f{number}").write_bytes(chance.randbytes(2000 + number))
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def objects(place: str) -> dict[str, bytes]:
    client, path = open_remote(place)
    return {name: client.cat_file(f"{path}/{name}") for name in list_files(place)}


@contextmanager
def through(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, **faults: float) -> Iterator[dict[str, int]]:
    """This process talks to the server through the faulty proxy; yields what it counted."""
    with faulty_proxy(server["AWS_ENDPOINT_URL"], **{"share": 0.0, **faults}) as (address, counts):
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", address)
            forget_clients()
            yield counts
        forget_clients()


def test_a_copy_equals_its_source_and_comes_back(tmp_path: Path, s3: str) -> None:
    source = make(tmp_path / "a")
    assert push(source, s3) == 7
    found = objects(s3)
    copied = json.loads(found.pop(COPY))
    assert found == content(source)
    assert {name: file["bytes"] for name, file in copied.items()} == {name: len(value) for name, value in found.items()}
    pull(s3, tmp_path / "b" / "back")
    assert content(tmp_path / "b" / "back") == content(source)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["back"]


def test_the_same_again_sends_nothing_with_and_without_a_slash(
    tmp_path: Path, s3: str, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a")
    push(source, s3)
    first = objects(s3)
    with through(s3_server, monkeypatch) as counts:
        assert push(source, f"{s3}/") == push(source, s3) == 0
        assert "PUT" not in counts
        assert "DELETE" not in counts
        assert counts["ok"] <= 6
    assert objects(s3) == first


def test_only_what_differs_is_sent_and_what_is_gone_is_removed(
    tmp_path: Path, s3: str, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "a")
    push(source, s3)
    (source / "f1").write_bytes(b"other")
    (source / "f2").unlink()
    with through(s3_server, monkeypatch) as counts:
        assert push(source, s3) == 2
    assert counts["PUT"] == 2
    found = objects(s3)
    del found[COPY]
    assert found == content(source)


def test_copies_beside_each_other_do_not_mix(tmp_path: Path, s3: str) -> None:
    one, two = make(tmp_path / "one", seed=1), make(tmp_path / "two", 3, seed=2)
    push(one, f"{s3}/run")
    push(two, f"{s3}/run-2")
    remote.remove(f"{s3}/run-2")
    assert list_files(f"{s3}/run-2") == {}
    pull(f"{s3}/run", tmp_path / "back")
    assert content(tmp_path / "back") == content(one)


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("older", [False, True], ids=["first", "over an older one"])
def test_a_push_that_is_killed_leaves_no_copy_and_the_next_sends_the_rest(
    tmp_path: Path, s3: str, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    source = make(tmp_path / "a", 8)
    if older:
        push(make(tmp_path / "older", 8, seed=9), s3)
    before = list_files(s3)

    def sent() -> set[str]:
        return {name for name, looks in list_files(s3).items() if before.get(name) != looks}

    with faulty_proxy(s3_server["AWS_ENDPOINT_URL"], share=0.0, delay_s=0.05) as (address, _):
        environment = {**os.environ, "AWS_ENDPOINT_URL": address}
        child = subprocess.Popen([sys.executable, "-c", PUSH, str(source), s3], env=environment, cwd=ROOT)
        while len(sent()) < 3:
            assert child.poll() is None
        child.kill()
        child.wait()
    there = sent()
    assert COPY not in list_files(s3)
    assert len(there) < 8, "it was killed in the middle"
    with pytest.raises(ValueError, match=rf"{s3}: not complete: copy\.json missing"):
        pull(s3, tmp_path / "back")
    with through(s3_server, monkeypatch) as counts:
        push(source, s3)
    assert counts["PUT"] == len(content(source)) + 1 - len(there) - older, "the empty file is in both"
    pull(s3, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_resets_and_slow_downs_cost_time_only(
    tmp_path: Path, s3: str, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(cache_module, "PIECE", 700)
    monkeypatch.setattr(storage, "REQUEST_ATTEMPTS", 2)
    source = make(tmp_path / "a", 12)
    started = time.monotonic()
    with through(s3_server, monkeypatch, share=0.07) as counts:
        push(source, s3)
        pull(s3, tmp_path / "back")
    assert min(counts["cut"], counts["half"], counts["503"]) > 0
    assert time.monotonic() - started < 60
    assert content(tmp_path / "back") == content(source)
    assert push(source, s3) == 0


def test_a_store_that_is_away_is_told_after_bounded_tries(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(storage, "REQUEST_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    forget_clients()
    with pytest.raises(remote.trouble()):
        push(make(tmp_path / "a"), s3)
    forget_clients()
    assert "try 6 of 6" in caplog.text


@pytest.mark.parametrize("fault", ["missing", "cut", "rewritten"])
def test_a_damaged_object_is_named_and_sent_again(tmp_path: Path, s3: str, fault: str) -> None:
    source = make(tmp_path / "a")
    push(source, s3)
    client, path = open_remote(s3)
    whole = (source / "f1").read_bytes()
    if fault == "missing":
        client.rm_file(f"{path}/f1")
    else:
        client.pipe_file(f"{path}/f1", whole[:-1] if fault == "cut" else whole[:-9] + bytes(9))
    words = {
        "missing": r"missing, copy\.json says 2001 bytes",
        "cut": r"2000 bytes, copy\.json says 2001",
        "rewritten": "its sha256",
    }
    with pytest.raises(ValueError, match=rf"{s3}/f1: {words[fault]}"):
        pull(s3, tmp_path / "back")
    assert not list(tmp_path.glob("back*"))
    assert push(source, s3) == 2
    pull(s3, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


@pytest.mark.parametrize("text", ['{"../out": {"bytes": 1, "sha256": "", "etag": ""}}', "[1]", "{broken", '{"a": {}}'])
def test_a_list_of_another_program_is_refused(tmp_path: Path, s3: str, text: str) -> None:
    client, path = open_remote(s3)
    client.pipe_file(f"{path}/{COPY}", text.encode())
    with pytest.raises(ValueError, match=rf"{s3}/copy\.json: no list of copied files"):
        pull(s3, tmp_path / "back")


def test_large_files_go_in_parts_with_their_checksum(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)  # the least that S3 takes
    file = tmp_path / "large"
    file.write_bytes(random.Random(3).randbytes(12 * 2**20))
    assert send_file(file, s3, "large")
    assert not send_file(file, s3, "large")
    fetch_file(s3, "large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    with pytest.raises(ValueError, match=rf"{s3}/other: missing"):
        fetch_file(s3, "other", tmp_path / "other")


def test_credentials_that_were_renewed_in_their_file_are_used(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials"
    key, secret = (os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = "
    file.write_text(f"{text}expired\n", encoding="utf-8")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    forget_clients()
    source = make(tmp_path / "a")
    with pytest.raises(PermissionError):
        push(source, s3)
    file.write_text(f"{text}{secret}\n", encoding="utf-8")
    forget_clients()
    assert push(source, s3) == 7
    forget_clients()
