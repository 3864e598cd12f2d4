"""Several OpenAI-compatible servers as one that answers, whatever single ones do.

    Request --> the least busy endpoint that is up --POST /chat/completions--> Answer
                    failure: wait (doubling, jittered, or the server's Retry-After), then another endpoint
                    `rest_after` failures in a row: the endpoint rests, then one request at a time tries it

Each endpoint holds at most `concurrency` requests. What a server refuses (400) is this conversation's end; a wrong key or
address is the run's; and so is an outage of all endpoints longer than `outage_s`.

Token ids: vLLM and SGLang take `return_token_ids` and put `token_ids` into the choice (some SGLang versions call it
`response_token_ids`); a server that refuses or ignores the field is asked without, and that is said once.
"""

import logging
import math
import os
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import httpx

from dflash_core.data_config import RegenerationConfig
from dflash_core.decoding.turns import Answer, Request, Unanswered

LOG = logging.getLogger(__name__)
CONNECT_S = 10.0
FINISHED = ("stop", "length", "tool_calls")
REFUSALS = (400, 413, 422)  # of this request
MISTAKES = {401: "set the key", 403: "set the key", 404: "check the address and regeneration.model"}  # of the config
UNAVAILABLE = (429, 503)  # the server's state, which says nothing about the request


class OutOfService(ValueError):
    """No endpoint can answer; what is finished stays on disk."""


class _Failure(Exception):
    """One request that brought no answer and may be sent again."""

    def __init__(self, reason: str, *, counts: bool = True, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.counts, self.retry_after = counts, retry_after


@dataclass
class _Endpoint:
    """What is known about one server."""

    address: str
    in_flight: int = 0
    failures: int = 0  # in a row
    down_since: float | None = None  # first failure since the last answer
    resting_until: float = -math.inf
    last_failure: str = ""
    asks_token_ids: bool = True

    def capacity(self, settings: RegenerationConfig) -> int:
        return 1 if self.failures >= settings.rest_after else settings.concurrency


def api_key(settings: RegenerationConfig) -> str | None:
    """The servers' key. Raises ValueError where its variable is named and not set."""
    name = settings.api_key_env
    if name is not None and not os.environ.get(name):
        raise ValueError(f"regeneration.api_key_env names {name}, which is not set in the environment")
    return os.environ[name] if name else None


def backoff(failures: int, *, first: float, longest: float, draw: float) -> float:
    """Seconds to wait after so many failures in a row; `draw` in [0, 1) spreads it over the upper half."""
    return min(longest, first * 2.0 ** min(failures - 1, 60)) * (0.5 + draw / 2)


def read_answer(payload: Any, stop_ids: frozenset[int]) -> Answer:
    """The first choice of a chat completion. Raises ValueError where it is none.

    Token ids are kept only if they end with a stop token, or the answer was cut: others could not be trained as they are.
    """
    try:
        choice = payload["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        content, calls = message.get("content") or "", message.get("tool_calls") or None
        reasoning = message.get("reasoning_content") or message.get("reasoning") or None
        ids = choice.get("token_ids") or choice.get("response_token_ids")
        tokens = (payload.get("usage") or {}).get("completion_tokens") or len(ids or ())
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("a reply that is no chat completion") from error
    if reason not in FINISHED:
        raise ValueError(f"finish_reason {reason!r}")
    whole = isinstance(content, str) and isinstance(reasoning, str | None) and isinstance(calls, list | None)
    if not whole or not isinstance(tokens, int):
        raise ValueError("a reply that is no chat completion")
    text = content + (reasoning or "")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("a reply that is no valid Unicode")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        ids = None
    if ids and reason != "length" and ids[-1] not in stop_ids:
        ids = None
    return Answer(
        content=content, finish_reason=reason, tokens=tokens, reasoning=reasoning, tool_calls=calls, token_ids=ids or None
    )


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date; None where it holds neither."""
    if value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


class Endpoints:
    """Use as `async with Endpoints(...) as endpoints: await endpoints.answer(request)`; any number of tasks may ask."""

    def __init__(self, settings: RegenerationConfig, *, model: str, stop_ids: frozenset[int]) -> None:
        self._settings, self._model, self._stop_ids = settings, model, stop_ids
        self._endpoints = [_Endpoint(address) for address in settings.endpoints]
        self._changed = anyio.Event()
        self._random = random.Random(settings.seed)
        self._noted: set[str] = set()
        self.failures: Counter[str] = Counter()
        room = settings.concurrency * len(settings.endpoints)
        key = api_key(settings)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(settings.timeout_s, connect=min(CONNECT_S, settings.timeout_s), pool=None),
            limits=httpx.Limits(max_connections=room, max_keepalive_connections=room),
        )

    async def __aenter__(self) -> "Endpoints":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def answer(self, request: Request) -> Answer:
        """The target's answer. Raises Unanswered for this conversation alone, OutOfService where nobody can answer."""
        failed, wait, last = 0, 0, None
        while True:
            endpoint = await self._take(avoid=last)
            try:
                answer = await self._ask(endpoint, request)
            except _Failure as failure:
                self._note_failure(endpoint, failure)
                failed += failure.counts
                wait, last, reason = wait + 1, endpoint, str(failure)
            else:
                endpoint.failures, endpoint.down_since = 0, None
                return answer
            finally:
                endpoint.in_flight -= 1
                self._wake()
            if failed >= self._settings.attempts:
                raise Unanswered(f"no answer in {failed} attempts: {reason}")
            await anyio.sleep(
                backoff(
                    wait,
                    first=self._settings.backoff_s,
                    longest=self._settings.backoff_max_s,
                    draw=self._random.random(),
                )
            )

    # ---- choosing an endpoint

    async def _take(self, *, avoid: _Endpoint | None) -> _Endpoint:
        """Waits for room at an endpoint that is not resting, and takes it; `avoid` only if no other has any."""
        while True:
            now = anyio.current_time()
            self._check_outage(now)
            ready = [e for e in self._endpoints if e.resting_until <= now and e.in_flight < e.capacity(self._settings)]
            if ready:
                chosen = min(ready, key=lambda endpoint: (endpoint is avoid, endpoint.in_flight))
                chosen.in_flight += 1
                return chosen
            next_up = min((e.resting_until for e in self._endpoints if e.resting_until > now), default=math.inf)
            with anyio.move_on_after(min(next_up, self._outage_end()) - now):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _outage_end(self) -> float:
        """When all endpoints will have been failing for `outage_s`; never, while one is up."""
        since = [math.inf if endpoint.down_since is None else endpoint.down_since for endpoint in self._endpoints]
        return max(since) + self._settings.outage_s

    def _check_outage(self, now: float) -> None:
        if now >= self._outage_end():
            last = "; ".join(f"{endpoint.address}: {endpoint.last_failure}" for endpoint in self._endpoints)
            raise OutOfService(
                f"no endpoint has answered for {self._settings.outage_s:g} s (regeneration.outage_s). Last failures: {last}. "
                "What is finished is kept: start the servers and run the same again"
            )

    def _note_failure(self, endpoint: _Endpoint, failure: _Failure) -> None:
        settings, now = self._settings, anyio.current_time()
        self.failures[str(failure)] += 1
        endpoint.failures += 1
        endpoint.last_failure = str(failure)
        if endpoint.down_since is None:
            endpoint.down_since = now
        rest = failure.retry_after or 0.0
        if endpoint.failures >= settings.rest_after:
            rest = max(rest, settings.rest_s)
        if endpoint.failures == settings.rest_after:
            LOG.warning("%s rests for %g s after %d failures in a row: %s", endpoint.address, rest, endpoint.failures, failure)
        endpoint.resting_until = max(endpoint.resting_until, now + min(rest, settings.outage_s))

    # ---- asking it

    async def _ask(self, endpoint: _Endpoint, request: Request) -> Answer:
        asks = self._settings.token_ids == "auto" and endpoint.asks_token_ids
        response = await self._post(endpoint, self._body(request, token_ids=asks))
        if asks and response.status_code in REFUSALS:
            response = await self._post(endpoint, self._body(request, token_ids=False))
            if response.status_code == 200:
                endpoint.asks_token_ids = False
                self._note(endpoint, "refuses return_token_ids, so its answers come without token ids")
        if response.status_code != 200:
            self._raise_for(endpoint, response)
        try:
            answer = read_answer(response.json(), self._stop_ids)
        except (ValueError, RecursionError) as error:  # broken JSON is a ValueError of its own kind
            raise _Failure(str(error) if type(error) is ValueError else "a reply that is no JSON") from error
        if asks and answer.token_ids is None:
            self._note(endpoint, "gave an answer without token ids, or with ids that lack the target's stop token")
        return answer

    async def _post(self, endpoint: _Endpoint, body: dict[str, Any]) -> httpx.Response:
        try:
            with anyio.fail_after(self._settings.timeout_s):
                return await self._client.post(f"{endpoint.address}/chat/completions", json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _Failure("no connection", counts=False) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _Failure(f"no answer within {self._settings.timeout_s:g} s") from error
        except httpx.RequestError as error:
            raise _Failure(f"connection lost ({type(error).__name__})") from error

    def _body(self, request: Request, *, token_ids: bool) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.messages,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,  # else a server takes its own default
            "max_tokens": settings.max_tokens,
            "seed": request.seed,
        }
        if request.tools:
            body["tools"] = request.tools
        if request.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
        if token_ids:
            body["return_token_ids"] = True
        return body

    def _raise_for(self, endpoint: _Endpoint, response: httpx.Response) -> None:
        status, said = response.status_code, " ".join(response.text.split())[:300]
        if status in REFUSALS:
            self._note(endpoint, f"refuses a request (HTTP {status}): {said}")
            raise Unanswered(f"refused by the server (HTTP {status})")
        if status in MISTAKES:
            raise OutOfService(f"{endpoint.address} answers HTTP {status}; {MISTAKES[status]}. It says: {said}")
        wait = retry_after(response.headers.get("Retry-After"))
        raise _Failure(f"HTTP {status}", counts=status not in UNAVAILABLE, retry_after=wait)

    def _note(self, endpoint: _Endpoint, what: str) -> None:
        """A warning, the first of its kind for each endpoint."""
        kind = f"{endpoint.address} {what.split(':')[0]}"
        if kind not in self._noted:
            self._noted.add(kind)
            LOG.warning("%s %s", endpoint.address, what)
