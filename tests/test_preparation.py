"""Preparation put together: what the fingerprint covers, what is skipped, and bad input that leaves nothing behind."""

import datetime
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core import preparation
from dflash_core.config import Config, fingerprint
from dflash_core.data import shards
from dflash_core.data.reader import TokenDataset
from dflash_core.data.shards import read_manifest
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory, open_run
from tests.fakes import CHATML, IM_END, chats, make_config, make_tokenizer, save_target, write_jsonl


def prepare(config: Config, run: RunDirectory) -> Manifest:
    """What the flow does: skip what is there, else make it."""
    return preparation.prepared(config, run) or preparation.prepare(config, run)


@pytest.fixture
def target(tmp_path: Path, target_dir: Path) -> Path:
    """A target of its own, that may be changed."""
    return Path(shutil.copytree(target_dir, tmp_path / "target"))


# ---- preparation ----------------------------------------------------------------------------------------------------


def test_prepared_rows_are_the_conversations_with_supervised_answers(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir, data={"shard_tokens": 300, "max_length": 200})
    run = open_run(config)
    manifest = prepare(config, run)
    dataset, tokenizer = TokenDataset(run.shards), make_tokenizer()
    assert len(dataset) == manifest.rows == 24
    assert len(manifest.shards) > 3
    for i, chat in enumerate(chats(24)):
        ids, mask = dataset.row(i)
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat["messages"], tokenize=False)
        answers = "".join(m["content"] + "<|im_end|>" for m in chat["messages"] if m["role"] == "assistant")
        assert tokenizer.decode(ids[mask == 1]) == answers
    counts = {name: manifest.ledger[name] for name in ("rows_in", "kept", "rows", "validation_rows", "cut", "dropped")}
    assert counts == {"rows_in": 24, "kept": 24, "rows": 24, "validation_rows": 0, "cut": 0, "dropped": {}}
    assert manifest.ledger["statistics"]["tokens"] == manifest.tokens == dataset.lengths.sum()
    assert manifest.ledger["statistics"]["supervised"] == manifest.supervised == dataset.supervised.sum()
    assert manifest.fingerprint == fingerprint(manifest.ingredients) == fingerprint(preparation.data_ingredients(config))
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"], "no working file is left"


def test_the_second_preparation_does_nothing(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    assert preparation.prepared(config, run) is None
    manifest = prepare(config, run)
    times = {path: path.stat().st_mtime_ns for path in run.shards.iterdir()}
    assert preparation.prepared(config, run) == manifest
    assert {path: path.stat().st_mtime_ns for path in run.shards.iterdir()} == times


def rewrite_conversations(config: Config, target: Path) -> Config:
    """Another text of the same size and time."""
    path = Path(config.data.conversations[0].path)
    before = path.stat()
    text = path.read_text()
    path.write_text(text.replace("heron", "horse"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert path.read_text() != text
    return config


def rewrite(name: str, old: str, new: str) -> Callable[[Config, Path], Config]:
    def change(config: Config, target: Path) -> Config:
        text = (target / name).read_text()
        assert old in text
        (target / name).write_text(text.replace(old, new, 1))
        return config

    change.__name__ = f"{name}: {new}"
    return change


def with_data(**values: Any) -> Callable[[Config, Path], Config]:
    def change(config: Config, target: Path) -> Config:
        return config.model_copy(update={"data": config.data.model_copy(update=values)})

    change.__name__ = str(values)
    return change


@pytest.mark.parametrize(
    "change",
    [
        rewrite_conversations,
        rewrite("chat_template.jinja", "<|im_end|>", " <|im_end|>"),
        rewrite("tokenizer.json", '"ignore_merges": false', '"ignore_merges": true'),
        rewrite("tokenizer_config.json", '"pad_token": "<|endoftext|>"', '"pad_token": "<|MASK|>"'),
        rewrite("config.json", f'"eos_token_id": {IM_END}', '"eos_token_id": [0, 2]'),
        rewrite("generation_config.json", f'"eos_token_id": {IM_END}', '"eos_token_id": [0, 2]'),
        with_data(max_length=100),
        with_data(too_long="drop"),
        with_data(shard_tokens=1000),
    ],
    ids=lambda change: change.__name__,
)
def test_whatever_decides_the_rows_changes_the_fingerprint(
    tmp_path: Path, target: Path, change: Callable[[Config, Path], Config]
) -> None:
    config = make_config(tmp_path, target)
    run = open_run(config)
    old = prepare(config, run)
    changed = change(config, target)
    assert preparation.prepared(changed, run) is None
    new = prepare(changed, run)
    assert new.fingerprint != old.fingerprint
    assert read_manifest(run.shards) == new
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"], "the older shards are gone"
    assert preparation.prepared(changed, run) == new


def test_the_code_of_the_data_room_is_in_the_fingerprint(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, target_dir)
    copied = tmp_path / "code"
    shutil.copytree(Path(preparation.__file__).parent / "data", copied / "data", ignore=shutil.ignore_patterns("__pycache__"))
    here = preparation.data_ingredients(config)
    monkeypatch.setattr(preparation, "__file__", str(copied / "preparation.py"))
    assert preparation.data_ingredients(config) == here, "the same code elsewhere is the same code"
    helper = copied / "data" / "tokenization.py"
    helper.write_text(helper.read_text().replace("BATCH_ROWS = 64", "BATCH_ROWS = 65"))
    changed = preparation.data_ingredients(config)
    assert {key for key in here if here[key] != changed[key]} == {"code"}


def test_what_does_not_decide_the_rows_keeps_the_shards(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    manifest = prepare(config, run)
    moved = shutil.copy(config.data.conversations[0].path, tmp_path / "moved.jsonl")
    for other in (
        make_config(tmp_path, target_dir, training={"learning_rate": 0.5, "epochs": 9}),
        make_config(tmp_path, target_dir, evaluation={"max_new_tokens": 3}),
        make_config(tmp_path, target_dir, drafter={"block_size": 7}, seed=8),
        make_config(tmp_path, target_dir, pipeline={"readers": 3}),
        make_config(tmp_path, target_dir, data={"conversations": str(moved)}),
    ):
        assert preparation.prepared(other, run) == manifest


def test_a_file_changed_between_selecting_and_sharding_does_not_pass_for_read(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path, target)
    run = open_run(config)
    with preparation.working(run) as work:
        selected = preparation.select(config, run, work)
        rewrite_conversations(config, target)
        how = preparation.tokenizing(config, selected.ingredients["date"])
        with preparation.tokenizer(config, how, selected, work) as tokenize:
            preparation.shard(config, run, work, selected, [tokenize(part) for part in selected.parts])
    assert preparation.prepared(config, run) is None, "these shards hold the older text"


def test_a_broken_shard_is_named_with_a_remedy_that_works(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    manifest = prepare(config, run)
    with open(run.shards / manifest.shards[0].name, "r+b") as file:
        file.truncate(manifest.shards[0].bytes - 1)
    with pytest.raises(ValueError, match=rf"{manifest.shards[0].name}: .*delete {run.shards} and run again"):
        preparation.prepared(config, run)
    shutil.rmtree(run.shards)
    assert prepare(config, run) == manifest


def test_an_interrupted_sharding_keeps_the_older_shards_and_the_next_run_makes_new_ones(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, target_dir, data={"shard_tokens": 300})
    run = open_run(config)
    older = prepare(config, run)
    write_jsonl(tmp_path / "conversations.jsonl", chats(30))
    read_batches = shards.read_batches

    def interrupted(path: Path) -> Any:
        yield next(read_batches(path))
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "read_batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, run)
    monkeypatch.undo()
    assert read_manifest(run.shards) == older
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"]
    assert preparation.prepared(config, run) is None
    assert prepare(config, run).rows == 30


def test_two_worker_processes_make_the_same_shards(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir, data={"shard_tokens": 300})
    alone = prepare(config, open_run(config))
    pooled = make_config(tmp_path, target_dir, data={"shard_tokens": 300, "part_rows": 7, "processes": 2}, name="pooled")
    assert prepare(pooled, open_run(pooled)) == alone
    renamed = config.model_copy(update={"data": pooled.data})
    assert preparation.prepared(renamed, open_run(renamed)) == alone, "who did the work is no other experiment"


DATED = "{{- strftime_now('%Y-%m-%d') + '\\n' -}}" + CHATML


def test_the_day_in_a_template_is_frozen_for_the_run_and_no_ingredient_without_one(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path, target)
    run = open_run(config)
    plain = prepare(config, run)
    assert plain.ingredients["date"] is None
    (target / "chat_template.jinja").write_text(DATED)
    assert preparation.frozen_date(config, run) == datetime.date.today().isoformat()
    past = config.model_copy(update={"data": config.data.model_copy(update={"date": "2020-02-02"})})
    dated = prepare(past, run)
    assert dated.ingredients["date"] == "2020-02-02"
    assert preparation.prepared(config, run) == dated, "another day, with the date left to the run, is no other data"
    (target / "chat_template.jinja").write_text(CHATML)
    assert prepare(past, run).fingerprint == plain.fingerprint, "the day does not matter where none is printed"


# ---- bad input ------------------------------------------------------------------------------------------------------

USER_ONLY = {"messages": [{"role": "user", "content": "Hi"}]}
UNKNOWN = {"messages": [{"role": "user", "content": "Hi"}, {"role": "heron_7b", "content": "Ho"}]}
STOPLESS = CHATML.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty: give at least one conversation"),
        ([UNKNOWN], r"line 1: unknown role 'heron_7b'; known are"),
        ([*chats(4), UNKNOWN], r"only 4 of 5 .*1 x unknown role 'heron_7b'"),
        ([USER_ONLY] * 4, r"only 0 of 4 conversations can be trained.*4 x no assistant turn"),
        ([*chats(8), USER_ONLY, "oops"], r"only 8 of 10 .*min_kept is 90%.*1 x no assistant turn; 1 x broken JSON"),
    ],
)
def test_bad_conversations_are_one_error_and_leave_nothing(tmp_path: Path, target_dir: Path, rows: list[Any], words: str) -> None:
    write_jsonl(tmp_path / "conversations.jsonl", rows)
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    with pytest.raises(ValueError, match=words):
        prepare(config, run)
    assert [path.name for path in run.root.iterdir()] == ["run.json"]


def test_a_template_that_supervises_nothing_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = make_config(tmp_path, save_target(tmp_path / "target", template=STOPLESS))
    run = open_run(config)
    with pytest.raises(ValueError, match=r"only 0 of 24 .*24 x an assistant turn without a stop token"):
        prepare(config, run)
    assert [path.name for path in run.root.iterdir()] == ["run.json"]


def test_a_failed_preparation_keeps_the_older_shards(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path, target)
    run = open_run(config)
    manifest = prepare(config, run)
    write_jsonl(Path(config.data.conversations[0].path), [UNKNOWN])
    with pytest.raises(ValueError, match="unknown role"):
        prepare(config, run)
    assert read_manifest(run.shards) == manifest
    assert len(TokenDataset(run.shards)) == 24


def test_a_write_that_fails_on_the_disk_keeps_what_was_there(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    older = prepare(config, run)
    write_jsonl(tmp_path / "conversations.jsonl", chats(30))

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparation, "write_shards", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(config, run)
    assert read_manifest(run.shards) == older
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"]
