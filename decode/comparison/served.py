"""A client of OpenAI-compatible completions: a fixed number of requests in flight, each answered,
retried or reported; nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from d2f.errors import InputError
from decode.comparison.answers import Answer, Run
from decode.comparison.config import Limits, Served

BACKOFF_SECONDS = 0.2  # before the first retry, doubled for each further one
BODY_QUOTED = 300  # characters of an error's body


class _Failed(Exception):
    """One try of a request that did not give an answer. again: whether another may."""

    def __init__(self, why: str, *, again: bool):
        super().__init__(why)
        self.again = again


@dataclass(frozen=True)
class Client:
    """Requests to one endpoint. url: ends in /v1; headers: e.g. an authorization."""

    entry: Served
    url: str
    served_name: str
    limits: Limits
    retries: int
    headers: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        prompts: Sequence[list[int] | str],
        concurrency: int,
        *,
        max_new_tokens: int,
        stop: tuple[str, ...],
    ) -> Run:
        """Answers to prompts, greedily, at most `concurrency` in flight at any time."""
        return asyncio.run(self._run(prompts, concurrency, max_new_tokens, stop))

    async def _run(
        self,
        prompts: Sequence[list[int] | str],
        concurrency: int,
        max_new_tokens: int,
        stop: tuple[str, ...],
    ) -> Run:
        rules: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_new_tokens}
        if stop:
            rules["stop"] = list(stop)
        if self.entry.stream:
            rules |= {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [
            json.dumps({"model": self.served_name, "prompt": prompt, **rules, **self.entry.body})
            for prompt in prompts
        ]  # before the clock starts
        answers = [Answer(i) for i in range(len(prompts))]
        waiting: Iterator[Answer] = iter(answers)
        timeout = httpx.Timeout(self.limits.silence, connect=self.limits.connect)
        pool = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        headers = {"content-type": "application/json", **self.headers}
        async with httpx.AsyncClient(
            timeout=timeout, limits=pool, headers=headers, trust_env=False
        ) as client:
            began = time.perf_counter()

            async def user() -> None:
                for answer in waiting:
                    await self._answer(client, bodies[answer.item], answer, began)

            await asyncio.gather(*(user() for _ in range(min(concurrency, len(answers)))))
            return Run(answers, time.perf_counter() - began)

    async def _answer(
        self, client: httpx.AsyncClient, body: str, answer: Answer, began: float
    ) -> None:
        answer.submitted = time.perf_counter() - began
        for attempt in range(1, self.retries + 2):
            answer.attempts = attempt
            try:
                async with asyncio.timeout(self.limits.request):
                    if self.entry.stream:
                        await self._streamed(client, body, answer, began)
                    else:
                        await self._whole(client, body, answer, began)
                answer.error = None
                return
            except TimeoutError:
                answer.error = f"no answer within {self.limits.request:g} s"
            except httpx.TransportError as error:
                answer.error = f"{type(error).__name__}: {error}".rstrip(": ")
            except _Failed as error:
                answer.error = str(error)
                if not error.again:
                    return
            if attempt <= self.retries:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))

    async def _whole(
        self, client: httpx.AsyncClient, body: str, answer: Answer, began: float
    ) -> None:
        response = await client.post(f"{self.url}/completions", content=body)
        arrived = time.perf_counter() - began
        _check_status(response, response.content)
        values = _parse(response.text)
        choice = _choice(values)
        if not isinstance(choice.get("text"), str):
            raise _Failed(f"an answer without text: {response.text[:BODY_QUOTED]}", again=True)
        answer.text, answer.finished = choice["text"], arrived
        answer.own_tokens = _completion_tokens(values)

    async def _streamed(
        self, client: httpx.AsyncClient, body: str, answer: Answer, began: float
    ) -> None:
        pieces: list[tuple[float, str]] = []  # parsed when all are there: the clock runs
        async with client.stream("POST", f"{self.url}/completions", content=body) as response:
            if response.status_code != 200:
                _check_status(response, await response.aread())
            async for line in response.aiter_lines():
                if line:
                    pieces.append((time.perf_counter() - began, line))
        _read_pieces(pieces, answer)


def _read_pieces(pieces: list[tuple[float, str]], answer: Answer) -> None:
    """The answer in a finished stream of server-sent events."""
    text, reason, own, done = "", None, None, False
    prefill = first = last = None
    for arrived, line in pieces:
        if line.startswith(":"):  # a comment, sent to keep the connection alive
            continue
        if not line.startswith("data:"):
            raise _Failed(f"expected a data line, got {line[:BODY_QUOTED]!r}", again=True)
        data = line[5:].strip()
        if data == "[DONE]":
            done = True
            break
        values = _parse(data)
        own = _completion_tokens(values) or own
        if values.get("choices") == []:  # the usage alone
            continue
        choice = _choice(values)
        prefill = arrived if prefill is None else prefill
        piece = choice.get("text") or ""
        if piece and first is None:
            first = arrived
        text += piece
        reason = choice.get("finish_reason") or reason
        last = arrived
    if reason is None or not done:
        raise _Failed(f"the stream was cut short after {len(pieces)} lines", again=True)
    answer.text, answer.own_tokens = text, own
    answer.prefill, answer.finished = prefill, last
    answer.first = first if first is not None else last
    answer.first_tokens = 1


def _check_status(response: httpx.Response, body: bytes) -> None:
    if response.status_code != 200:
        quoted = body.decode("utf-8", "replace")[:BODY_QUOTED]
        again = response.status_code >= 500 or response.status_code in (408, 429)
        raise _Failed(f"HTTP {response.status_code}: {quoted}", again=again)


def _parse(data: str) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except ValueError as error:
        raise _Failed(f"malformed JSON: {data[:BODY_QUOTED]!r}", again=True) from error
    if not isinstance(values, dict):
        raise _Failed(f"expected a JSON object, got {data[:BODY_QUOTED]!r}", again=True)
    if "error" in values:
        raise _Failed(f"the server says {str(values['error'])[:BODY_QUOTED]}", again=True)
    return values


def _choice(values: dict[str, Any]) -> dict[str, Any]:
    choices = values.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _Failed(f"expected choices, got {str(values)[:BODY_QUOTED]}", again=True)
    return choices[0]


def _completion_tokens(values: dict[str, Any]) -> int | None:
    usage = values.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def check_endpoint(url: str, served_name: str, headers: dict[str, str], limits: Limits) -> None:
    """Raise InputError unless the endpoint answers and serves that name."""
    try:
        response = httpx.get(
            f"{url}/models", headers=headers, timeout=limits.connect, trust_env=False
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{url}: no endpoint answers there: {error}") from error
    if response.status_code == 404:  # not every server lists its models
        return
    if response.status_code != 200:
        raise InputError(f"{url}/models: HTTP {response.status_code}: {response.text[:200]}")
    try:
        names = [model["id"] for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{url}/models: expected a list of models: {error}") from error
    if served_name not in names:
        raise InputError(f"{url} serves {', '.join(names)}, not {served_name!r}")
