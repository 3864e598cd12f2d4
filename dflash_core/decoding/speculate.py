"""Draft, verify, accept: decoding of a batch of prompts whose texts are the target's own.

    anchor = last committed token --propose--> d_1 .. d_S-1 --target verifies [anchor, d]--> y_0 .. y_S-1
    n = longest prefix with d_k+1 = y_k        commit d_1 .. d_n and the bonus token y_n, crop the caches, hand over the taps

y_k is what the target itself picks there, greedily or by sampling, so the text does not depend on the drafts. The proposer only
sees what exists when serving: the committed tokens and the hidden states before the anchor. Without a proposer every round
verifies the anchor alone: that is the target by itself. Requests of a batch are independent; who has ended leaves it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.sampling import Sampling
from dflash_core.records import Generation


class Proposer(Protocol):
    """What offers draft tokens to a batch of requests."""

    def start(self, rows: int) -> None:
        """New prompts: forget the last ones."""

    def extend(self, target_hidden: Tensor, counts: Sequence[int]) -> None:
        """Hidden states [B, n, K*H]; the first counts[i] of row i belong to newly committed tokens, the anchor's not yet."""

    def propose(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Draft tokens that follow each committed text, whose last token is the anchor; none where it cannot draft."""

    def select(self, rows: Sequence[int]) -> None:
        """Only these requests go on."""


@dataclass
class _Request:
    """One request being decoded."""

    prompt: Sequence[int]
    limit: int
    numbers: np.ndarray  # [limit]
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    undrafted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def ended(self, stop_ids: frozenset[int]) -> bool:
        return len(self.tokens) == self.limit or self.tokens[-1] in stop_ids

    def result(self) -> Generation:
        return Generation(
            tokens=tuple(self.tokens),
            accepted=tuple(self.accepted),
            drafted=tuple(self.drafted),
            seconds=self.draft_seconds + self.verify_seconds,
            margins=tuple(self.margins),
            undrafted=self.undrafted,
            draft_seconds=self.draft_seconds,
        )


def decode(
    target: DecodingTarget,
    prompts: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    stop_ids: frozenset[int],
    proposer: Proposer | None = None,
    sampling: Sampling | None = None,
    numbers: Sequence[np.ndarray] | None = None,
) -> list[Generation]:
    """The text of each prompt, at most `limits` tokens (1 or more), ended by a stop token, which is part of it.

    `numbers` [limit] in [0, 1) decide what is sampled, place by place. Drafts after a stop token do not count as accepted.
    The time of a pass is shared by the requests that were in it.
    """
    sampling = sampling or Sampling()
    given = numbers or [np.zeros(limit) for limit in limits]
    requests = [_Request(*parts) for parts in zip(prompts, limits, given, strict=True)]
    active = requests
    clock = _Clock(target.device)
    target.start(len(requests))
    logits, hidden = target.forward(prompts, last_only=True)
    tokens, margins = _picked(sampling, logits, active)
    for request, own, margin in zip(active, tokens, margins, strict=True):
        request.tokens, request.margins = own[:1], margin[:1]
    counts = [len(prompt) for prompt in prompts]
    target.keep(counts)
    clock.share(active, "verify_seconds")
    if proposer:
        proposer.start(len(requests))
        proposer.extend(hidden, counts)
        clock.share(active, "draft_seconds")
    while rows := [row for row, request in enumerate(active) if not request.ended(stop_ids)]:
        if len(rows) < len(active):
            active = [active[row] for row in rows]
            target.select(rows)
            if proposer:
                proposer.select(rows)
        drafts: list[list[int]] = [[] for _ in active]
        if proposer:
            offers = proposer.propose([[*request.prompt, *request.tokens] for request in active])
            drafts = [offer[: request.limit - len(request.tokens)] for offer, request in zip(offers, active, strict=True)]
            clock.share(active, "draft_seconds")
        logits, hidden = target.forward([[request.tokens[-1], *draft] for request, draft in zip(active, drafts, strict=True)])
        tokens, margins = _picked(sampling, logits, active)
        counts = [
            _commit(*parts, stop_ids=stop_ids, speculative=proposer is not None)
            for parts in zip(active, drafts, tokens, margins, strict=True)
        ]
        target.keep(counts)
        clock.share(active, "verify_seconds")
        if proposer:
            proposer.extend(hidden, counts)
            clock.share(active, "draft_seconds")
    return [request.result() for request in requests]


class _Clock:
    """Time between calls, shared by the requests that were worked on. Waits for the device, whose work is not done at return."""

    def __init__(self, device: str) -> None:
        self._cuda = device if device.startswith("cuda") else None
        self._last = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()

    def share(self, requests: Sequence[_Request], kind: str) -> None:
        now = self._now()
        for request in requests:
            setattr(request, kind, getattr(request, kind) + (now - self._last) / len(requests))
        self._last = now


def _picked(sampling: Sampling, logits: Tensor, requests: Sequence[_Request]) -> tuple[list[list[int]], list[list[float]]]:
    """The target's own tokens and their margins [B][n] after each verified token."""
    count = logits.shape[1]
    numbers = np.zeros((len(requests), count))
    for row, request in enumerate(requests):
        own = request.numbers[len(request.tokens) :][:count]
        numbers[row, : len(own)] = own
    tokens, margins = sampling.pick(logits, torch.from_numpy(numbers).to(logits.device))
    return tokens.tolist(), margins.tolist()


def _commit(
    request: _Request,
    draft: Sequence[int],
    own: Sequence[int],
    margins: Sequence[float],
    *,
    stop_ids: frozenset[int],
    speculative: bool,
) -> int:
    """Takes a round's tokens in; returns how many of the verified tokens (the anchor first) are committed with them."""
    new = accept(draft, own[: len(draft) + 1], room=request.limit - len(request.tokens), stop_ids=stop_ids)
    request.tokens += new
    request.margins += margins[: len(new)]
    if draft:
        request.accepted.append(len(new) - 1)
        request.drafted.append(offered(draft, new, ended=request.ended(stop_ids)))
    elif speculative:
        request.undrafted += 1
    return len(new)


def accept(draft: Sequence[int], verified: Sequence[int], *, room: int, stop_ids: frozenset[int]) -> list[int]:
    """The tokens a round commits: draft tokens while they equal the target's, then the target's own (the bonus token).

    `verified[k]` is the target's token after the anchor and k draft tokens. Ends at a stop token and after `room` tokens.
    """
    new: list[int] = []
    for k, token in enumerate(verified):
        new.append(token)
        if token in stop_ids or len(new) == room or k == len(draft) or draft[k] != token:
            break
    return new


def offered(draft: Sequence[int], new: Sequence[int], *, ended: bool) -> int:
    """How many draft tokens a round judged: all, or where the text ended those before its last token, and a wrong one there.

    The last token of a text counts as the target's own, so a draft that equals it is neither accepted nor refused.
    """
    if not ended:
        return len(draft)
    return min(len(draft), len(new) - (list(draft[: len(new)]) == list(new)))
