"""Acceptance of a snapshot of the drafter, measured by a target replica that training lends for as long as it takes.

    weights --the drafter, on the replica's device, in its precision--+--> decode a few prompts: real acceptance
    validation rows --tap, blocks, argmax-----------------------------+--> as training counts: simulated acceptance

Between two rounds of decoding, and between two rows, it asks whether it is still wanted. Without a validation split the
simulated value is that of the texts just decoded.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dflash_core.config import Config
from dflash_core.data.chat import open_chat, served_ids
from dflash_core.data.prompts import Messages, read_prompt_sets
from dflash_core.data.reader import TokenDataset
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.drafts import DraftCache
from dflash_core.decoding.sampling import Sampling, place_numbers
from dflash_core.decoding.speculate import decode
from dflash_core.decoding.summary import acceptance_length
from dflash_core.modeling.anchors import draw_blocks
from dflash_core.modeling.blocks import block_states
from dflash_core.modeling.drafter import Drafter
from dflash_core.modeling.target import TapReplica, TargetEnds
from dflash_core.records import Batch, DrafterShape, Evaluation, Generation, PlannedBatch, TargetFacts, TrainState
from dflash_core.sizes import EVALUATED_BLOCKS

Wanted = Callable[[], bool]
Row = tuple[list[int], list[int]]  # input_ids, loss_mask


class _GivenUp(Exception):
    """`wanted()` said no."""


class SnapshotBench:
    """The prompts and rows on which every snapshot of a run is measured; made before training, so that what is wrong shows then."""

    def __init__(
        self, config: Config, shape: DrafterShape, facts: TargetFacts, *, validation: Path | None, date: str | None
    ) -> None:
        """`validation`: shards of the validation split. Raises ValueError where no prompt fits the target's positions."""
        self._config, self._shape, self._stop_ids = config, shape, frozenset(facts.eos_ids)
        evaluation = config.evaluation
        self._block_size = evaluation.block_size or shape.block_size
        self._sampling = Sampling(temperature=evaluation.temperature, top_k=evaluation.top_k, top_p=evaluation.top_p)
        prompts = _drawn_prompts(config, stop_ids=self._stop_ids, date=date)
        rooms = [facts.max_positions - len(ids) - self._block_size for _, ids in prompts]
        self._prompts = [
            (number, ids, min(room, config.during_training.max_new_tokens))
            for (number, ids), room in zip(prompts, rooms, strict=True)
            if room > 0
        ]
        if not self._prompts:
            raise ValueError(
                f"during_training: none of {len(prompts)} prompts leaves room in the target's {facts.max_positions} positions; "
                "give shorter prompts, or raise during_training.num_prompts"
            )
        self._rows = _rows(TokenDataset(validation), config) if validation else None

    def check(self, replica: TapReplica) -> None:
        """Raises ValueError for a target that cannot be decoded here, in batches of evaluation.batch_size, or for evaluation.block_size."""
        try:
            with replica.whole() as (model, taps):
                target = DecodingTarget(model, self._shape.target_layer_ids, device=replica.home, taps=taps)
                target.start(min(self._config.evaluation.batch_size, len(self._prompts)))
                DraftCache(self._empty(), TargetEnds(model), block_size=self._block_size)
        except ValueError as error:
            raise ValueError(f"during_training.eval_every needs decoding; leave it out where that cannot be: {error}") from error

    def _empty(self) -> Drafter:
        """A drafter without memory for its weights."""
        with torch.device("meta"):
            return Drafter(self._shape)

    def measure(self, replica: TapReplica, state: TrainState, wanted: Wanted) -> Evaluation | None:
        """What the snapshot's drafter accepts; None where `wanted()` said no before the end. Leaves the replica as it was."""
        start = time.perf_counter()
        try:
            with _on(replica.home), torch.no_grad():
                drafter = self._empty()
                drafter.load_state_dict(
                    state.drafter, strict=True, assign=True
                )  # in float32 on the same device, not copied again
                drafter = drafter.to(replica.home, getattr(torch, replica.dtype)).eval()
                with replica.whole() as (model, taps):
                    ends = TargetEnds(model)
                    target = DecodingTarget(model, self._shape.target_layer_ids, device=replica.home, taps=taps)
                    texts = self._decode(target, drafter, ends, wanted)
                rows = self._rows or [
                    ([*ids, *text.tokens], [0] * len(ids) + [1] * len(text.tokens))
                    for (_, ids, _), text in zip(self._prompts, texts, strict=True)
                ]
                accepted, blocks = self._simulate(replica, drafter, ends, rows, wanted)
        except _GivenUp:
            return None
        return Evaluation(
            step=state.step,
            prompts=len(texts),
            rounds=sum(len(text.accepted) for text in texts),
            acceptance_length=acceptance_length(texts),
            simulated_acceptance_length=1 + accepted / blocks if blocks else 0.0,
            simulated_on="validation" if self._rows else "decoded texts",
            blocks=blocks,
            seconds=time.perf_counter() - start,
        )

    def _decode(self, target: DecodingTarget, drafter: Drafter, ends: TargetEnds, wanted: Wanted) -> list[Generation]:
        evaluation, texts = self._config.evaluation, list[Generation]()
        proposer = _Watched(drafter, ends, block_size=self._block_size, wanted=wanted, zero=self._zero)
        for start in range(0, len(self._prompts), evaluation.batch_size):
            _check(wanted)
            numbers, prompts, limits = zip(*self._prompts[start : start + evaluation.batch_size], strict=True)
            texts += decode(
                target,
                prompts,
                limits=limits,
                stop_ids=self._stop_ids,
                proposer=proposer,
                sampling=self._sampling,
                numbers=[place_numbers(evaluation.seed, (n, 0), limit) for n, limit in zip(numbers, limits, strict=True)],
            )
        return texts

    def _simulate(
        self, replica: TapReplica, drafter: Drafter, ends: TargetEnds, rows: Sequence[Row], wanted: Wanted
    ) -> tuple[int, int]:
        """(right draft tokens up to the first wrong one, blocks) over the rows, anchors drawn as in training's first epoch."""
        accepted = count = 0
        first = self._shape.first_slot
        for number, (ids, mask) in enumerate(rows):
            _check(wanted)
            batch = _batch(number, ids, mask)
            blocks = draw_blocks(
                batch,
                block_size=self._block_size,
                mask_token_id=self._shape.mask_token_id,
                num_anchors=min(EVALUATED_BLOCKS, self._config.training.anchors_per_row),
                gamma=1.0,
                seed=self._config.seed,
                first_slot=first,
            )
            if not bool(blocks.block_valid.any()):
                continue
            blocks = blocks.to(replica.home)
            hidden = replica.tap(batch).target_hidden
            context = drafter.context(torch.zeros_like(hidden) if self._zero else hidden)
            states = block_states(drafter, ends.embed, context, blocks, backend="dense")
            drafts = ends.head(states[:, :, first:].to(ends.head_dtype)).argmax(-1)  # [1, N, drafts]
            trained = blocks.weights[:, :, first:] > 0
            right = (drafts == blocks.labels[:, :, first:]) & trained
            accepted += int(right.long().cumprod(-1).sum())
            count += int(trained[:, :, 0].sum())
        return accepted, count

    @property
    def _zero(self) -> bool:
        return self._config.training.target_features == "zero"


class _Watched(DraftCache):
    """Asks before each round whether it is wanted. `zero`: an ablated drafter never sees the target."""

    def __init__(self, drafter: Drafter, ends: TargetEnds, *, block_size: int, wanted: Wanted, zero: bool) -> None:
        self._wanted, self._zero = wanted, zero
        super().__init__(drafter, ends, block_size=block_size)

    def extend(self, target_hidden: Tensor, counts: Sequence[int]) -> None:
        super().extend(torch.zeros_like(target_hidden) if self._zero else target_hidden, counts)

    def propose(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        _check(self._wanted)
        return super().propose(texts)


def _check(wanted: Wanted) -> None:
    if not wanted():
        raise _GivenUp


@contextmanager
def _on(device: str) -> Iterator[None]:
    """The calling thread's settings: one core, whose sums have one order, or the CUDA device."""
    if device == "cpu":
        torch.set_num_threads(1)
        yield
    else:
        with torch.cuda.device(device):
            yield


def _drawn_prompts(config: Config, *, stop_ids: frozenset[int], date: str | None) -> list[tuple[int, list[int]]]:
    """(number, ids) of during_training.num_prompts first turns, drawn from all sets by evaluation.seed, in the sets' order."""
    tokenizer, sets = load_tokenizer(config.target.path), read_prompt_sets(config.evaluation)
    every = [(one, number, messages) for one in sets for number, messages in enumerate(one.prompts)]
    count = min(config.during_training.num_prompts, len(every))
    drawn = [every[place] for place in sorted(random.Random(config.evaluation.seed).sample(range(len(every)), count))]
    thinking = {one.name: config.data.thinking if one.thinking is None else one.thinking for one in sets}
    chats = {
        name: open_chat(tokenizer, stop_ids=stop_ids, date=date, thinking=thinking[name])
        for name in dict.fromkeys(one.name for one, _, _ in drawn)
    }
    return [(number, served_ids(chats[one.name], _first_turn(messages))) for one, number, messages in drawn]


def _first_turn(messages: Messages) -> Messages:
    """Up to the first user message."""
    return messages[: next(place for place, message in enumerate(messages) if message["role"] == "user") + 1]


def _rows(dataset: TokenDataset, config: Config) -> list[Row]:
    """The first during_training.num_rows rows, cut to data.max_length."""
    rows = (dataset.row(number) for number in range(min(len(dataset), config.during_training.num_rows)))
    most = config.data.max_length
    return [(ids[:most].tolist(), mask[:most].tolist()) for ids, mask in rows]


def _batch(number: int, ids: list[int], mask: list[int]) -> Batch:
    """One row as a micro-batch of its own."""
    return Batch(
        plan=PlannedBatch(number=number, epoch=0, rows=(number,), credit=0),
        input_ids=torch.tensor([ids], dtype=torch.int32),
        loss_mask=torch.tensor([mask], dtype=torch.uint8),
        lengths=torch.tensor([len(ids)], dtype=torch.int32),
    )
