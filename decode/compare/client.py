"""Measure a served model through the OpenAI client: a fixed number of requests in flight, each
answered, retried or reported."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from d2f.errors import InputError, did_you_mean, one_line
from decode.compare.config import Limits, Served

NO_KEY = "none"  # the client wants one, a local server ignores it
BACKOFF_SECONDS = 0.2  # before the first retry, doubled for each further one
QUOTED = 300  # characters of an answer that cannot be used


@dataclass
class Answer:
    """One request, whichever entry answered it; times in seconds from the start of its run, None
    where unknown.

    item: its place in the workload. submitted: when it was sent, after waiting for its turn.
    prefill: the end of the first forward it was in, or the first piece of a streamed answer.
    first: when the first token of the final text could be shown. finished: when all was there.
    first_tokens: tokens there at `prefill`. text: what a reader gets. own_tokens: tokens as the
    entry itself counts them, its end token with it where it made one. forwards, rows: calls of the
    model that the request was in, and rows fed for it. attempts: tries that it took. error: why
    the last of them failed. counts: what its decoder counted, by name. tokens: visible ones by the
    common tokenizer, and right: whether they solve the problem, both filled in by
    `decode.compare.report.judge`.
    """

    item: int
    submitted: float = 0.0
    prefill: float | None = None
    first: float | None = None
    finished: float | None = None
    first_tokens: int = 0
    text: str = ""
    own_tokens: int | None = None
    forwards: int | None = None
    rows: int | None = None
    attempts: int = 1
    error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    right: bool | None = None


@dataclass
class Run:
    """The answers of one run of a workload at one concurrency.

    seconds: wall time from the first request to the last answer. calls: calls of the model, None
    where unknown; a call that serves several requests is one. peak_bytes: most memory held
    while it ran, None where it could not be read.
    """

    answers: list[Answer]
    seconds: float
    calls: int | None = None
    peak_bytes: int | None = None


class UnusableError(Exception):
    """An answer that cannot be used; says why."""


@dataclass(frozen=True)
class Client:
    """Requests to one endpoint. url: ends in /v1."""

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
        bodies = [self.request(prompt, max_new_tokens, stop) for prompt in prompts]
        return asyncio.run(self._run(bodies, concurrency))

    async def _run(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> Run:
        answers = [Answer(i) for i in range(len(bodies))]
        waiting = iter(answers)  # shared: each user takes the next when its last is answered
        async with self.connect() as api:
            began = time.perf_counter()

            async def user() -> None:
                for answer in waiting:
                    await self.answer(api, bodies[answer.item], answer, began)

            await asyncio.gather(*(user() for _ in range(min(concurrency, len(answers)))))
            return Run(answers, time.perf_counter() - began)

    def request(
        self, prompt: list[int] | str, max_new_tokens: int, stop: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Make the body that asks for one answer."""
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0.0, "max_tokens": max_new_tokens}
        if stop:
            body["stop"] = list(stop)
        if self.entry.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self.entry.body

    def connect(self) -> openai.AsyncOpenAI:
        """Open the OpenAI client, as a context, for `answer`."""
        return openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self.api_key,
            max_retries=0,  # `answer` retries and counts, and a stream that broke off too
            timeout=openai.Timeout(self.limits.silence, connect=self.limits.connect),
            # No proxy of the environment between the clock and the server.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def answer(
        self, api: openai.AsyncOpenAI, body: dict[str, Any], answer: Answer, began: float
    ) -> None:
        """Send a request and fill in its answer, or why there is none. began: when the run's clock
        started; a retried request's times count from its first try."""
        answer.submitted = time.perf_counter() - began
        for attempt in range(1, self.retries + 2):
            answer.attempts = attempt
            try:
                # The client's own limits are of a single read: a byte now and then would never
                # meet them.
                async with asyncio.timeout(self.limits.request):
                    await self._ask(api, body, answer, began)
                answer.error = None
                return
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
            # As `extra_body`: checking each id of a prompt against the client's types takes half
            # a millisecond of the time that is measured.
            prompt="",
            extra_body=body,
        ) as response:
            async for line in response.iter_lines():
                if line:
                    lines.append((time.perf_counter() - began, line))
        if not lines:
            raise UnusableError("an empty answer")
        if body.get("stream"):
            read_pieces(lines, answer)
        else:
            read_whole("\n".join(line for _, line in lines), answer)
            answer.finished = lines[-1][0]
        if answer.own_tokens is not None and answer.own_tokens > body["max_tokens"]:
            raise UnusableError(
                f"ignored max_tokens: says {answer.own_tokens} tokens, asked for "
                f"{body['max_tokens']}"
            )


def read_whole(text: str, answer: Answer) -> None:
    """Fill in the text and count of an answer that came at once. Raises UnusableError."""
    answer.text, answer.own_tokens, _ = _parse(text)


def read_pieces(lines: Sequence[tuple[float, str]], answer: Answer) -> None:
    """Fill in text, counts and times of a finished stream of server-sent events, given as lines
    with the times at which they came. Raises UnusableError."""
    texts: list[str] = []
    prefill = first = last = own = reason = None
    done = False
    for arrived, line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:"):  # a comment that keeps the connection alive, or a field
            continue
        if data == "[DONE]":
            done = True
            break
        text, count, why = _parse(data)
        own = count if count is not None else own
        if text is None:  # the usage alone
            continue
        # Even a piece without text says that the prompt has been read.
        prefill = arrived if prefill is None else prefill
        first = arrived if text and first is None else first
        texts.append(text)
        reason, last = why or reason, arrived
    # A connection that breaks looks like an end: only both together say that all is there.
    if reason is None or not done:
        raise UnusableError(
            f"the stream was cut short after {len(lines)} lines: {quote(lines[-1][1])}"
        )
    answer.text, answer.own_tokens = "".join(texts), own
    answer.prefill, answer.finished = prefill, last
    answer.first = first if first is not None else last
    answer.first_tokens = 1


def _parse(data: str) -> tuple[Any, int | None, str | None]:
    """Read text (None in the chunk of a stream that has the usage alone), completion_tokens and
    finish_reason of an answer or of a chunk of one. Raises UnusableError."""
    try:
        values = json.loads(data)
        usage = values.get("usage") or {}
        if not values["choices"]:
            return None, usage.get("completion_tokens"), None
        choice = values["choices"][0]
        return choice["text"] or "", usage.get("completion_tokens"), choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnusableError(f"expected a completion, got {quote(data)}") from error


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
            cause = one_line(str(error.__cause__ or error))
            raise InputError(f"{url}: no endpoint answers there: {cause}") from error
        except (openai.APIError, AttributeError, TypeError, ValueError) as error:
            raise InputError(f"{url}/models: {quote(str(error))}") from error
    if served_name not in names:
        raise InputError(
            f"{url} serves {quote(', '.join(names))}, not {served_name!r}"
            f"{did_you_mean(served_name, names)}"
        )
