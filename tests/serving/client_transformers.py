"""transformers' own speculative decoding, with our module as its assistant."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from dflash_core.decoding.export import load_export
from tests.serving.answers import Answer, Job, answer_of, serve


class Rounds:
    """A streamer that counts: generate puts the prompt, the first token, then what each round committed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.sizes.append(tokens.numel())

    def end(self) -> None: ...


def client(job: Job, export: str, prompts: list[list[int]]) -> list[Answer]:
    target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32).eval()
    drafter = load_export(Path(export))
    answers = []
    for prompt in prompts:
        rounds = Rounds()
        ids = target.generate(
            torch.tensor([prompt]),
            assistant_model=drafter,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=job.max_new_tokens,
            eos_token_id=job.stop_ids,
            streamer=rounds,
        )
        tokens = ids[0, len(prompt) :].tolist()
        answers.append(answer_of(tokens, [size - 1 for size in rounds.sizes[2:]], draft_tokens=job.draft_tokens))
    return answers


if __name__ == "__main__":
    serve(client)
