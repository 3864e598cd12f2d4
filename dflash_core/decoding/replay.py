"""What a drafter would accept of a text that is already known: no target pass, and all drafts of a text in few passes.

    text of the target + hidden states --draft_everywhere--> drafts after every token   [n, drafts]
    drafts, text --replay----> the rounds that decoding with these drafts would have had
                 --simulate--> a round after every token, as training counts

Exact, since the committed text is the target's own, whatever was drafted.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_core.decoding.speculate import accept, offered
from dflash_core.modeling.anchors import build_blocks
from dflash_core.modeling.blocks import block_states
from dflash_core.modeling.drafter import Drafter
from dflash_core.modeling.target import TargetEnds
from dflash_core.records import Generation

BLOCKS_AT_ONCE = 64  # the mask of a pass is [64 S, T + 64 S]


@torch.no_grad()
def draft_everywhere(
    drafter: Drafter, ends: TargetEnds, text: Sequence[int], target_hidden: Tensor, *, first: int, block_size: int
) -> Tensor:
    """Draft tokens [n, drafts] int64 for every anchor `first` .. len(text) - 1, each seeing the hidden states before it.

    `target_hidden` [1, T, K*H] holds the tapped states of the text (zeros: what the drafter guesses without the target);
    that of the last token is not looked at.
    """
    shape, device = drafter.shape, drafter.fc.weight.device
    ids = torch.tensor([list(text)], device=device)
    context = drafter.context(target_hidden.to(device, drafter.fc.weight.dtype))
    drafts = []
    for anchors in torch.arange(first, len(text), device=device).unsqueeze(0).split(BLOCKS_AT_ONCE, dim=1):
        blocks = build_blocks(
            ids,
            torch.ones_like(ids),
            anchors,
            torch.ones_like(anchors, dtype=torch.bool),
            block_size=block_size,
            mask_token_id=shape.mask_token_id,
            gamma=1.0,
        )
        states = block_states(drafter, ends.embed, context, blocks)
        drafts.append(ends.head(states[0, :, shape.first_slot :].to(ends.head_dtype)).argmax(-1))
    return torch.cat(drafts)


def replay(
    propose: Callable[[Sequence[int]], Sequence[int]], prompt: Sequence[int], tokens: Sequence[int], *, draft_tokens: int
) -> Generation:
    """The rounds of `speculate` where the target's greedy `tokens` after `prompt` are known.

    `propose(committed)` gives the draft tokens that follow the committed ones, as a Proposer does, at most `draft_tokens`.
    """
    start = time.perf_counter()
    text = [*prompt, *tokens]
    place = len(prompt) + 1
    accepted: list[int] = []
    drafted: list[int] = []
    while place < len(text):
        rest = text[place : place + draft_tokens + 1]
        draft = list(propose(text[:place]))[: len(text) - place]
        new = accept(draft, rest, room=len(rest), stop_ids=frozenset())
        place += len(new)
        accepted.append(len(new) - 1)
        drafted.append(offered(draft, new, ended=place == len(text)))
    return Generation(tokens=tuple(tokens), accepted=tuple(accepted), drafted=tuple(drafted), seconds=time.perf_counter() - start)


def replay_drafter(
    drafter: Drafter,
    ends: TargetEnds,
    prompt: Sequence[int],
    tokens: Sequence[int],
    target_hidden: Tensor,
    *,
    block_size: int,
) -> Generation:
    """`replay` of a drafter on the hidden states [1, P + n, K*H] of prompt and tokens."""
    first = len(prompt)
    drafts = draft_everywhere(drafter, ends, [*prompt, *tokens], target_hidden, first=first, block_size=block_size).tolist()
    draft_tokens = block_size - drafter.shape.first_slot
    return replay(lambda committed: drafts[len(committed) - 1 - first], prompt, tokens, draft_tokens=draft_tokens)


def simulate(
    drafter: Drafter,
    ends: TargetEnds,
    prompt: Sequence[int],
    tokens: Sequence[int],
    target_hidden: Tensor,
    *,
    block_size: int,
) -> Generation:
    """Teacher-forced acceptance: as a round behind each token but the last, what would be accepted of the text that follows.

    Rounds in decoding begin where the last one failed; these begin everywhere, hard places and easy ones alike.
    """
    start = time.perf_counter()
    first, text = len(prompt), [*prompt, *tokens]
    drafts = draft_everywhere(drafter, ends, text, target_hidden, first=first, block_size=block_size).tolist()
    accepted: list[int] = []
    drafted: list[int] = []
    for place, draft in enumerate(drafts[:-1], first + 1):
        following = text[place : place + len(draft)]
        right = next((k for k, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b), len(following))
        accepted.append(right)
        drafted.append(len(following))
    return Generation(tokens=tuple(tokens), accepted=tuple(accepted), drafted=tuple(drafted), seconds=time.perf_counter() - start)
