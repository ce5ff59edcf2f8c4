"""Measure a served model through the OpenAI client: a fixed number of requests in flight, each
answered, retried or reported."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai

from d2f.errors import InputError, did_you_mean, one_line
from decode.compare.config import Limits, Served
from decode.compare.results import Answer, Run

NO_KEY = "none"  # the client wants one, a local server ignores it
BACKOFF_SECONDS = 0.2  # before the first retry, doubled for each further one
QUOTED = 300  # characters of an answer that cannot be used


class UnusableError(Exception):
    """An answer that cannot be used; says why."""


@dataclass(frozen=True)
class Client:
    """Send requests to one endpoint. url: ends in /v1."""

    entry: Served
    url: str
    served_name: str
    limits: Limits
    retries: int
    api_key: str = NO_KEY

    def run(
        self,
        prompts: Sequence[list[int] | str],
        concurrency: int,
        max_new_tokens: int,
        stop: tuple[str, ...],
    ) -> Run:
        """Answer prompts greedily, at most `concurrency` in flight at any time."""
        body: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_new_tokens}
        if stop:
            body["stop"] = list(stop)
        if self.entry.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        bodies = [{"prompt": prompt} | body | self.entry.body for prompt in prompts]
        return asyncio.run(self._run(bodies, concurrency))

    async def _run(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> Run:
        answers = [Answer(i) for i in range(len(bodies))]
        waiting = iter(answers)  # shared: each user takes the next when its last is answered
        async with openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self.api_key,
            max_retries=0,  # `_answer` retries and counts, and a stream that broke off too
            timeout=openai.Timeout(self.limits.silence, connect=self.limits.connect),
            # No proxy of the environment between the clock and the server.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as api:
            began = time.perf_counter()

            async def user() -> None:
                for answer in waiting:
                    await self._answer(api, bodies[answer.item], answer, began)

            await asyncio.gather(*(user() for _ in range(min(concurrency, len(answers)))))
            return Run(answers, time.perf_counter() - began)

    async def _answer(
        self, api: openai.AsyncOpenAI, body: dict[str, Any], answer: Answer, began: float
    ) -> None:
        """Send a request and fill in its answer, or why there is none; a retried request's times
        count from its first try."""
        answer.submitted = time.perf_counter() - began
        for attempt in range(1, self.retries + 2):
            answer.attempts, answer.error = attempt, None
            try:
                # The client's own limits are of a single read: a byte now and then would never
                # meet them.
                async with asyncio.timeout(self.limits.request):
                    return await self._ask(api, body, answer, began)
            except TimeoutError:
                answer.error = f"no answer within {self.limits.request:g} s"
            except openai.APIStatusError as error:
                answer.error = f"HTTP {error.status_code}: {quote(str(error.body or error))}"
                # A timeout or too many requests may pass; another refusal would come again.
                if error.status_code < 500 and error.status_code not in (408, 429):
                    return
            except UnusableError as error:
                answer.error = str(error)
            except Exception as error:  # of the connection, by the library underneath
                cause = error.__cause__ or error
                answer.error = quote(f"{type(cause).__name__}: {cause}".rstrip(": "))
                # A kept connection that the server has closed, as llama.cpp's does now and then:
                # waiting would be counted as the server's time.
                if type(cause).__name__ in (
                    "RemoteProtocolError",
                    "ReadError",
                ):  # httpx's or httpx2's
                    continue
            if attempt <= self.retries:
                await asyncio.sleep(BACKOFF_SECONDS * 2 ** (attempt - 1))

    async def _ask(
        self, api: openai.AsyncOpenAI, body: dict[str, Any], answer: Answer, began: float
    ) -> None:
        """Try once. While the clock runs lines are only kept with their times; they are parsed
        when all are there and the connection is free for the next request."""
        lines: list[tuple[float, str]] = []
        async with api.completions.with_streaming_response.create(
            model=self.served_name,
            # Ids go in `extra_body`: the client checks each id's type otherwise, which takes half
            # a millisecond of the time that is measured.
            prompt="",
            extra_body=body,
        ) as response:
            async for line in response.iter_lines():
                if line:
                    lines.append((time.perf_counter() - began, line))
        read_answer(lines, answer, streamed=bool(body.get("stream")))
        if answer.own_tokens is not None and answer.own_tokens > body["max_tokens"]:
            raise UnusableError(
                f"ignored max_tokens: says {answer.own_tokens} tokens, asked for "
                f"{body['max_tokens']}"
            )


def read_answer(lines: Sequence[tuple[float, str]], answer: Answer, streamed: bool) -> None:
    """Fill in text, counts and times of an answer, from its lines with the times at which they
    came: server-sent events, or a body that is one completion. Raises UnusableError."""
    if not lines:
        raise UnusableError("an empty answer")
    if not streamed:  # as a stream of one event
        whole = " ".join(line for _, line in lines)
        lines = [(lines[-1][0], f"data: {whole}"), (lines[-1][0], "data: [DONE]")]
    # Other lines are comments that keep the connection alive.
    events = [(at, line[5:].strip()) for at, line in lines if line.startswith("data:")]
    pieces: list[tuple[float, str]] = []
    own = reason = None
    done = False
    for arrived, event in events:
        if done := event == "[DONE]":
            break
        try:
            values = json.loads(event)
            own = (values.get("usage") or {}).get("completion_tokens", own)
            for choice in values["choices"][:1]:  # none in the event that has the usage alone
                pieces.append((arrived, choice["text"] or ""))
                reason = choice.get("finish_reason") or reason
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UnusableError(f"expected a completion, got {quote(event)}") from error
    # A connection that breaks looks like an end: only both together say that all is there.
    if reason is None or not done:
        raise UnusableError(
            f"the stream was cut short after {len(lines)} lines: {quote(lines[-1][1])}"
        )
    answer.text, answer.own_tokens = "".join(text for _, text in pieces), own
    answer.finished = pieces[-1][0]
    if streamed:
        # Even a piece without text says that the prompt has been read.
        answer.prefill, answer.first_tokens = pieces[0][0], 1
        answer.first = next((arrived for arrived, text in pieces if text), answer.finished)


def quote(text: str) -> str:
    """Shorten what a server sent to one printable line."""
    return one_line(text[:QUOTED])


def check_endpoint(url: str, served_name: str, api_key: str, limits: Limits) -> None:
    """Raise InputError unless the endpoint answers, in time, and serves that name."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=url, api_key=api_key, timeout=limits.silence, max_retries=0, http_client=http
    ) as api:
        try:
            names = [model.id for model in api.models.list()]
        except openai.NotFoundError:  # not every server lists its models
            return
        except openai.APIConnectionError as error:
            cause = quote(str(error.__cause__ or error))
            raise InputError(f"{url}: no endpoint answers there: {cause}") from error
        except Exception as error:  # whatever the client makes of what came
            raise InputError(f"{url}/models: {quote(str(error))}") from error
    if served_name not in names:
        raise InputError(
            f"{url} does not serve {served_name!r}{did_you_mean(served_name, names)}; it serves "
            f"{quote(', '.join(names))}"
        )
