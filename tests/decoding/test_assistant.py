"""A drafter as the assistant of transformers' own generate: plain greedy text, and the rounds of our loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from dflash_core.decoding.export import write_export
from tests.decoding.texts import prompt_of
from tests.fakes import IM_END, make_drafter, make_shape
from tests.serving.answers import Job
from tests.serving.client_transformers import client
from tests.serving.reference import acceptance_length, faults, own_answers


def plain(model: Any, prompt: list[int], job: Job) -> list[int]:
    """Greedy text of transformers without an assistant."""
    ids = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=job.max_new_tokens, eos_token_id=job.stop_ids, pad_token_id=0
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("limit", "stop_at"), [(1, None), (2, None), (41, None), (60, 20), (60, 21)])
def test_a_drafter_that_knows_one_text(
    tmp_path: Path, target_path: Path, model: Any, overfitted: Any, limit: int, stop_at: int | None
) -> None:
    """Long rounds on the text that it knows, short ones on others; cut by the limit, or by a stop token within a round."""
    known, text, drafter = overfitted
    export = str(write_export(tmp_path / "export", drafter.state_dict(), make_shape(block_size=8), target=str(target_path)))
    prompts = [known, prompt_of(21), prompt_of(22, 30)]
    stop_ids = [IM_END] if stop_at is None else [text[stop_at]]
    job = Job(target=str(target_path), exports={export: prompts}, max_new_tokens=limit, stop_ids=stop_ids, draft_tokens=7)
    found, reference = client(job, export, prompts), own_answers(job, export)
    assert [answer.tokens for answer in found] == [plain(model, prompt, job) for prompt in prompts] == reference.texts
    assert [(answer.rounds, answer.accepted_at) for answer in found] == [
        (answer.rounds, answer.accepted_at) for answer in reference.rounds
    ]
    if limit > 40:
        assert faults(found, reference.rounds, slack=0) == []
        assert acceptance_length(found[:1]) > 4 > 2 > acceptance_length(found[1:])


def test_a_padded_prompt_is_refused(model: Any) -> None:
    """Its positions would not be those of the tokens."""
    ids, mask = torch.tensor([[0, *prompt_of(3)]]), torch.tensor([[0, *[1] * 9]])
    with pytest.raises(ValueError, match="attention_mask hides 1 of 14 tokens: give the prompt without padding"):
        model.generate(ids, attention_mask=mask, assistant_model=make_drafter(), speculation_type="dflash", max_new_tokens=9)


def test_a_target_in_bfloat16_and_a_drafter_in_float32() -> None:
    """Each computes in its own precision; what goes back is in the target's."""
    drafter, shape = make_drafter(), make_shape()
    block = torch.ones(1, shape.block_size, shape.hidden_size, dtype=torch.bfloat16)
    taps = torch.ones(1, 5, 3 * shape.hidden_size, dtype=torch.bfloat16)
    out = drafter(block, taps, torch.arange(9).unsqueeze(0), None, DynamicCache(config=drafter.config))
    assert out.last_hidden_state.dtype == torch.bfloat16
