"""Near-duplicates and overlap, beside slow exact versions."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dflash_core.data.duplicates import (
    OVERLAP_WORDS,
    character_grams,
    clusters,
    grams,
    overlaps,
    prompt_grams,
    signature,
    word_hashes,
    words,
)

KEYS = np.random.default_rng(0).integers(0, 2**63, 2000).astype(np.uint64)


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    return len(set(a.tolist()) & set(b.tolist())) / len(set(a.tolist()) | set(b.tolist()))


def joined(sets: list[np.ndarray], similarity: float) -> list[int]:
    """Clusters by comparing every pair: the first member of each text's cluster."""
    label = list(range(len(sets)))
    for i, j in itertools.combinations(range(len(sets)), 2):
        if label[i] != label[j] and jaccard(sets[i], sets[j]) >= similarity:
            old, new = max(label[i], label[j]), min(label[i], label[j])
            label = [new if each == old else each for each in label]
    return label


def test_words_know_neither_case_nor_punctuation_and_take_each_sign_of_unspaced_scripts() -> None:
    assert words("Don't  STOP, \n now! (v22)") == ["don", "t", "stop", "now", "v22"]
    assert words("中国のname") == ["中", "国", "の", "name"]
    assert words("?!") == []


@pytest.mark.parametrize(("size", "count"), [(1, 5), (3, 3), (5, 1), (9, 1)])
def test_grams_are_runs_in_order(size: int, count: int) -> None:
    ordered, swapped = word_hashes("a b c d e"), word_hashes("b a c d e")
    assert len(grams(ordered, size)) == count
    shared = {1: 5, 3: 1, 5: 0, 9: 0}[size]
    assert len(set(grams(ordered, size).tolist()) & set(grams(swapped, size).tolist())) == shared
    assert len(grams(word_hashes(""), size)) == 0


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7, 0.9])
def test_signatures_agree_in_the_share_that_the_sets_have_in_common(share: float) -> None:
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(60):
        pool = rng.integers(0, 2**63, 400).astype(np.uint64)
        common = round(400 * share)
        a, b = pool[: (400 + common) // 2], np.concatenate([pool[:common], pool[(400 + common) // 2 :]])
        errors.append(float((signature(a) == signature(b)).mean()) - jaccard(a, b))
    assert abs(np.mean(errors)) < 0.015
    assert np.std(errors) < 1.4 * (share * (1 - share) / 128) ** 0.5


def test_a_signature_does_not_depend_on_order_or_repeats() -> None:
    found = np.arange(9000, dtype=np.uint64) << np.uint64(40)
    assert (signature(found) == signature(np.concatenate([found[::-1], found[:5]]))).all()


def test_clusters_are_those_of_every_pair_compared(assets_dir: Path) -> None:
    """Real prompts that differ by a mark. All marks of a prompt come together, and nothing else does."""
    rows = [json.loads(line) for line in (assets_dir / "conversations" / "near_duplicates.jsonl").read_text().splitlines()][:300]
    prompts = [row["messages"][0]["content"] for row in rows]
    sets = [character_grams(prompt) for prompt in prompts]
    signatures = np.stack([signature(each) for each in sets])
    found = clusters(signatures, KEYS[:300], 0.7)
    slow = joined(sets, 0.7)
    pairs = list(itertools.combinations(range(300), 2))
    together = {(a, b) for a, b in pairs if slow[a] == slow[b]}
    also = {(a, b) for a, b in pairs if found[a] == found[b]}
    assert len(together) > 1000
    assert len(together - also) <= 0.03 * len(together), "what is similar enough comes together, barely similar pairs apart"
    base = [re.sub(r" \(v\d+\)", "", prompt) for prompt in prompts]
    assert all(base[a] == base[b] for a, b in also - together), "what comes together beside that nearly was"


def test_a_cluster_is_named_by_its_least_key_whatever_the_order() -> None:
    rng = np.random.default_rng(2)
    bases = rng.integers(0, 2**63, (40, 200)).astype(np.uint64)
    sets = [np.concatenate([bases[i % 40][:190], rng.integers(0, 2**63, 10).astype(np.uint64)]) for i in range(160)]
    signatures, keys = np.stack([signature(each) for each in sets]), KEYS[:160]
    found = clusters(signatures, keys, 0.7)
    for base in range(40):
        members = np.arange(base, 160, 40)
        assert set(found[members].tolist()) == {members[np.argmin(keys[members])]}
    order = rng.permutation(160)
    assert (keys[order][clusters(signatures[order], keys[order], 0.7)] == keys[found][order]).all()
    assert len(clusters(signatures[:0], keys[:0], 0.7)) == 0


def test_what_is_not_similar_stays_apart() -> None:
    rng = np.random.default_rng(3)
    sets = rng.integers(0, 2**63, (300, 100)).astype(np.uint64)
    signatures = np.stack([signature(each) for each in sets])
    assert clusters(signatures, KEYS[:300], 0.5).tolist() == list(range(300))


# ---- evaluation prompts ----------------------------------------------------------------------------------------------

TWENTY = " ".join(f"word{i}" for i in range(20))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"Please: {TWENTY}!", True),
        (" ".join(f"WORD{i}," for i in range(4, 17)), True),  # 13 of them
        (" ".join(f"word{i}" for i in range(4, 16)), False),  # 12
        (" ".join(f"word{i}" for i in range(4, 10)) + " x " + " ".join(f"word{i}" for i in range(10, 18)), False),
        ("what is 6 * 7", True),  # a short prompt, whole
        ("what is 6 * 7 please", False),
        ("", False),
    ],
)
def test_overlap_is_thirteen_words_or_a_whole_short_prompt(message: str, expected: bool) -> None:
    assert overlaps(word_hashes(message), prompt_grams([TWENTY, "What is 6*7?"])) is expected


def test_no_prompts_overlap_with_nothing() -> None:
    assert not overlaps(word_hashes(TWENTY), prompt_grams([]))


def test_overlap_of_real_prompts_as_the_slow_way_finds_it(assets_dir: Path) -> None:
    lines = (assets_dir / "prompts" / "gsm8k.jsonl").read_text().splitlines()
    prompts = [turn for line in lines for turn in json.loads(line)["turns"]]
    texts = [prompt if i % 2 else " ".join(prompt.split()[:14]) for i, prompt in enumerate(prompts[:60])]
    texts += [" ".join(prompt.split()[:11]) + " and so on" for prompt in prompts[:20]]
    known = {tuple(words(prompt)[i : i + OVERLAP_WORDS]) for prompt in prompts for i in range(len(words(prompt)) - 12)}
    slow = [any(tuple(words(text)[i : i + 13]) in known for i in range(len(words(text)) - 12)) for text in texts]
    index = prompt_grams(prompts)
    assert [overlaps(word_hashes(text), index) for text in texts] == slow
    assert 55 <= sum(slow) <= 62
