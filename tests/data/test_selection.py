"""Selection: every row accounted for; policies, weights, limits and the split, each by an independent count."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.data.conversations import read_part
from dflash_core.data.selection import BY_CHOICE, Selection, ingredients, report_lines, select
from dflash_core.data_config import DataConfig
from dflash_core.records import Conversation
from tests.fakes import chats, write_jsonl

Rows = list[dict[str, Any]]
Run = Callable[..., tuple[Selection, list[Conversation]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Selects and reads the parts back; the ledger's sum is checked each time."""

    def selected(
        conversations: Any, *, seed: int = 0, prompts: list[str] | None = None, part_rows: int = 1000, **data: Any
    ) -> tuple[Selection, list[Conversation]]:
        config = DataConfig(conversations=conversations, **data)
        directory = tmp_path / "parts"
        found = select(config, seed=seed, prompts=prompts or [], directory=directory, part_rows=part_rows)
        rows = [row for part in found.parts for row in read_part(Path(part))]
        ledger = found.ledger
        assert ledger["rows_in"] == ledger["kept"] + sum(ledger["dropped"].values())
        assert ledger["rows_in"] == sum(source["rows_in"] for source in found.sources) + found.noted["repeat by weight"]
        assert ledger["kept"] == len(rows) == found.rows == sum(source["kept"] for source in found.sources)
        assert found.validation_rows == sum(row.validation for row in rows)
        assert sorted(str(path) for path in directory.iterdir()) == list(found.parts), "no working file is left"
        return found, rows

    return selected


def said(prompt: str, answer: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], **more}


def source(tmp_path: Path, name: str, rows: Rows) -> str:
    return str(write_jsonl(tmp_path / f"{name}.jsonl", rows))


def numbered(name: str, count: int) -> Rows:
    """Rows with nothing in common, ids `a0`, `a1`, ..."""
    words = [" ".join(f"{name}{i}{chr(97 + k)}" for k in range(8)) for i in range(count)]
    return [said(text, text[::-1], id=f"{name}{i}") for i, text in enumerate(words)]


def origins(rows: list[Conversation]) -> Counter[str]:
    return Counter(row.id[0] for row in rows)


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_all_rows_in_order_in_parts_of_the_asked_size(run: Run, tmp_path: Path) -> None:
    rows = chats(25)
    found, kept = run(source(tmp_path, "a", rows), part_rows=10)
    assert [Path(part).name for part in found.parts] == ["part-00000.jsonl", "part-00001.jsonl", "part-00002.jsonl"]
    assert [sum(1 for _ in read_part(Path(part))) for part in found.parts] == [10, 10, 5]
    assert [(row.id, row.messages, row.source) for row in kept] == [
        (row["id"], row["messages"], str(tmp_path / "a.jsonl")) for row in rows
    ]
    assert found.ledger == {"rows_in": 25, "kept": 25, "dropped": {}}
    fewer, _ = run(source(tmp_path, "a", rows[:5]), part_rows=10)
    assert len(fewer.parts) == 1, "older parts are gone, which `run` checks"


@pytest.mark.parametrize("part_rows", [1, 256, 999, 5000])
def test_copies_with_other_ids_and_rendered_rows_are_all_kept(run: Run, tmp_path: Path, part_rows: int) -> None:
    copies = [said("Name a prime above 10.", "Eleven is a prime number above ten.", id=f"F{i}") for i in range(20)]
    texts = [{"text": f"<|im_start|>user\nn{i % 3}<|im_end|>"} for i in range(300)]
    found, rows = run([source(tmp_path, "copies", copies), source(tmp_path, "texts", texts)], part_rows=part_rows)
    assert found.ledger == {"rows_in": 320, "kept": 320, "dropped": {}}
    assert [row.text for row in rows[20:23]] == [row["text"] for row in texts[:3]]
    assert found.noted["exact duplicate"] == 19 + 297


def test_sources_of_several_kinds_together(run: Run, tmp_path: Path) -> None:
    shapes = [said("x", "y"), {"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "q"}]}, {"text": "t"}]
    (tmp_path / "a.json").write_text(json.dumps(shapes))
    found, rows = run([str(tmp_path / "a.json"), source(tmp_path, "b", numbered("b", 4))])
    assert [len(row.messages) for row in rows] == [2, 2, 0, 2, 2, 2, 2]
    assert [(entry["rows_in"], entry["kept"]) for entry in found.sources] == [(3, 3), (4, 4)]


# ---- what cannot be used --------------------------------------------------------------------------------------------


def test_unusable_rows_are_counted_with_their_places(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ["oops", *numbered("a", 18), "{"])
    config = DataConfig(conversations=str(path))
    found, _ = run(str(path))
    assert found.ledger == {"rows_in": 20, "kept": 18, "dropped": {"broken JSON": 2}}
    assert found.places == {"broken JSON": [f"{path}, line 1", f"{path}, line 20"]}
    assert f"broken JSON: 2 (10%), dropped, first at {path}, line 1" in report_lines(config, found)


def test_too_few_usable_rows_stop_with_the_place_and_reasons(run: Run, tmp_path: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "x"}, {"role": "heron", "content": "y"}]}
    path = source(tmp_path, "a", [*numbered("a", 8), bad, bad])
    words = rf"^{path}, line 9: unknown role 'heron'; known are .*only 8 of 10 .*\(80%.*is 90%\)\. Dropped: 2 x unknown role"
    with pytest.raises(ValueError, match=words):
        run(path)
    assert list((tmp_path / "parts").iterdir()) == []
    assert run(path, min_kept=0.8)[0].rows == 8
    assert run(path, roles={"heron": "assistant"})[0].rows == 10
    with pytest.raises(ValueError, match="is empty: give at least one"):
        run(source(tmp_path, "none", []))


def test_policies_and_limits_do_not_count_as_unusable(run: Run, tmp_path: Path) -> None:
    found, _ = run(source(tmp_path, "a", numbered("a", 100)), max_rows=5)
    assert found.ledger["dropped"] == {"beyond data.max_rows": 95}
    assert set(found.ledger["dropped"]) <= BY_CHOICE


def test_stray_and_empty_files_are_reported(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", numbered("a", 3))
    (folder / "README.md").write_text("x")
    (folder / "b.jsonl").touch()
    found, _ = run(str(folder))
    lines = report_lines(DataConfig(conversations=str(folder)), found)
    assert lines[0] == (f"{folder}: 3 rows in, 3 usable, 3 taken; 1 ignored: {folder}/README.md; 1 empty: {folder}/b.jsonl")


# ---- policies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "kept"), [("keep", 20), ("drop", 13)])
@pytest.mark.parametrize("where", ["row", "message"])
def test_truncated_answers_are_counted_and_follow_the_policy(
    run: Run, tmp_path: Path, policy: str, kept: int, where: str
) -> None:
    cut = said("cut off", "This answer stops in the mid", id="F31")
    (cut if where == "row" else cut["messages"][1])["finish_reason"] = "length"
    whole = said("Name a prime above 10.", "Eleven.", id="F00", finish_reason="stop")
    path = source(tmp_path, "a", [cut] * 7 + [whole] * 13)
    found, rows = run(path, truncated_answers=policy)
    assert len(rows) == kept
    assert found.noted["truncated answer"] == 7
    word = "kept" if policy == "keep" else "dropped"
    lines = report_lines(DataConfig(conversations=path, truncated_answers=policy), found)
    assert f"truncated answer: 7 (35%), {word}" in lines
    assert all("finish_reason" not in message for row in rows for message in row.messages)


def test_exact_duplicates_are_the_same_words_whatever_the_id(run: Run, tmp_path: Path) -> None:
    rows = [*numbered("a", 3), said("x", "y", id="dup"), said("x", "z", id="dup"), said("x", "y", id="other")]
    found, kept = run(source(tmp_path, "a", rows), exact_duplicates="drop")
    assert [row.id for row in kept] == ["a0", "a1", "a2", "dup", "dup"], "equal ids with other content are other rows"
    assert found.ledger["dropped"] == {"exact duplicate": 1}


def test_near_duplicates_keep_the_first(run: Run, tmp_path: Path) -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    rows = [said(text, f"{text} number {i}", id=f"n{i}") for i in range(6)] + numbered("a", 4)
    path = source(tmp_path, "a", rows)
    found, kept = run(path, near_duplicates="drop")
    assert [row.id for row in kept] == ["n0", "a0", "a1", "a2", "a3"]
    assert found.ledger["dropped"] == {"near duplicate": 5}
    assert run(path)[0].noted["near duplicate"] == 5, "counted where they are kept"
    assert "near duplicate" not in run(path, near_duplicates="off")[0].noted
    assert run(path, near_duplicates="drop", similarity=0.99)[0].rows == 10


@pytest.mark.parametrize(("policy", "kept", "noted"), [("keep", 7, 2), ("drop", 5, 2), ("off", 7, 0)])
def test_overlap_with_evaluation_prompts(run: Run, tmp_path: Path, policy: str, kept: int, noted: int) -> None:
    long = " ".join(f"w{i}" for i in range(15))
    rows = [*numbered("a", 5), said(f"Please {long}.", "y", id="long"), said("6*7?", "42", id="short")]
    found, _ = run(source(tmp_path, "a", rows), prompts=[long, "6 * 7"], prompt_overlap=policy)
    assert found.rows == kept
    assert found.noted["overlaps an evaluation prompt"] == noted


def test_a_row_that_several_policies_drop_is_counted_once_by_the_first(run: Run, tmp_path: Path) -> None:
    row = said("6*7?", "42")
    rows = [*numbered("a", 5), {**row, "finish_reason": "length"}, row, row]
    drop = dict.fromkeys(("truncated_answers", "exact_duplicates", "near_duplicates", "prompt_overlap"), "drop")
    found, kept = run(source(tmp_path, "a", rows), prompts=["6*7?"], **drop)
    assert len(kept) == 5
    assert found.ledger["dropped"] == {
        "truncated answer": 1, "exact duplicate": 1, "overlaps an evaluation prompt": 1,
    }  # fmt: skip


# ---- weights and limits ---------------------------------------------------------------------------------------------


def test_a_limit_takes_of_every_source_and_the_same_again(run: Run, tmp_path: Path) -> None:
    sources = [source(tmp_path, name, numbered(name, 100)) for name in ("a", "b")]
    _, rows = run(sources, max_rows=100, seed=0)
    assert len(rows) == 100
    assert all(30 <= count <= 70 for count in origins(rows).values())
    ids = {row.id for row in rows}
    assert {row.id for row in run(sources, max_rows=100, seed=0)[1]} == ids
    assert {row.id for row in run(sources[::-1], max_rows=100, seed=0)[1]} == ids, "the order of sources plays no part"
    assert {row.id for row in run(sources, max_rows=100, seed=1)[1]} != ids
    assert [row.id for row in run(sources, max_rows=100, shuffle=False)[1]] == [f"a{i}" for i in range(100)]


def test_the_limit_comes_after_the_filters(run: Run, tmp_path: Path) -> None:
    rows = [row if i % 5 < 2 else {**row, "finish_reason": "length"} for i, row in enumerate(numbered("a", 100))]
    found, _ = run(source(tmp_path, "a", rows), truncated_answers="drop", max_rows=35)
    assert found.ledger == {
        "rows_in": 100,
        "kept": 35,
        "dropped": {"truncated answer": 60, "beyond data.max_rows": 5},
    }


def test_each_source_has_its_own_limit(run: Run, tmp_path: Path) -> None:
    paths = [source(tmp_path, name, numbered(name, 50)) for name in ("a", "b")]
    found, rows = run([{"path": paths[0], "max_rows": 10}, paths[1]])
    assert origins(rows) == {"a": 10, "b": 50}
    assert found.ledger["dropped"] == {"beyond the source's max_rows": 40}


@pytest.mark.parametrize(("weight", "times"), [(1.0, {1: 40}), (2.5, {2: 20, 3: 20}), (3.0, {3: 40}), (0.1, {1: 4})])
def test_a_weight_is_how_often_rows_are_taken(run: Run, tmp_path: Path, weight: float, times: dict[int, int]) -> None:
    found, rows = run({"path": source(tmp_path, "a", numbered("a", 40)), "weight": weight})
    assert len({row.id for row in rows}) == len(rows) == round(40 * weight), "ids stay distinct"
    assert Counter(Counter(row.id.split("#")[0] for row in rows).values()) == times
    dropped = 40 - sum(times.values())
    assert found.ledger["dropped"] == ({"left out by the source's weight": dropped} if dropped else {})
    assert {row.id.split("#")[1] for row in rows if "#" in row.id} == {str(i) for i in range(2, max(times) + 1)}


def test_weights_are_shares_under_a_limit(run: Run, tmp_path: Path) -> None:
    paths = [source(tmp_path, name, numbered(name, 400)) for name in ("a", "b")]
    _, rows = run([{"path": paths[0], "weight": 3}, paths[1]], max_rows=400)
    assert len(rows) == 400
    assert 260 <= origins(rows)["a"] <= 340, "three of four"


# ---- validation -----------------------------------------------------------------------------------------------------


def sides(rows: list[Conversation]) -> dict[str, bool]:
    return {row.messages[0]["content"]: row.validation for row in rows}


@pytest.mark.parametrize("by", ["prompt", "near_duplicates"])
def test_the_split_is_of_the_asked_share_and_stable(run: Run, tmp_path: Path, by: str) -> None:
    rows = numbered("a", 600)
    options = {"validation": 0.2, "validation_by": by}
    found, kept = run(source(tmp_path, "a", rows), **options)
    before = sides(kept)
    assert 85 <= found.validation_rows <= 155  # 120, four standard deviations
    more = sides(run(source(tmp_path, "a", [*numbered("b", 200), *reversed(rows)]), seed=9, **options)[1])
    assert {prompt: more[prompt] for prompt in before} == before, "new rows, another order and seed move none"
    for row in rows:
        row["id"], row["messages"][1]["content"] = "new", "another answer"
    assert sides(run(source(tmp_path, "a", rows), **options)[1]) == before, "nor do other answers and ids"
    half = sides(run(source(tmp_path, "a", rows), **options, max_rows=300)[1])
    assert half.items() <= before.items()


def test_rows_of_one_prompt_and_its_near_duplicates_are_on_one_side(run: Run, tmp_path: Path) -> None:
    prompts = [row["messages"][0]["content"] for row in numbered("a", 16)]
    variants = [said(f"{prompt} (v{k})", f"answer {k}") for prompt in prompts for k in range(9)]
    again = [said(row["messages"][0]["content"].upper() + "!", "other") for row in variants]
    path = source(tmp_path, "a", variants + again)
    split: dict[str, set[bool]] = {}
    for row in run(path, validation=0.3)[1]:
        split.setdefault(row.messages[0]["content"].lower().split(" (")[0], set()).add(row.validation)
    assert len(split) == 16
    assert all(len(side) == 1 for side in split.values())
    assert set.union(*split.values()) == {True, False}
    by_prompt = sides(run(path, validation=0.3, validation_by="prompt")[1])
    assert [by_prompt[row["messages"][0]["content"]] for row in variants] == [
        by_prompt[row["messages"][0]["content"]] for row in again
    ], "case and punctuation make no other prompt"
    assert len({by_prompt[row["messages"][0]["content"]] for row in variants[:9]}) == 2, "but another number does"


def test_real_near_duplicates_do_not_leak_into_validation(run: Run, assets_dir: Path) -> None:
    path = str(assets_dir / "conversations" / "near_duplicates.jsonl")
    found, rows = run(path, validation=0.3)
    assert 0 < found.validation_rows < 1000
    split: dict[str, set[bool]] = {}
    for row in rows:
        split.setdefault(re.sub(r" \(v\d+\)", "", row.messages[0]["content"]), set()).add(row.validation)
    torn = [prompt for prompt, side in split.items() if len(side) > 1]
    assert torn == []


def test_a_split_that_leaves_nothing_to_train_on_is_refused(run: Run, tmp_path: Path) -> None:
    rows = [said("Tell me everything that you know about the great heron of the north", f"{i}") for i in range(9)]
    path = source(tmp_path, "a", rows)
    outcomes = set()
    for share in (0.001, 0.999):
        try:
            outcomes.add(run(path, validation=share)[0].validation_rows)
        except ValueError as error:
            outcomes.add(str(error).split(":")[0])
    assert outcomes == {0, "data.validation 0.999"}


def test_validation_rows_are_not_repeated(run: Run, tmp_path: Path) -> None:
    found, rows = run({"path": source(tmp_path, "a", numbered("a", 60)), "weight": 2}, validation=0.3)
    assert len(rows) == 2 * (60 - found.validation_rows) + found.validation_rows
    assert not any(row.validation and "#" in row.id for row in rows)


def test_rows_without_turns_have_a_side_too(run: Run, tmp_path: Path) -> None:
    rows: Rows = [{"text": f"text number {i} {i * 7}"} for i in range(60)]
    rows += [{"input_ids": [i, i + 1, i * 2, answer], "loss_mask": [0, 0, 0, 1]} for i in range(60) for answer in (1, 2)]
    _, kept = run(source(tmp_path, "a", rows), validation=0.3, validation_by="prompt")
    ids = [row for row in kept if row.input_ids]
    assert [row.validation for row in ids[::2]] == [row.validation for row in ids[1::2]], "by what stands before the answer"
    assert 5 <= sum(row.validation for row in ids[::2]) <= 31
    assert 5 <= sum(row.validation for row in kept[:60]) <= 31


# ---- real files, and what decides -----------------------------------------------------------------------------------


def test_real_files_with_every_policy(run: Run, assets_dir: Path) -> None:
    folder = assets_dir / "conversations"
    found, _ = run(str(folder), exact_duplicates="drop")
    by_hand = []
    for path in sorted(folder.iterdir()):
        text = path.read_text()
        parsed = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        by_hand += [
            (row.get("messages") or row["conversations"], row.get("tools"))
            for row in (parsed if isinstance(parsed, list) else [parsed])
            if "images" not in row
        ]
    distinct = len({json.dumps(row, sort_keys=True) for row in by_hand})
    assert (len(by_hand), distinct) == (2852, 2658)
    assert found.ledger == {
        "rows_in": 2858,
        "kept": 2658,
        "dropped": {"exact duplicate": 194, "multimodal": 6},
    }


def test_ingredients_name_what_decides_and_only_that(tmp_path: Path) -> None:
    path = source(tmp_path, "a", numbered("a", 5))

    def of(seed: int = 0, prompts: tuple[str, ...] = (), **data: Any) -> dict[str, Any]:
        return ingredients(DataConfig(conversations=data.pop("conversations", path), **data), seed=seed, prompts=prompts)

    assert of() == of(seed=1) == of(prompts=("x",))
    assert of(max_rows=3) != of(max_rows=3, seed=1)
    assert of(max_rows=3, shuffle=False) == of(max_rows=3, seed=1, shuffle=False)
    half = {"path": path, "weight": 0.5}
    assert of(conversations=half) != of(conversations=half, seed=1)
    assert of(prompt_overlap="drop") != of(prompt_overlap="drop", prompts=("x",))
    before = of()
    write_jsonl(Path(path), numbered("a", 6))
    assert of() != before
