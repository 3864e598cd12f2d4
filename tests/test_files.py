"""Files are complete or absent, whatever interrupts their writing."""

import errno
import fcntl
import json
from pathlib import Path

import pytest

from dflash_core.files import beside, locked, write_json, written_beside


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.txt"
    with written_beside(path, durable=durable) as place:
        place.write_text("half")
        assert not path.exists()
        place.write_text("whole")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "whole"


def test_an_interrupted_writer_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": "é"})
    with pytest.raises(KeyboardInterrupt), written_beside(path) as place:  # noqa: PT012
        place.write_text("{")
        raise KeyboardInterrupt
    assert json.loads(path.read_text(encoding="utf-8")) == {"old": "é"}
    assert beside(path).read_text() == "{"


def test_a_lock_is_held_by_one_and_let_go(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    for _ in range(2):
        with locked(path, wait=False), pytest.raises(BlockingIOError), locked(path, wait=False):
            raise AssertionError("two hold it")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"\.lock: its file system keeps no locks \(not here\).*local disk"), locked(tmp_path / ".lock", wait=True):  # fmt: skip
        raise AssertionError("it is not locked")


def test_a_place_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ValueError, match=r"/sys/\.lock cannot be written"), locked(Path("/sys/.lock"), wait=True):
        raise AssertionError("it is not locked")
