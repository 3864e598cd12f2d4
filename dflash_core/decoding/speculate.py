"""Draft, verify, accept: greedy decoding of one prompt whose output is the target's own.

    anchor = last committed token --propose--> d_1 .. d_S-1 --target verifies [anchor, d]--> y_0 .. y_S-1
    n = longest prefix with d_k+1 = y_k        commit d_1 .. d_n and the bonus token y_n, crop the cache, hand over the taps

The proposer only sees what exists when serving: the committed tokens and the hidden states before the anchor.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from dflash_core.modeling.drafter import Drafter, KeyValue
from dflash_core.modeling.target import Taps, decoder_of
from dflash_core.records import Generation


class Proposer(Protocol):
    """What offers draft tokens."""

    def start(self) -> None:
        """A new prompt: forget the last one."""

    def extend(self, target_hidden: Tensor) -> None:
        """Hidden states [1, n, K*H] of the next n committed tokens; the anchor's come only after it was verified."""

    def propose(self, committed: Sequence[int]) -> list[int]:
        """Draft tokens that follow `committed`, whose last is the anchor."""


class DecodingTarget:
    """The whole target with a key-value cache, tapped."""

    def __init__(self, model: Any, layer_ids: Sequence[int], *, device: str) -> None:
        self.model, self.device = model, device
        self._taps = Taps(decoder_of(model), layer_ids)
        self._cache = DynamicCache(config=model.config.get_text_config())
        self._config = model.config.get_text_config()

    def start(self) -> None:
        """Empties the cache."""
        self._cache = DynamicCache(config=self._config)

    @torch.no_grad()
    def forward(self, ids: Sequence[int], *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """(logits [n, V] fp32, target_hidden [1, n, K*H]) of the next tokens; logits of the last alone if asked."""
        inputs = torch.tensor([list(ids)], device=self.device)
        out = self.model(input_ids=inputs, past_key_values=self._cache, use_cache=True, logits_to_keep=int(last_only))
        return out.logits[0].float(), self._taps.take()

    def forget(self, count: int) -> None:
        """Removes the last `count` tokens from the cache."""
        if count:
            self._cache.crop(-count)


class DraftCache:
    """A drafter proposing blocks; its cache holds the context keys and values of committed tokens only."""

    def __init__(self, drafter: Drafter, ends: Any, *, zero_features: bool = False) -> None:
        self._drafter, self._ends, self._zero = drafter, ends, zero_features
        self._context: list[KeyValue] = []
        self._length = 0

    def start(self) -> None:
        self._context, self._length = [], 0

    @torch.no_grad()
    def extend(self, target_hidden: Tensor) -> None:
        hidden = target_hidden.to(self._drafter.fc.weight.dtype)
        if self._zero:
            hidden = torch.zeros_like(hidden)
        positions = torch.arange(self._length, self._length + hidden.shape[1], device=hidden.device).unsqueeze(0)
        new = self._drafter.context(hidden, positions)
        if self._context:
            new = [(torch.cat([k, nk], 2), torch.cat([v, nv], 2)) for (k, v), (nk, nv) in zip(self._context, new, strict=True)]
        self._context = new
        self._length += hidden.shape[1]

    @torch.no_grad()
    def propose(self, committed: Sequence[int]) -> list[int]:
        shape = self._drafter.shape
        assert len(committed) == self._length + 1, "the context ends just before the anchor"
        device = self._drafter.fc.weight.device
        ids = torch.tensor([[committed[-1]] + [shape.mask_token_id] * (shape.block_size - 1)], device=device)
        positions = torch.arange(self._length, self._length + shape.block_size, device=device).unsqueeze(0)
        embeddings = self._ends.embed(ids).to(self._drafter.fc.weight.dtype)
        states = self._drafter(embeddings, positions, self._context)
        logits = self._ends.head(states[0, 1:].to(next(self._ends.head.parameters()).dtype))
        return [int(token) for token in logits.argmax(-1)]


def greedy(
    target: DecodingTarget, prompt: Sequence[int], *, max_new_tokens: int, stop_ids: frozenset[int]
) -> tuple[Generation, list[float]]:
    """The target alone, and the margin between its two best logits at every generated token."""
    start = time.perf_counter()
    target.start()
    tokens: list[int] = []
    margins: list[float] = []
    inputs: Sequence[int] = prompt
    while len(tokens) < max_new_tokens:
        logits, _ = target.forward(inputs, last_only=True)
        best, second = logits[-1].topk(2).values.tolist()
        margins.append(best - second)
        tokens.append(int(logits[-1].argmax()))
        if tokens[-1] in stop_ids:
            break
        inputs = tokens[-1:]
    return Generation(tokens=tuple(tokens), accepted=(), drafted=(), seconds=time.perf_counter() - start), margins


def speculate(
    target: DecodingTarget, proposer: Proposer, prompt: Sequence[int], *, max_new_tokens: int, stop_ids: frozenset[int]
) -> Generation:
    """Decode with drafts. A stop token ends the text where it stands; drafts after it do not count as accepted."""
    start = time.perf_counter()
    target.start()
    proposer.start()
    logits, hidden = target.forward(prompt, last_only=True)
    proposer.extend(hidden)
    committed = [*prompt, int(logits[-1].argmax())]
    accepted: list[int] = []
    drafted: list[int] = []
    while committed[-1] not in stop_ids and (room := max_new_tokens - (len(committed) - len(prompt))) > 0:
        draft = proposer.propose(committed)[:room]
        logits, hidden = target.forward([committed[-1], *draft])
        new = accept(draft, logits.argmax(-1).tolist(), room=room, stop_ids=stop_ids)
        target.forget(len(draft) + 1 - len(new))
        proposer.extend(hidden[:, : len(new)])
        committed += new
        accepted.append(len(new) - 1)
        drafted.append(offered(draft, new, ended=committed[-1] in stop_ids or len(new) == room))
    tokens = tuple(committed[len(prompt) :])
    return Generation(tokens=tokens, accepted=tuple(accepted), drafted=tuple(drafted), seconds=time.perf_counter() - start)


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


def replay(proposer: Proposer, prompt: Sequence[int], tokens: Sequence[int], hidden: Tensor, block_size: int) -> Generation:
    """What `speculate` would accept if the target's greedy `tokens` after `prompt` are known: no target pass is needed.

    `hidden` [1, P + n, K*H] are the tapped states of prompt and tokens (zeros where the proposer does not look at them).
    """
    start = time.perf_counter()
    proposer.start()
    proposer.extend(hidden[:, : len(prompt)])
    text = [*prompt, *tokens]
    place = len(prompt) + 1
    accepted: list[int] = []
    drafted: list[int] = []
    while place < len(text):
        rest = text[place : place + block_size]
        draft = proposer.propose(text[:place])[: len(text) - place]
        new = accept(draft, rest, room=len(rest), stop_ids=frozenset())
        proposer.extend(hidden[:, place - 1 : place - 1 + len(new)])
        place += len(new)
        accepted.append(len(new) - 1)
        drafted.append(offered(draft, new, ended=place == len(text)))
    return Generation(tokens=tuple(tokens), accepted=tuple(accepted), drafted=tuple(drafted), seconds=time.perf_counter() - start)
