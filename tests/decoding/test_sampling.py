"""Draws are the target's distribution, with drafts or without, and the same place draws the same token either way."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dflash_core.decoding.sampling import Sampling, place_numbers
from dflash_core.decoding.speculate import decode
from tests.decoding.texts import NEVER, EachRow

LOGITS = torch.tensor([[2.0, 0.5, 1.0, -1.0], [0.0, 1.5, 1.0, 0.5], [1.0, 1.0, -2.0, 1.2], [0.3, 0.1, 0.9, 0.0]])


class FourTokens:
    """A target of four tokens whose next token depends on the last one alone."""

    device = "cpu"

    def start(self, rows: int) -> None: ...

    def forward(self, ids: list[list[int]], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        longest = max(map(len, ids))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids])
        if last_only:
            padded = torch.tensor([[row[-1]] for row in ids])
        return LOGITS[padded], torch.zeros(len(ids), longest, 1)

    def keep(self, counts: list[int]) -> None: ...

    def select(self, rows: list[int]) -> None: ...


def expected(sampling: Sampling, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every text of `length` tokens after token 0, by hand."""
    texts = {(): 1.0}
    for _ in range(length):
        grown = {}
        for text, share in texts.items():
            logits = (LOGITS[text[-1] if text else 0].double() / sampling.temperature).numpy()
            shares = np.exp(logits) / np.exp(logits).sum()
            if sampling.top_k:
                shares[np.argsort(-shares)[sampling.top_k :]] = 0
            if sampling.top_p < 1:
                order = np.argsort(-shares)
                needed = int(np.searchsorted(np.cumsum(shares[order]) / shares.sum(), sampling.top_p)) + 1
                shares[order[needed:]] = 0
            for token, own in enumerate(shares / shares.sum()):
                grown[(*text, token)] = share * float(own)
        texts = grown
    return texts


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.5),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_p=0.8),
        Sampling(temperature=1.3, top_k=3),
        Sampling(temperature=0.7, top_k=3, top_p=0.9),
    ],
)
def test_texts_decoded_with_drafts_are_exact_draws(sampling: Sampling) -> None:
    """4,000 texts of three tokens against their probabilities; drafts are the likeliest tokens, wrong ones among them."""
    count = 4000
    drafter = EachRow(lambda text: [int(LOGITS[text[-1]].argmax()), 1, 2])
    how = {"limits": [3] * count, "stop_ids": NEVER, "sampling": sampling}
    numbers = [place_numbers(7, (request,), 3) for request in range(count)]
    drafted = decode(FourTokens(), [[0]] * count, proposer=drafter, numbers=numbers, **how)  # type: ignore[arg-type]
    assert sum(sum(each.accepted) for each in drafted) > 0
    shares = {text: share for text, share in expected(sampling, 3).items() if share > 0}
    seen = dict.fromkeys(shares, 0)
    for each in drafted:
        seen[each.tokens] += 1  # a text of probability 0 has no key
    frequent = [text for text, share in shares.items() if share * count >= 5]
    rest = [text for text in shares if text not in frequent]
    found = [seen[text] for text in frequent] + ([sum(seen[text] for text in rest)] if rest else [])
    wanted = [count * shares[text] for text in frequent] + ([count * sum(shares[text] for text in rest)] if rest else [])
    assert chisquare(found, wanted).pvalue > 1e-3
    alone = decode(FourTokens(), [[0]] * count, numbers=numbers, **how)  # type: ignore[arg-type]
    assert [each.tokens for each in alone] == [each.tokens for each in drafted]


def test_temperatures_near_zero_are_greedy() -> None:
    numbers = torch.full((4,), 0.99, dtype=torch.float64)
    for temperature in (0.0, 1e-6):
        tokens, margins = Sampling(temperature=temperature).pick(LOGITS, numbers)
        assert tokens.tolist() == [0, 1, 3, 2]
        assert margins.tolist() == pytest.approx([1.0, 0.5, 0.2, 0.6])


def test_margin_of_a_draw_is_the_distance_to_the_next_share() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    for number, token, margin in ((0.1, 0, 0.1), (0.45, 0, 0.05), (0.501, 1, 0.001), (0.7, 1, 0.05), (0.999, 2, 0.001)):
        tokens, margins = Sampling(temperature=1.0).pick(logits, torch.tensor([number], dtype=torch.float64))
        assert tokens.tolist() == [token]
        assert margins.tolist() == pytest.approx([margin], abs=1e-6)


def test_numbers_of_a_place_do_not_depend_on_how_many_are_asked() -> None:
    assert place_numbers(3, (1, 2), 9)[:4].tolist() == place_numbers(3, (1, 2), 4).tolist()
    assert place_numbers(3, (1, 2), 4).tolist() != place_numbers(3, (2, 1), 4).tolist()
