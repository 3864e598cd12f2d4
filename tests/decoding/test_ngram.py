"""The n-gram reference on texts small enough to count by hand."""

import numpy as np
import pytest

from dflash_core.decoding.ngram import NgramDraft

Row = tuple[np.ndarray, np.ndarray]


def row(ids: list[int], mask: list[int] | None = None) -> Row:
    return np.array(ids, np.int32), np.array(mask or [1] * len(ids), np.int8)


def test_the_longest_known_context_decides() -> None:
    ngram = NgramDraft([row([1, 2, 3, 9, 2, 4, 2, 4])], order=3, draft_tokens=1)
    assert ngram.propose([1, 2]) == [3]  # (1, 2) was followed by 3, although 2 alone mostly by 4
    assert ngram.propose([7, 2]) == [4]  # (7, 2) is unknown: 2 alone
    assert ngram.propose([7, 7]) == [2]  # nothing known: the most frequent token


def test_ties_go_to_the_smaller_token() -> None:
    assert NgramDraft([row([5, 8, 5, 6])], order=2, draft_tokens=1).propose([5]) == [6]


def test_each_draft_token_follows_the_ones_before() -> None:
    ngram = NgramDraft([row([1, 2, 3, 4, 5, 6, 1])], order=3, draft_tokens=7)
    assert ngram.propose([9, 9, 1, 2]) == [3, 4, 5, 6, 1, 2, 3]


def test_only_supervised_tokens_are_learnt_but_the_prompt_is_context() -> None:
    ngram = NgramDraft([row([1, 2, 3, 4], [0, 0, 1, 1]), row([1, 2, 7], [0, 0, 0])], order=3, draft_tokens=2)
    assert ngram.propose([1, 2]) == [3, 4]
    assert 2 not in {token for start in range(9) for token in ngram.propose([start])}


def test_order_two_looks_at_one_token() -> None:
    ngram = NgramDraft([row([1, 5, 2]), row([3, 5, 4]), row([3, 5, 4])], order=2, draft_tokens=1)
    assert ngram.propose([1, 5]) == [4]
    assert NgramDraft([row([1, 5, 2]), row([3, 5, 4]), row([3, 5, 4])], order=3, draft_tokens=1).propose([1, 5]) == [2]


def test_a_short_text_is_enough() -> None:
    assert NgramDraft([row([1, 2, 3])], order=4, draft_tokens=2).propose([1]) == [2, 3]


def test_nothing_supervised_is_refused() -> None:
    with pytest.raises(ValueError, match="fitted on no supervised token"):
        NgramDraft([row([1, 2], [0, 0])], order=3, draft_tokens=1).propose([1])
