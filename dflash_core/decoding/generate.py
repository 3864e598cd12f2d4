"""Answers in this process, with transformers: a batch of requests through the target at once.

    requests --chat template, as a server renders--> prompts, padded on the left --generate--> ids up to the stop token

Each request draws from a generator of its own, seeded by the request, so its answer does not depend on what else is in the
batch (beyond the rounding of the batch's shape). Tool calls stay in the text as they were generated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_core.config import Config
from dflash_core.data.chat import Chat, Unprovable, open_chat, served_ids
from dflash_core.data.tokenization import load_tokenizer
from dflash_core.decoding.turns import Answer, Request, Unanswered
from dflash_core.devices import home
from dflash_core.modeling.target import load_model, read_facts


class Draw:
    """A logits processor after which the largest score is a draw from softmax(scores): the Gumbel-max rule, row by row."""

    def __init__(self, seeds: Sequence[int], *, device: str) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """scores [B, V] -> scores [B, V] with noise."""
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()


class LocalTarget:
    """The whole target on the first device of pipeline.targets."""

    def __init__(self, config: Config) -> None:
        self._settings = config.regeneration
        self._device = home(config.pipeline.targets[0])
        self._date = config.data.date
        self._chats: dict[bool | None, Chat] = {}  # by enable_thinking
        self._tokenizer = load_tokenizer(config.target.path)
        facts = read_facts(config.target.path)
        self._stop_ids, self._positions = facts.eos_ids, facts.max_positions
        self._model = load_model(
            config.target.path, dtype=config.target.dtype, device=config.pipeline.targets[0], attention=config.target.attention
        )

    def answers(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> list[Answer | Unanswered]:
        """One answer a request, in order, or why there is none; of no use when `stopped()` became true meanwhile."""
        prompts = [self._prompt(request) for request in requests]
        limits = [self._limit(prompt) for prompt in prompts]
        asked = [place for place, limit in enumerate(limits) if isinstance(limit, int)]
        generated: dict[int, list[int]] = {}
        if asked:
            rows = self._generate(
                [prompts[place] for place in asked],
                [requests[place].seed for place in asked],
                max(limit for limit in limits if isinstance(limit, int)),
                stopped,
            )
            generated = dict(zip(asked, rows, strict=True))
        return [self._answer(generated[place][:limit]) if isinstance(limit, int) else limit for place, limit in enumerate(limits)]

    def _prompt(self, request: Request) -> list[int] | Unanswered:
        if request.thinking not in self._chats:
            self._chats[request.thinking] = open_chat(
                self._tokenizer, stop_ids=frozenset(self._stop_ids), date=self._date, thinking=request.thinking
            )
        try:
            return served_ids(self._chats[request.thinking], request.messages, tools=request.tools)
        except Unprovable as reason:
            return Unanswered(str(reason))

    def _limit(self, prompt: list[int] | Unanswered) -> int | Unanswered:
        """How many tokens may be generated behind a prompt."""
        if isinstance(prompt, Unanswered):
            return prompt
        room = self._positions - len(prompt)
        return min(self._settings.max_tokens, room) if room > 0 else Unanswered("a prompt that fills the target's positions")

    @torch.no_grad()
    def _generate(self, prompts: list[Any], seeds: list[int], limit: int, stopped: Callable[[], bool]) -> list[list[int]]:
        """Generated ids [B][up to limit]; behind its stop token a row holds padding."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self._device)

        def interrupted(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), stopped(), device=input_ids.device)

        out = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            do_sample=False,  # the draw is a processor, so that the largest score is the drawn one
            logits_processor=self._processors(seeds),
            stopping_criteria=[interrupted],
            eos_token_id=list(self._stop_ids),
            pad_token_id=self._stop_ids[0],
        )
        return out[:, longest:].tolist()

    def _processors(self, seeds: list[int]) -> Any:
        from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        settings = self._settings
        if settings.temperature == 0:
            return LogitsProcessorList()
        warpers: list[Any] = [TemperatureLogitsWarper(float(settings.temperature))]
        if settings.top_k is not None:
            warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            warpers.append(TopPLogitsWarper(settings.top_p))
        return LogitsProcessorList([*warpers, Draw(seeds, device=self._device)])

    def _answer(self, ids: list[int]) -> Answer:
        end = next((place for place, token in enumerate(ids) if token in self._stop_ids), None)
        text = ids if end is None else ids[:end]
        kept = ids if end is None else ids[: end + 1]
        return Answer(
            content=self._tokenizer.decode(text),
            finish_reason="length" if end is None else "stop",
            tokens=len(kept),
            token_ids=kept if self._settings.token_ids == "auto" else None,
        )
