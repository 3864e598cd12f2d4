"""Preparation put together: what the fingerprint covers, what is skipped, and bad input that leaves nothing behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core import assembly
from dflash_core.config import Config, fingerprint
from dflash_core.data import shards
from dflash_core.data.shards import TokenDataset, read_manifest
from dflash_core.records import Manifest
from dflash_core.rundir import RunDirectory, open_run
from tests.fakes import CHATML, IM_END, chats, make_config, make_tokenizer, save_target, write_jsonl


def prepare(config: Config, run: RunDirectory) -> Manifest:
    """What the flow does: skip what is there, else tokenize and shard."""
    return assembly.prepared(config, run) or assembly.shard(config, run, assembly.tokenize(config, run))


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
    assert manifest.ledger == {"rows_in": 24, "kept": 24, "cut": 0, "dropped": {}}
    assert manifest.fingerprint == fingerprint(manifest.ingredients) == fingerprint(assembly.data_ingredients(config))
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"], "no working file is left"


def test_the_second_preparation_does_nothing(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    assert assembly.prepared(config, run) is None
    manifest = prepare(config, run)
    times = {path: path.stat().st_mtime_ns for path in run.shards.iterdir()}
    assert assembly.prepared(config, run) == manifest
    assert {path: path.stat().st_mtime_ns for path in run.shards.iterdir()} == times


def rewrite_conversations(config: Config, target: Path) -> Config:
    """Another text of the same size and time."""
    path = Path(config.data.conversations)
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
    assert assembly.prepared(changed, run) is None
    new = prepare(changed, run)
    assert new.fingerprint != old.fingerprint
    assert read_manifest(run.shards) == new
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"], "the older shards are gone"
    assert assembly.prepared(changed, run) == new


def test_the_code_of_the_data_room_is_in_the_fingerprint(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, target_dir)
    copied = tmp_path / "code"
    shutil.copytree(Path(assembly.__file__).parent / "data", copied / "data", ignore=shutil.ignore_patterns("__pycache__"))
    here = assembly.data_ingredients(config)
    monkeypatch.setattr(assembly, "__file__", str(copied / "assembly.py"))
    assert assembly.data_ingredients(config) == here, "the same code elsewhere is the same code"
    helper = copied / "data" / "tokenization.py"
    helper.write_text(helper.read_text().replace("MIN_SUPERVISED = 2", "MIN_SUPERVISED = 3"))
    changed = assembly.data_ingredients(config)
    assert {key for key in here if here[key] != changed[key]} == {"code"}


def test_what_does_not_decide_the_rows_keeps_the_shards(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    manifest = prepare(config, run)
    moved = shutil.copy(config.data.conversations, tmp_path / "moved.jsonl")
    for other in (
        make_config(tmp_path, target_dir, training={"learning_rate": 0.5, "epochs": 9}),
        make_config(tmp_path, target_dir, evaluation={"max_new_tokens": 3}),
        make_config(tmp_path, target_dir, drafter={"block_size": 7}, seed=8),
        make_config(tmp_path, target_dir, pipeline={"readers": 3}),
        make_config(tmp_path, target_dir, data={"conversations": str(moved)}),
    ):
        assert assembly.prepared(other, run) == manifest


def test_a_file_changed_between_tokenizing_and_sharding_does_not_pass_for_read(tmp_path: Path, target: Path) -> None:
    config = make_config(tmp_path, target)
    run = open_run(config)
    tokenized = assembly.tokenize(config, run)
    rewrite_conversations(config, target)
    assembly.shard(config, run, tokenized)
    assert assembly.prepared(config, run) is None, "these shards hold the older text"


def test_a_broken_shard_is_named_with_a_remedy_that_works(tmp_path: Path, target_dir: Path) -> None:
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    manifest = prepare(config, run)
    with open(run.shards / manifest.shards[0].name, "r+b") as file:
        file.truncate(manifest.shards[0].bytes - 1)
    with pytest.raises(ValueError, match=rf"{manifest.shards[0].name}: .*delete {run.shards} and run again"):
        assembly.prepared(config, run)
    shutil.rmtree(run.shards)
    assert prepare(config, run) == manifest


def test_an_interrupted_sharding_leaves_no_shards_and_the_next_run_makes_them(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, target_dir, data={"shard_tokens": 300})
    run = open_run(config)
    tokenized = assembly.tokenize(config, run)
    rows = shards.read_stream(Path(tokenized["rows"]))

    def interrupted(path: Path) -> Any:
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(assembly, "read_stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assembly.shard(config, run, tokenized)
    monkeypatch.undo()
    assert not run.shards.exists()
    assert assembly.prepared(config, run) is None
    assert prepare(config, run).rows == 24
    assert sorted(path.name for path in run.root.iterdir()) == ["run.json", "shards"]


# ---- bad input ------------------------------------------------------------------------------------------------------

USER_ONLY = {"messages": [{"role": "user", "content": "Hi"}]}
UNKNOWN = {"messages": [{"role": "user", "content": "Hi"}, {"role": "heron_7b", "content": "Ho"}]}
STOPLESS = CHATML.replace("<|im_end|>", "")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty: give at least one conversation"),
        ([UNKNOWN], r"line 1: unknown role 'heron_7b'; known are"),
        ([*chats(30), UNKNOWN], r"line 31: unknown role 'heron_7b'"),
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
    write_jsonl(Path(config.data.conversations), [UNKNOWN])
    with pytest.raises(ValueError, match="unknown role"):
        prepare(config, run)
    assert read_manifest(run.shards) == manifest
    assert len(TokenDataset(run.shards)) == 24


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"conversations": "tarin.jsonl"}}, r"data\.conversations 'tarin\.jsonl': no such file"),
        ({"evaluation": {"prompts": "nowhere.jsonl"}}, r"evaluation\.prompts 'nowhere\.jsonl': no such file"),
        ({"target": {"path": "no_such_model"}}, r"target\.path 'no_such_model': no such directory"),
        ({"target": {"attention": "flash_attention_2"}}, r"flash_attention_2 needs CUDA"),
        ({"drafter": {"target_layer_ids": [1, 3]}}, r"layer 3 is the last"),
        ({"drafter": {"target_layer_ids": [1, 4]}}, r"outside 0\.\.2 \(the target has 4 layers\)"),
        ({"drafter": {"target_layer_ids": [1, 1]}}, r"not rising strictly"),
        ({"drafter": {"target_layer_ids": None, "num_layers": 3}}, r"\[1, 1, 1\].*set drafter\.target_layer_ids"),
        ({"drafter": {"mask_token_id": 300}}, r"mask_token_id 300: outside the target's 300 embedding rows"),
        ({"drafter": {"mask_token_id": IM_END}}, r"mask_token_id 2 is the target's eos token"),
        ({"drafter": {"mask_token_id": 0}}, r"mask_token_id 0 is the target's pad token"),
        ({"pipeline": {"ahead_bytes": 1000}}, r"ahead_bytes 1000 is below 589824"),
        ({"data": {"max_length": 513}, "training": {"tokens_per_batch": 513}}, r"max_length 513 is above the target's 512"),
    ],
)
def test_check_refuses_before_anything_is_written(tmp_path: Path, target_dir: Path, sections: dict[str, Any], words: str) -> None:
    config = make_config(tmp_path, target_dir, **sections)
    with pytest.raises(ValueError, match=words):
        assembly.check(config)
    assert not Path(config.places.runs).exists()


def test_check_gives_the_facts_and_the_drafters_sizes(tmp_path: Path, target_dir: Path) -> None:
    facts, shape = assembly.check(make_config(tmp_path, target_dir))
    stored = json.loads((target_dir / "config.json").read_text())
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (
        stored["num_hidden_layers"],
        stored["hidden_size"],
        stored["vocab_size"],
    )
    assert facts.eos_ids == (IM_END,)
    assert (shape.target_layer_ids, shape.block_size, shape.hidden_size) == ((0, 1, 2), 4, 32)


def test_a_write_that_fails_on_the_disk_names_no_half_directory(tmp_path: Path, target_dir: Path) -> None:
    """A run directory that cannot be written is an error before, not half a result after."""
    config = make_config(tmp_path, target_dir)
    run = open_run(config)
    run.shards.with_name("shards.partial").write_text("a file where the writer wants a directory")
    with pytest.raises(OSError, match=r"shards\.partial"):
        prepare(config, run)
    assert not run.shards.exists()
