"""Conversations to token rows: the ledger adds up, lengths hold, and every fixture with every template is kept rightly or dropped."""

import itertools
import json
import re
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dflash_core.config import DataConfig
from dflash_core.data.tokenization import Ledger, check_kept, load_tokenizer, tokenize, tokenizer_files
from dflash_core.records import TokenRow
from tests.data.templates import TEMPLATES
from tests.data.test_chat import QWEN, QWEN_STOP, STOP, supervised
from tests.fakes import VOCAB, chats, make_tokenizer, save_target, write_jsonl

FIXTURES = (Path(__file__).parent / "fixtures.jsonl").read_text(encoding="utf-8").splitlines()


def run(
    path: Path, tokenizer: Any, *, stop: frozenset[int] = STOP, vocab: int = VOCAB, **data: Any
) -> tuple[list[TokenRow], dict[str, Any]]:
    """Rows and ledger of a file; the ledger's sum is checked against the file each time."""
    ledger = Ledger()
    rows = list(tokenize(DataConfig(conversations=str(path), **data), tokenizer, stop, vocab, ledger))
    counts = ledger.as_dict()
    lines = sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    assert counts["rows_in"] == lines == counts["kept"] + sum(counts["dropped"].values())
    assert counts["kept"] == len(rows)
    assert all(counts["dropped"].values())
    return rows, counts


# ---- every fixture of CASES.md with every template ------------------------------------------------------------------

UNUSABLE = {  # whatever the template
    "F02": "no assistant turn",
    "F03": "no assistant turn",
    "F04": "empty messages",
    "F07": "content is no text",
    "F09": "content is no text",
    "F12": "no messages",
    "F19": "content is no text",
    "F20": "content is no text",
    "F22": "text is no valid Unicode",
}
FIRST = "the assistant speaks first"
FEW = "fewer than 2 supervised tokens"
REFUSED = "template rejected the row"
MERGED = "the served prompt's tokens are no prefix of the row's"
NO_PREFIX = "the served prompt is no prefix of the render"
DROPPED: dict[str, dict[str, str]] = {  # beside UNUSABLE; all other rows are kept
    "T1 chatml": {"F01": FIRST, "F05": FEW},
    "T2 tagged": {"F01": FIRST, "F05": FEW},
    "T3 strict": {"F01": REFUSED, "F05": FEW, "F08": REFUSED, "F10": REFUSED},
    "T4 reasoning": {"F01": FIRST, "F10": NO_PREFIX},
    "T5 begins": {"F01": FIRST, "F05": FEW},
    "T7 trims": {"F01": FIRST, "F05": FEW, "F06": FEW},
    "T8 default system": {"F01": FIRST, "F05": FEW},
    "T9 tool mapping": {"F01": FIRST, "F05": FEW},
    "Qwen-Qwen3-0.6B": {"F01": FIRST, "F10": NO_PREFIX},
    "Qwen-Qwen2.5-7B-Instruct": {"F01": FIRST, "F05": FEW, "F06": MERGED},  # Qwen's BPE joins blanks over the prompt's end
}


def fixture_id(line: str) -> str:
    found = re.match(r'\{"id":"(F\d\d)"', line)
    assert found
    return found[1]


def said(message: dict[str, Any]) -> str:
    """What an assistant says apart from its reasoning; composed letters, which Qwen's tokenizer writes for decomposed ones."""
    return unicodedata.normalize("NFC", message["content"].split("</think>")[-1].strip())


def assert_only_the_assistant_speaks(texts: list[str], messages: list[dict[str, Any]]) -> None:
    """Each run of supervised text ends one assistant turn, in order, and holds nothing that another role said."""
    assistants = [message for message in messages if message["role"] == "assistant"]
    assert len(texts) == len(assistants)
    for text, message in zip(texts, assistants, strict=True):
        assert text.endswith("<|im_end|>")
        assert text.count("<|im_end|>") == 1
        answer = unicodedata.normalize("NFC", text.removesuffix("<|im_end|>"))
        if message.get("tool_calls"):
            assert message["tool_calls"][0]["function"]["name"] in answer or answer == message["content"]
        else:
            assert answer.strip().endswith(said(message))
            extra = answer.strip().removesuffix(said(message)).replace("<think>", "").replace("</think>", "").strip()
            thought = message.get("reasoning_content", message["content"].split("</think>")[0].replace("<think>", ""))
            assert extra in ("", thought.strip())
        assert not any(other["content"] in text for other in messages if other["role"] != "assistant")


def cross(path: Path, name: str, tokenizer: Any, stop: frozenset[int], vocab: int) -> None:
    for line in FIXTURES:
        rows, ledger = run(write_jsonl(path, [line]), tokenizer, stop=stop, vocab=vocab)
        dropped = {**UNUSABLE, **DROPPED[name]}.get(fixture_id(line))
        if dropped is None:
            assert ledger["dropped"] == {}, (line, ledger)
            assert_only_the_assistant_speaks(supervised(tokenizer, rows[0]), json.loads(line)["messages"])
        else:
            assert [reason.split(":")[0] for reason in ledger["dropped"]] == [dropped], line


@pytest.mark.parametrize("name", [name for name in DROPPED if name in TEMPLATES])
def test_every_fixture_with_every_kind_of_template(name: str, tmp_path: Path) -> None:
    cross(tmp_path / "one.jsonl", name, make_tokenizer(TEMPLATES[name]), STOP, VOCAB)


@pytest.mark.parametrize("name", QWEN)
def test_every_fixture_with_real_templates(name: str, tmp_path: Path, qwen: Any) -> None:
    cross(tmp_path / "one.jsonl", name, qwen(name), QWEN_STOP, 151_936)


@pytest.mark.parametrize(("name", "kept"), [("unstopped", []), ("counting", []), ("other prompt", ["F13", "F16"])])
def test_a_template_with_little_proof_keeps_little_and_says_why(name: str, kept: list[str], tmp_path: Path) -> None:
    """F13 and F16 open with the tag that `other prompt` adds, so there the prompt is a prefix."""
    rows, ledger = run(write_jsonl(tmp_path / "all.jsonl", FIXTURES), make_tokenizer(TEMPLATES[name]))
    assert [row.id for row in rows] == kept
    assert len(ledger["dropped"]) >= 6


def test_all_fixtures_in_one_file(tmp_path: Path) -> None:
    rows, ledger = run(write_jsonl(tmp_path / "all.jsonl", FIXTURES), make_tokenizer())
    dropped = Counter({**UNUSABLE, **DROPPED["T1 chatml"]}.values())
    assert ledger == {"rows_in": 22, "kept": 11, "cut": 0, "dropped": dict(dropped)}
    assert [row.id for row in rows] == ["F00", "F06", "F08", "F10", "F13", "F14", "F15", "F16", "F17", "F18", "F21"]


def test_an_unknown_role_stops_the_preparation(tmp_path: Path) -> None:
    bad = '{"id":"F11","messages":[{"role":"user","content":"Who?"},{"role":"heron_7b","content":"A bot."}]}'
    with pytest.raises(ValueError, match=r"line 2: unknown role 'heron_7b'"):
        run(write_jsonl(tmp_path / "c.jsonl", [chats(1)[0], bad]), make_tokenizer())


@pytest.mark.parametrize(
    "template",
    ["GLM-4.6", "GLM-4.7-Flash", "MiniMax-M2", "Mistral-Small-3.2-24B-Instruct-2506", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1"]
    + ["deepseek-ai-DeepSeek-V3.2", "ibm-granite-granite-4.0", "moonshotai-Kimi-K2", "openai-gpt-oss-120b"],
)
def test_no_real_template_supervises_a_user_or_stops_the_flow(template: str, tmp_path: Path, qwen: Any) -> None:
    """With a foreign tokenizer most of their rows have no stop token and are dropped; none may be masked wrongly or crash."""
    tokenizer = qwen(template)
    for line in [*FIXTURES, *map(json.dumps, chats(3))]:
        rows, _ = run(write_jsonl(tmp_path / "c.jsonl", [line]), tokenizer, stop=QWEN_STOP, vocab=151_936)
        if rows:
            texts = supervised(tokenizer, rows[0])
            assert texts
            others = [message["content"] for message in json.loads(line)["messages"] if message["role"] != "assistant"]
            assert not any(other in text for other, text in itertools.product(others, texts))


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
