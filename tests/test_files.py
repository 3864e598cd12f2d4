"""Files are complete or absent, whatever interrupts their writing."""

import json
from pathlib import Path

import pytest

from dflash_core.files import beside, write_json, written_beside


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
