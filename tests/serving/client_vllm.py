"""vLLM's CPU build. It runs in one process and answers one prompt after the other, so that its counters are those of a prompt.

The CPU build of 0.32.0 norms the context's keys of every draft layer with the k_norm of the first (its rms_norm kernel reads one row of
weights), which turns a few close drafts. Normed layer by layer, its counters are those of our loop exactly.
"""

from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from tests.serving.answers import Answer, Job, serve

ROUNDS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def client(job: Job, export: str, prompts: list[list[int]]) -> list[Answer]:
    llm = LLM(
        job.target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={"method": "dflash", "model": export, "num_speculative_tokens": job.draft_tokens},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=job.max_new_tokens, stop_token_ids=job.stop_ids, detokenize=False)
    answers, before = [], counters(llm)
    for prompt in prompts:
        output = llm.generate(TokensPrompt(prompt_token_ids=prompt), greedy, use_tqdm=False)[0]
        after = counters(llm)
        rounds, *accepted_at = (now - then for now, then in zip(after, before, strict=True))
        answers.append(Answer(tokens=list(output.outputs[0].token_ids), rounds=rounds, accepted_at=accepted_at))
        before = after
    return answers


def counters(llm: LLM) -> list[int]:
    """Rounds so far, then those that accepted draft token 1, 2, ..."""
    found: dict[str, Any] = {metric.name: metric for metric in llm.get_metrics()}
    return [found[ROUNDS].value, *found[ACCEPTED].values]


if __name__ == "__main__":
    serve(client)
