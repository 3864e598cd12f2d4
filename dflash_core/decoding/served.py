"""Acceptance and latency of a model that is being served: its own counters, read around our prompts.

    /metrics --requests of a group, side by side--> /metrics       difference = drafts, accepted tokens, accepted by position

Groups have `evaluation.batch_size` requests, and intervals are drawn over groups. Nobody else may use the server meanwhile: its
counters do not say whose drafts they count. vLLM counts (`vllm:spec_decode_*`); SGLang has a gauge of its last rounds only
(`sglang:spec_accept_length`), which is averaged over the groups and marked as such.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import numpy as np

from dflash_core.config import Config
from dflash_core.data.prompts import Messages, PromptSet, read_prompt_sets
from dflash_core.decoding.intervals import estimate
from dflash_core.records import Estimate, ServedReport

TIMEOUT_S = 600.0
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
DRAFTS, DRAFTED, ACCEPTED, BY_POSITION = (
    f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)
GAUGE = "sglang:spec_accept_length"


async def measure_served(url: str, config: Config) -> list[ServedReport]:
    """One report a prompt set. Raises ValueError where the server does not answer, does not speculate, or refuses a prompt."""
    key = config.regeneration.api_key_env
    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key and key in os.environ else {}
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers) as client:
        server = _Server(client, url.rstrip("/").removesuffix("/v1"), config)
        await server.open()
        return [await server.measure(one) for one in read_prompt_sets(config.evaluation)]


@dataclass
class _Group:
    """What one group of requests brought."""

    counters: Counter[str]
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class _Server:
    """One server and how it is asked."""

    def __init__(self, client: httpx.AsyncClient, root: str, config: Config) -> None:
        self._client, self._root, self._config = client, root, config
        self._model, self._counts = "", True

    async def _ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            answer = await self._client.request(method, self._root + path, json=body)
        except httpx.HTTPError as error:
            raise ValueError(f"--endpoint {self._root}{path} does not answer: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise ValueError(f"--endpoint {self._root}{path}: status {answer.status_code}, {answer.text[:200]}")
        return answer

    async def open(self) -> None:
        """Finds the model's name and whether the server counts drafts."""
        self._model = (await self._ask("GET", "/v1/models")).json()["data"][0]["id"]
        found = await self._counters()
        self._counts = DRAFTS in found
        if not self._counts and GAUGE not in found:
            raise ValueError(
                f"--endpoint {self._root}/metrics has neither {DRAFTS} nor {GAUGE}: the server drafts nothing, or it was started "
                "without metrics (SGLang: --enable-metrics)"
            )

    async def _counters(self) -> Counter[str]:
        """Sums over engines; those by position as `name/position`."""
        found: Counter[str] = Counter()
        for name, labels, value in SAMPLE.findall((await self._ask("GET", "/metrics")).text):
            name = name.removesuffix("_total")
            if name in (DRAFTS, DRAFTED, ACCEPTED, GAUGE):
                found[name] += float(value)  # type: ignore[assignment]
            elif name == BY_POSITION and (position := POSITION.search(labels)):
                found[f"{name}/{int(position[1])}"] += float(value)  # type: ignore[assignment]
        return found

    async def measure(self, one: PromptSet) -> ServedReport:
        """All turns of a prompt set; later turns follow the server's own answers."""
        size = self._config.evaluation.batch_size
        groups = []
        for start in range(0, len(one.prompts), size):
            rest = [list(prompt) for prompt in one.prompts[start : start + size]]
            talks: list[Messages] = [[] for _ in rest]
            while any(rest):
                groups.append(await self._group(talks, rest, one))
        return self._report(one.name, groups)

    async def _group(self, talks: list[Messages], rest: list[Messages], one: PromptSet) -> _Group:
        before = await self._counters()
        group = _Group(counters=Counter())
        faults: list[ValueError] = []  # kept out of the task group, which would wrap them

        async def answer(talk: Messages) -> None:
            try:
                await self._answer(talk, group, one.thinking)
            except ValueError as fault:
                faults.append(fault)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for talk, own in zip(talks, rest, strict=True):
                place = next((place for place, message in enumerate(own) if message["role"] == "user"), None)
                if place is None:
                    own.clear()
                    continue
                talk += own[: place + 1]
                del own[: place + 1]
                tasks.start_soon(answer, talk)
        if faults:
            raise faults[0]
        after = await self._counters()
        group.counters = after if not self._counts else Counter({name: after[name] - before[name] for name in after})
        return group

    async def _answer(self, talk: Messages, group: _Group, thinking: bool | None) -> None:
        settings = self._config.evaluation
        thinking = self._config.data.thinking if thinking is None else thinking
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(talk),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
            **({} if settings.top_k is None else {"top_k": settings.top_k}),
            **({} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}),
        }
        start = time.perf_counter()
        answer = (await self._ask("POST", "/v1/chat/completions", body)).json()
        group.seconds.append(time.perf_counter() - start)
        group.tokens.append(int(answer["usage"]["completion_tokens"]))
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})

    def _report(self, name: str, groups: Sequence[_Group]) -> ServedReport:
        seconds = [each for group in groups for each in group.seconds]
        tokens = sum(sum(group.tokens) for group in groups)
        drafts = sum(group.counters[DRAFTS] for group in groups)
        positions = sum(key.startswith(f"{BY_POSITION}/") for key in (groups[0].counters if groups else ()))
        accepted = [sum(group.counters[f"{BY_POSITION}/{place}"] for group in groups) for place in range(positions)]
        return ServedReport(
            prompt_set=name,
            model=self._model,
            source="counters" if self._counts else "gauge of the last rounds",
            requests=len(seconds),
            tokens=tokens,
            rounds=int(drafts),
            acceptance_interval=self._acceptance(groups),
            acceptance_by_slot=tuple(count / drafts for count in accepted) if drafts else (),
            seconds_median=float(np.median(seconds)),
            seconds_p95=float(np.quantile(seconds, 0.95)),
            tokens_per_second_of_a_request=tokens / sum(seconds),
            counts={"requests without a token": zero}
            if (zero := sum(each == 0 for one in groups for each in one.tokens))
            else {},
        )

    def _acceptance(self, groups: Sequence[_Group]) -> Estimate | None:
        """Accepted tokens + 1 a draft; of a gauge, which includes the + 1, the mean over groups."""
        if self._counts:
            rows = [(group.counters[ACCEPTED] + group.counters[DRAFTS], group.counters[DRAFTS]) for group in groups]
        else:
            rows = [(group.counters[GAUGE], 1) for group in groups]
        table = np.array([row for row in rows if row[1] > 0 and row[0] > 0], np.float64)
        return estimate([table], lambda sums: sums[0][:, 0] / sums[0][:, 1]) if len(table) else None
