"""What our own loop does with the prompts of a job, and where a client's answers differ from it.

prompts --decode alone-->         texts
        --decode with drafts-->   rounds        those of the text, the last one cut where it ends
                                  whole_rounds  the last one with all that it accepted, beyond the stop token too: vLLM's counters
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_core.decoding.cache import DecodingTarget
from dflash_core.decoding.drafts import DraftCache
from dflash_core.decoding.export import load_export
from dflash_core.decoding.speculate import decode
from dflash_core.modeling.target import TargetEnds, load_model
from tests.serving.answers import Answer, Job, answer_of


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Of each prompt."""

    texts: list[list[int]]  # the target's own, decoded without a drafter
    rounds: list[Answer]
    whole_rounds: list[Answer]


def own_answers(job: Job, export: str) -> Reference:
    """Our loop, one prompt at a time."""
    model = load_model(job.target, dtype="float32", device="cpu", attention="auto")
    drafter = load_export(Path(export))
    target = DecodingTarget(model, drafter.shape.target_layer_ids, device="cpu")
    cache = DraftCache(drafter, TargetEnds(model))
    stop_ids = frozenset(job.stop_ids)
    reference = Reference(texts=[], rounds=[], whole_rounds=[])
    for prompt in job.exports[export]:
        alone = decode(target, [prompt], limits=[job.max_new_tokens], stop_ids=stop_ids)[0].tokens
        drafted = decode(target, [prompt], limits=[job.max_new_tokens], stop_ids=stop_ids, proposer=cache)[0]
        beyond = decode(target, [prompt], limits=[len(alone) + job.draft_tokens], stop_ids=frozenset(), proposer=cache)[0]
        whole = beyond.accepted[: len(drafted.accepted)]
        reference.texts.append(list(alone))
        reference.rounds.append(answer_of(drafted.tokens, drafted.accepted, draft_tokens=job.draft_tokens))
        reference.whole_rounds.append(answer_of(drafted.tokens, whole, draft_tokens=job.draft_tokens))
    return reference


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Accepted draft tokens + 1, over all rounds."""
    return 1 + sum(sum(answer.accepted_at) for answer in answers) / sum(answer.rounds for answer in answers)


def faults(found: Sequence[Answer], wanted: Sequence[Answer], *, slack: int) -> list[str]:
    """Where acceptance differs: a prompt's rounds or accepted tokens of a draft position by more than `slack`, the mean by 5 %."""
    said = []
    for number, (theirs, ours) in enumerate(zip(found, wanted, strict=True)):
        pairs = zip([theirs.rounds, *theirs.accepted_at], [ours.rounds, *ours.accepted_at], strict=True)
        if any(abs(a - b) > slack for a, b in pairs):
            counts = f"{theirs.rounds} rounds {theirs.accepted_at}, ours {ours.rounds} rounds {ours.accepted_at}"
            said.append(f"prompt {number}: {counts}")
    mean, own = acceptance_length(found), acceptance_length(wanted)
    if abs(mean / own - 1) > 0.05:
        said.append(f"acceptance length {mean:.3f}, ours {own:.3f}")
    return said
