"""A client of OpenAI-compatible completions: a fixed number of requests in flight, each answered,
retried or reported; nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from d2f.errors import InputError, one_line
from decode.compare.config import Limits, Served

# Reading what a server sends within bounds of time and size, whatever it sends.

# Compressed bodies could unpack to any size, and unpacking would be timed as decoding.
PLAIN = {"accept-encoding": "identity"}
PAGE_BYTES = 2**20  # of an answer that is no completion


class UnusableError(Exception):
    """An answer that cannot be used; says why."""


async def chunks(response: httpx.Response, most: int) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises UnusableError beyond `most` bytes, or if it is compressed."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnusableError(f"a body in {encoding[:20]!r}, which was not asked for")
    size = 0
    async for chunk in response.aiter_raw():
        size += len(chunk)
        if size > most:
            raise UnusableError(f"an answer of more than {most} bytes")
        yield chunk


async def body(response: httpx.Response, most: int) -> bytes:
    """The whole body. Raises UnusableError as `chunks`."""
    return b"".join([chunk async for chunk in chunks(response, most)])


async def beginning(response: httpx.Response, most: int) -> bytes:
    """The first bytes of a body, to be quoted."""
    found = b""
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) >= most:
            break
    return found[:most]


def fetch(url: str, seconds: float, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of a GET, all of it within `seconds`. Raises httpx.HTTPError,
    httpx.InvalidURL, UnusableError, TimeoutError."""
    return asyncio.run(_fetch(url, seconds, headers or {}))


async def _fetch(url: str, seconds: float, headers: dict[str, str]) -> tuple[int, bytes]:
    async with (
        asyncio.timeout(seconds),
        httpx.AsyncClient(headers=PLAIN | headers, timeout=seconds, trust_env=False) as client,
        client.stream("GET", url) as response,
    ):
        return response.status_code, await body(response, PAGE_BYTES)


# What one request gave, whichever entry answered it.


@dataclass
class Answer:
    """One request; times in seconds from the start of its run, None where unknown.

    item: its place in the workload. submitted: when it was sent, after waiting for its turn.
    prefill: the end of the first forward it was in, or the first piece of a streamed answer.
    first: when the first token of the final text could be shown. finished: when all was there.
    first_tokens: tokens there at `prefill`. text: what a reader gets. own_tokens: tokens as the
    entry itself counts them, its end token with it where it made one. forwards, rows: calls of the
    model that the request was in, and rows fed for it. attempts: tries that it took. error: why
    the last of them failed. counts: what its decoder counted, by name.
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


# What is believed of an OpenAI-compatible completion: each field is checked before it is used.

QUOTED = 300  # characters of an answer that cannot be used
ALLOWED_BYTES = 2**16  # of an answer, and for each token asked for:
ALLOWED_BYTES_A_TOKEN = 2**12  # a streamed one has about 300
# Text that is encoded again may have more tokens than were made, a broken character up to three.
ALLOWED_TOKENS_A_TOKEN = 4


def allowed_bytes(max_new_tokens: int) -> int:
    """The most bytes that an answer of so many tokens may have, streamed or whole."""
    return ALLOWED_BYTES + ALLOWED_BYTES_A_TOKEN * max_new_tokens


def read_whole(data: bytes, answer: Answer) -> None:
    """Fill in the text and count of an answer that came at once. Raises UnusableError."""
    values = _parse(data)
    text, own = _text(_choice(values, data), data), _completion_tokens(values, data)
    if text is None:
        raise UnusableError(f"an answer without text: {quote(data)}")
    _check_unicode(text)
    answer.text, answer.own_tokens = text, own


def read_pieces(pieces: list[tuple[float, bytes]], answer: Answer) -> None:
    """Fill in text, counts and times of a finished stream of server-sent events, given as lines
    with the times at which they came. Raises UnusableError."""
    texts: list[str] = []
    reason, own, done = None, None, False
    prefill = first = last = None
    for arrived, line in pieces:
        if line.startswith(b":"):  # a comment, sent to keep the connection alive
            continue
        if not line.startswith(b"data:"):
            raise UnusableError(f"expected a data line, got {quote(line)}")
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        values = _parse(data)
        found = _completion_tokens(values, data)
        own = own if found is None else found
        if values.get("choices") == []:  # the usage alone
            continue
        choice = _choice(values, data)
        # Even a piece without text says that the prompt has been read.
        prefill = arrived if prefill is None else prefill
        piece = _text(choice, data)
        if piece and first is None:
            first = arrived
        texts += [] if piece is None else [piece]
        reason = choice.get("finish_reason") or reason
        last = arrived
    # A connection that breaks looks like an end: only both together say that all is there.
    if reason is None or not done:
        raise UnusableError(f"the stream was cut short after {len(pieces)} lines")
    if not texts:
        raise UnusableError(f"an answer without text: {quote(pieces[0][1])}")
    text = "".join(texts)
    _check_unicode(text)
    answer.text, answer.own_tokens = text, own
    answer.prefill, answer.finished = prefill, last
    answer.first = first if first is not None else last
    answer.first_tokens = 1


def ignored_limit(answer: Answer, tokens: int, max_new_tokens: int) -> str | None:
    """How an answer shows that the longest answer was ignored, None where it does not. tokens: of
    its text, by the model's own tokenizer."""
    if answer.own_tokens is not None and answer.own_tokens > max_new_tokens:
        return f"ignored max_tokens: says {answer.own_tokens} tokens, asked for {max_new_tokens}"
    if tokens > ALLOWED_TOKENS_A_TOKEN * max_new_tokens:
        return f"ignored max_tokens: sent {tokens} tokens, asked for {max_new_tokens}"
    return None


def quote(data: bytes) -> str:
    """The beginning of what a server sent, in one printable line."""
    return one_line(data[:QUOTED].decode("utf-8", "backslashreplace"))


def parse_json(data: bytes) -> Any:
    """The value. Raises UnusableError."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"malformed JSON: {quote(data)}") from error


def _parse(data: bytes) -> dict[str, Any]:
    values = parse_json(data)
    if not isinstance(values, dict):
        raise UnusableError(f"expected a JSON object, got {quote(data)}")
    if "error" in values:
        raise UnusableError(f"the server says {quote(data)}")
    return values


def _choice(values: dict[str, Any], data: bytes) -> dict[str, Any]:
    choices = values.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnusableError(f"expected choices, got {quote(data)}")
    return choices[0]


def _text(choice: dict[str, Any], data: bytes) -> str | None:
    text = choice.get("text")
    if text is not None and not isinstance(text, str):
        raise UnusableError(f"text that is no string: {quote(data)}")
    return text


def _check_unicode(text: str) -> None:
    """Raise UnusableError for half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableError(f"text that is not Unicode: {error.reason}") from error


def _completion_tokens(values: dict[str, Any], data: bytes) -> int | None:
    usage = values.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if count is not None and (type(count) is not int or count < 0):
        raise UnusableError(f"completion_tokens must be a whole number, got {quote(data)}")
    return count


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
