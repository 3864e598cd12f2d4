"""The open optimizer step: sums over its micro-batches, and what was skipped or split, on this rank and then on all."""

from collections import Counter

import torch

from dflash_core.modeling.loss import LossSums
from dflash_core.records import AnchoredBlocks, TappedBatch
from dflash_core.training.gang import Gang

IDLE = "no rows"  # a rank's share where the plan ends within a step
NO_ANCHOR = "no anchor"  # the only other reason to skip that is no fault: the next process will skip it too
BAD_STATES, BAD_LOSS = "target produced non-finite hidden states", "loss is not finite"
REASONS, PLACES = (IDLE, NO_ANCHOR, BAD_STATES, BAD_LOSS), ("target", "drafter")


class Window:
    """Sums over the micro-batches of the open optimizer step."""

    def __init__(self, block_size: int) -> None:
        self.micro_batches = self.rows = self.tokens = self.computed_tokens = self.blocks = self.accepted_sum = 0
        self.loss_sum = self.weight_sum = 0.0
        self.correct = torch.zeros(block_size, dtype=torch.long)
        self.counted = torch.zeros(block_size, dtype=torch.long)
        self.skipped: Counter[str] = Counter()
        self.splits: Counter[str] = Counter()

    def add(self, tapped: TappedBatch, blocks: AnchoredBlocks, sums: LossSums) -> None:
        """One trained micro-batch."""
        self.rows += tapped.batch.lengths.numel()
        self.tokens += int(tapped.batch.lengths.sum())
        self.computed_tokens += tapped.batch.input_ids.numel()
        self.blocks += int(blocks.block_valid.sum())
        self.loss_sum += float(sums.loss_sum.detach())
        self.weight_sum += float(sums.weight_sum)
        self.correct += sums.correct.cpu()
        self.counted += sums.counted.cpu()
        self.accepted_sum += int(sums.accepted_sum)

    def over_all(self, gang: Gang) -> bool:
        """Replaces the sums of this rank by those of all; whether any rank was asked to stop."""
        if gang.size == 1:
            return False
        names = ("micro_batches", "rows", "tokens", "computed_tokens", "blocks", "accepted_sum", "loss_sum", "weight_sum")
        groups = (
            [getattr(self, name) for name in names],
            self.correct.tolist(),
            self.counted.tolist(),
            [self.skipped[reason] for reason in REASONS],
            [self.splits[place] for place in PLACES],
            [gang.asked()],
        )
        flat = torch.tensor([value for group in groups for value in group], dtype=torch.float64)
        gang.add(flat)
        numbers, correct, counted, skipped, splits, asked = flat.split([len(group) for group in groups])
        for name, value in zip(names, numbers.tolist(), strict=True):
            setattr(self, name, value if name in ("loss_sum", "weight_sum") else round(value))
        self.correct, self.counted = correct.long(), counted.long()
        self.skipped = +Counter(dict(zip(REASONS, map(int, skipped.tolist()), strict=True)))
        self.splits = +Counter(dict(zip(PLACES, map(int, splits.tolist()), strict=True)))
        return bool(asked.item())
