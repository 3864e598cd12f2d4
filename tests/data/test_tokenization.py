"""Parts of conversations to token rows: the ledger adds up, lengths and order hold, and a stop leaves nothing half-written."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.chat import open_chat
from dflash_core.data.conversations import read_conversations, write_part
from dflash_core.data.shards import read_stream
from dflash_core.data.tokenization import (
    Interrupted,
    Ledger,
    Limits,
    Row,
    check_kept,
    fit,
    load_tokenizer,
    row_files,
    tokenize_part,
    tokenizer_files,
)
from dflash_core.data_config import DataConfig
from dflash_core.records import Conversation, TokenRow
from tests.data.test_chat import STOP, supervised
from tests.fakes import VOCAB, chats, make_tokenizer, save_target, write_jsonl

FIXTURES = (Path(__file__).parent / "fixtures.jsonl").read_text(encoding="utf-8").splitlines()


def run(
    path: Path, tokenizer: Any, *, stop: frozenset[int] = STOP, vocab: int = VOCAB, **data: Any
) -> tuple[list[TokenRow], dict[str, Any]]:
    """Rows and ledger of a file; the ledger's sum is checked against the file each time."""
    config = DataConfig(conversations=str(path), **data)
    part = path.with_name("part-00000.jsonl")
    dropped: Counter[str] = Counter()
    write_part(part, read_conversations(config, dropped))
    limits = Limits(max_length=config.max_length, too_long=config.too_long, vocab_size=vocab)
    ledger = tokenize_part(part, chat=open_chat(tokenizer, stop_ids=stop), limits=limits, tick=lambda conversations: None)
    counts = (Ledger(dropped=dropped) + ledger).as_dict()
    training, validation = row_files(part)
    rows = list(read_stream(training)) if training.exists() else []
    training.unlink(missing_ok=True)
    assert not validation.exists()
    lines = sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    assert counts["rows_in"] == lines == counts["kept"] + sum(counts["dropped"].values())
    assert counts["kept"] == len(rows)
    assert all(counts["dropped"].values())
    return rows, counts


# ---- the fixtures through the reader and the ledger ------------------------------------------------------------------

UNUSABLE = {
    "F02": "no assistant turn",
    "F03": "no assistant turn",
    "F04": "empty messages",
    "F09": "content is no text",
    "F20": "content is no text",
    "F22": "text is no valid Unicode",
}
FEW = "fewer than 2 supervised tokens in a row"


def test_all_fixtures_in_one_file(tmp_path: Path) -> None:
    rows, ledger = run(write_jsonl(tmp_path / "all.jsonl", FIXTURES), make_tokenizer())
    alone = [run(write_jsonl(tmp_path / "one.jsonl", [line]), make_tokenizer()) for line in FIXTURES]
    assert rows == [row for found, _ in alone for row in found], "in the order of the file, and none depends on the others"
    assert ledger["rows_in"] == len(FIXTURES) == 22
    assert ledger["dropped"] == dict(sum((Counter(one["dropped"]) for _, one in alone), Counter()))
    assert {**UNUSABLE, "F05": FEW}.items() <= {
        line[7:10]: next(iter(one["dropped"]), "") for line, (_, one) in zip(FIXTURES, alone, strict=True)
    }.items()
    assert ledger["methods"] == {"prefix": ledger["kept"]}
    assert ledger["kept"] >= 12


# ---- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_length", "kept", "cut"), [(30, 0, 0), (41, 8, 8), (45, 40, 40), (60, 40, 28), (80, 40, 14), (10_000, 40, 0)]
)
def test_cutting_keeps_the_first_tokens_of_ids_and_mask_alike(tmp_path: Path, max_length: int, kept: int, cut: int) -> None:
    """The answers of these 40 rows open at token 39 to 41, so the shortest limits leave fewer than two supervised tokens."""
    path = write_jsonl(tmp_path / "c.jsonl", chats(40))
    whole, _ = run(path, make_tokenizer())
    rows, ledger = run(path, make_tokenizer(), max_length=max_length)
    shortened = [TokenRow(id=row.id, input_ids=row.input_ids[:max_length], loss_mask=row.loss_mask[:max_length]) for row in whole]
    assert rows == [row for row in shortened if sum(row.loss_mask) >= 2]
    assert (ledger["kept"], ledger["cut"]) == (kept, cut)
    assert ledger["dropped"] == ({FEW + " after the cut": 40 - kept} if kept < 40 else {})


def test_the_drop_policy_leaves_long_rows_out_whole(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", chats(40))
    whole, _ = run(path, make_tokenizer())
    limit = sorted(len(row.input_ids) for row in whole)[20]
    rows, ledger = run(path, make_tokenizer(), max_length=limit, too_long="drop")
    assert rows == [row for row in whole if len(row.input_ids) <= limit]
    assert ledger["dropped"] == {"longer than max_length": 40 - len(rows)}
    assert ledger["cut"] == 0
    assert 0 < len(rows) < 40


def test_a_very_long_answer_and_a_very_long_conversation(tmp_path: Path) -> None:
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(60) for role in ("user", "assistant")]
    long = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "word " * 20_000}]
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": turns}, {"messages": long}])
    tokenizer = make_tokenizer()
    rows, ledger = run(path, tokenizer, max_length=200_000)
    assert ledger["cut"] == 0
    assert supervised(tokenizer, rows[0]) == [f"assistant {i}<|im_end|>" for i in range(60)]
    assert supervised(tokenizer, rows[1]) == ["word " * 20_000 + "<|im_end|>"]


def test_an_id_above_the_targets_embedding_is_dropped_by_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", chats(10))
    whole, _ = run(path, make_tokenizer())
    rows, ledger = run(path, make_tokenizer(), vocab=VOCAB - 1)
    assert rows == [row for row in whole if VOCAB - 1 not in row.input_ids]
    assert ledger["dropped"].get("token id outside the target's vocabulary", 0) == 10 - len(rows)
    assert ledger["dropped"]


# ---- parts ----------------------------------------------------------------------------------------------------------

LIMITS = Limits(max_length=60, too_long="cut", vocab_size=VOCAB)


def conversations(count: int, *, validation: frozenset[int] = frozenset()) -> list[Conversation]:
    return [
        Conversation(id=row["id"], messages=row["messages"], validation=i in validation) for i, row in enumerate(chats(count))
    ]


def tokenized(part: Path, *, tick: Callable[[int], None] = lambda conversations: None) -> Ledger:
    return tokenize_part(part, chat=open_chat(make_tokenizer(), stop_ids=STOP), limits=LIMITS, tick=tick)


def test_parts_give_the_rows_and_the_ledger_of_the_whole_in_order(tmp_path: Path) -> None:
    together, whole = conversations(150), tmp_path / "part-00009.jsonl"
    write_part(whole, together)
    expected = tokenized(whole)
    rows, ledger = [], Ledger()
    for number, start in enumerate((0, 70, 140)):
        part = tmp_path / f"part-{number:05d}.jsonl"
        write_part(part, together[start : start + 70])
        ledger += tokenized(part)
        rows += read_stream(row_files(part)[0])
    assert rows == list(read_stream(row_files(whole)[0]))
    assert ledger.as_dict() == expected.as_dict()
    assert ledger.cut > 0
    lengths = [len(row.input_ids) for row in rows]
    assert (ledger.rows, sum(lengths), max(lengths)) == (150, expected.as_dict()["statistics"]["tokens"], 60)


def test_the_validation_side_has_its_own_file_and_an_empty_side_none(tmp_path: Path) -> None:
    part = tmp_path / "part-00000.jsonl"
    write_part(part, conversations(9))
    tokenized(part)
    training, validation = row_files(part)
    whole = list(read_stream(training))
    assert not validation.exists()
    training.unlink()
    write_part(part, conversations(9, validation=frozenset({0, 4})))
    ledger = tokenized(part)
    assert (ledger.rows, ledger.validation_rows) == (9, 2)
    assert list(read_stream(validation)) == [whole[0], whole[4]]
    assert list(read_stream(training)) == [row for i, row in enumerate(whole) if i not in (0, 4)]


def test_a_stop_request_ends_a_part_at_its_next_batch_and_leaves_no_file(tmp_path: Path) -> None:
    part, seen = tmp_path / "part-00000.jsonl", []
    write_part(part, conversations(1000))

    def tick(count: int) -> None:
        seen.append(count)
        if sum(seen) > 100:
            raise Interrupted

    with pytest.raises(Interrupted):
        tokenized(part, tick=tick)
    assert sum(seen) < 200
    assert [path.name for path in tmp_path.iterdir()] == [part.name]


def test_supervised_tokens_apart_from_each_other_are_no_anchor(tmp_path: Path) -> None:
    """Three supervised tokens and never two in a row; the second row has a pair at its very end."""
    rows = [([5, 6, 7, 8, 9], [1, 0, 1, 0, 1]), ([5, 6, 7, 8, 9], [1, 0, 0, 1, 1])]
    fitted = [fit(TokenRow(id="", input_ids=ids, loss_mask=mask), LIMITS) for ids, mask in rows]
    assert fitted[0] == FEW
    assert isinstance(fitted[1], Row)
    assert fit(TokenRow(id="", input_ids=[5, -6, 7], loss_mask=[0, 1, 1]), LIMITS) == "token id outside the target's vocabulary"


# ---- too little kept ------------------------------------------------------------------------------------------------


def ledger_of(kept: int, **dropped: int) -> Ledger:
    return Ledger(kept=kept, dropped=Counter(dropped))


def test_too_few_kept_rows_are_refused_with_the_main_reasons() -> None:
    with pytest.raises(ValueError, match="only 8 of 20") as error:
        check_kept(ledger_of(8, a=1, b=7, c=1, d=1, e=1, f=1), 0.9)
    message = str(error.value)
    assert "40%" in message
    assert "min_kept is 90%" in message
    assert "Dropped: 7 x b; 1 x a" in message
    assert "1 x f" not in message, "the five main ones"


@pytest.mark.parametrize(
    ("kept", "dropped", "min_kept", "refused"),
    [(9, 1, 0.9, False), (8, 2, 0.9, True), (0, 1, 0.0, True), (1, 99, 0.0, False), (0, 0, 0.0, True)],
)
def test_the_limit_itself_is_enough_and_nothing_kept_never(kept: int, dropped: int, min_kept: float, refused: bool) -> None:
    ledger = ledger_of(kept, reason=dropped)
    if refused:
        with pytest.raises(ValueError, match=f"only {kept} of {kept + dropped}"):
            check_kept(ledger, min_kept)
    else:
        check_kept(ledger, min_kept)


# ---- the tokenizer --------------------------------------------------------------------------------------------------


def test_a_tokenizer_without_a_template_is_refused_naming_the_model(tmp_path: Path) -> None:
    target = save_target(tmp_path / "bare", template=None)
    with pytest.raises(ValueError, match=rf"target\.path '{target}': its tokenizer has no chat template"):
        load_tokenizer(str(target))


def test_the_loaded_tokenizer_gives_the_same_rows(target_dir: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", chats(12))
    assert run(path, load_tokenizer(str(target_dir))) == run(path, make_tokenizer())


def test_tokenizer_files_hold_everything_that_decides_ids_and_no_weights(target_dir: Path, tmp_path: Path) -> None:
    assert [file.name for file in tokenizer_files(str(target_dir))] == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    older = ("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer.model", "vocab.txt")
    for name in (*older, "config.json", "model.safetensors", "training_args.bin"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in tokenizer_files(str(tmp_path))] == sorted(older)
