"""The `dflash` package of z-lab, whose checkpoints' format an export has."""

import time

import dflash.model
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import AutoModelForCausalLM

from tests.serving.answers import Answer, Job, answer_of, serve


def client(job: Job, export: str, prompts: list[list[int]]) -> list[Answer]:
    dflash.model._cuda_time = time.perf_counter  # it asks for CUDA's clock wherever it runs
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32).eval()
    drafter, loading = DFlashDraftModel.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    if faults := {kind: names for kind, names in loading.items() if names}:
        raise ValueError(f"{export} does not load as it is: {faults}")
    answers = []
    for prompt in prompts:
        out = dflash_generate(
            drafter.eval(),
            target,
            torch.tensor([prompt]),
            max_new_tokens=job.max_new_tokens,
            stop_token_ids=job.stop_ids,
            return_stats=True,
        )
        tokens = out.output_ids[0, len(prompt) :].tolist()
        answers.append(answer_of(tokens, [count - 1 for count in out.acceptance_lengths], draft_tokens=job.draft_tokens))
    return answers


if __name__ == "__main__":
    serve(client)
