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

from d2f.errors import InputError, one_line
from decode.comparison.answers import Answer, Run
from decode.comparison.comparison_config import Limits, Served
from decode.comparison.completions import (
    QUOTED,
    allowed_bytes,
    parse_json,
    quote,
    read_pieces,
    read_whole,
)
from decode.comparison.http import PLAIN, UnusableError, beginning, body, chunks, fetch

BACKOFF_SECONDS = 0.2  # before the first retry, doubled for each further one


class _RefusedError(UnusableError):
    """An answer that would be the same again."""


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
        # Before the clock starts.
        bodies = [self.request(prompt, max_new_tokens, stop) for prompt in prompts]
        most = allowed_bytes(max_new_tokens)
        answers = [Answer(i) for i in range(len(prompts))]
        # One iterator for all users: each takes the next request when its last one is answered.
        # They run in one thread, so no two of them take the same.
        waiting: Iterator[Answer] = iter(answers)
        # As many connections as users, so that none waits for one while its clock runs.
        async with self.connect(concurrency) as client:
            began = time.perf_counter()

            async def user() -> None:
                for answer in waiting:
                    await self.answer(client, bodies[answer.item], answer, began, most)

            await asyncio.gather(*(user() for _ in range(min(concurrency, len(answers)))))
            return Run(answers, time.perf_counter() - began)

    def request(
        self, prompt: list[int] | str, max_new_tokens: int, stop: tuple[str, ...] = ()
    ) -> str:
        """The body that asks for one answer."""
        rules: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_new_tokens}
        if stop:
            rules["stop"] = list(stop)
        if self.entry.stream:
            rules |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": self.served_name, "prompt": prompt, **rules, **self.entry.body})

    def connect(self, connections: int) -> httpx.AsyncClient:
        """So many connections to the endpoint, as a context, for `answer`."""
        # trust_env=False: no proxy of the environment stands between the clock and the server.
        return httpx.AsyncClient(
            timeout=httpx.Timeout(self.limits.silence, connect=self.limits.connect),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={"content-type": "application/json", **PLAIN, **self.headers},
            trust_env=False,
        )

    async def answer(
        self, client: httpx.AsyncClient, request: str, answer: Answer, began: float, most: int
    ) -> None:
        """Send a request and fill in its answer, or why there is none. began: when the run's clock
        started. most: bytes that the answer may have."""
        # Before the first try: what retries take counts in the answer's times.
        answer.submitted = time.perf_counter() - began
        for attempt in range(1, self.retries + 2):
            answer.attempts = attempt
            try:
                # httpx's own limits are of a single read: one byte now and then would never meet
                # them.
                async with asyncio.timeout(self.limits.request):
                    await self._ask(client, request, answer, began, most)
                answer.error = None
                return
            except TimeoutError:
                answer.error = f"no answer within {self.limits.request:g} s"
            except httpx.TransportError as error:
                said = f"{type(error).__name__}: {error}".rstrip(": ")
                answer.error = one_line(said[:QUOTED])
            except UnusableError as error:
                answer.error = str(error)
                if isinstance(error, _RefusedError):
                    return
            if attempt <= self.retries:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))

    async def _ask(
        self, client: httpx.AsyncClient, request: str, answer: Answer, began: float, most: int
    ) -> None:
        """One try. While the clock runs, what comes is only kept with its time; it is parsed when
        all of it is there."""
        url = f"{self.url}/completions"
        async with client.stream("POST", url, content=request) as response:
            if response.status_code != 200:
                why = f"HTTP {response.status_code}: {quote(await beginning(response, QUOTED))}"
                # 408 and 429 (timeout, too many requests) may pass; other refusals would come
                # again.
                again = response.status_code >= 500 or response.status_code in (408, 429)
                raise (UnusableError if again else _RefusedError)(why)
            if not self.entry.stream:
                data = await body(response, most)
                arrived = time.perf_counter() - began
                read_whole(data, answer)
                answer.finished = arrived
                return
            pieces: list[tuple[float, bytes]] = []
            rest = b""
            async for chunk in chunks(response, most):
                # A chunk may end within a line, whose rest comes with the next one.
                *lines, rest = (rest + chunk).split(b"\n")
                # One time for all lines of a chunk: they came together.
                arrived = time.perf_counter() - began
                pieces += [(arrived, line) for line in lines if line.strip()]
            if rest.strip():
                pieces.append((time.perf_counter() - began, rest))
        # By now the connection is free for the user's next request.
        read_pieces(pieces, answer)


def check_endpoint(url: str, served_name: str, headers: dict[str, str], limits: Limits) -> None:
    """Raise InputError unless the endpoint answers, in time, and serves that name."""
    try:
        status, data = fetch(f"{url}/models", limits.silence, headers)
        if status == 404:  # not every server lists its models
            return
        if status != 200:
            raise InputError(f"{url}/models: HTTP {status}: {quote(data)}")
        values = parse_json(data)
        names = [model["id"] for model in values["data"]]
        shown = one_line(", ".join(names)[:QUOTED])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{url}: no endpoint answers there: {one_line(str(error))}") from error
    except TimeoutError as error:
        raise InputError(f"{url}/models: no answer within {limits.silence:g} s") from error
    except UnusableError as error:
        raise InputError(f"{url}/models: {error}") from error
    except (KeyError, TypeError) as error:
        raise InputError(f"{url}/models: expected a list of models, got {quote(data)}") from error
    if served_name not in names:
        raise InputError(f"{url} serves {shown}, not {served_name!r}")
