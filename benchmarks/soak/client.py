"""One request as a client sends it, and how it ended."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.soak.plan import OK, Planned

TRIES = 200  # while the queue is full
SECONDS = 120.0  # until a request counts as lost
FULL = 429

End = Literal["answered", "refused", "left", "lost"]


@dataclass
class Outcome:
    """How a request ended. answered: to its end. refused: with the error that is expected. left:
    by the client, before the answer was whole. texts, reasons: of each choice, as far as they came.
    tries: 1, and one more for each refusal because the queue was full. why: it is lost."""

    number: int
    end: End = "lost"
    status: int | None = None
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    tries: int = 0
    why: str = ""


class _LostError(Exception):
    """What came is no answer; says why."""


async def send(client: httpx.AsyncClient, planned: Planned) -> Outcome:
    """Send one request until the queue has room for it, and read its answer."""
    outcome = Outcome(planned.number)
    while outcome.tries < TRIES:
        outcome.tries += 1
        try:
            async with asyncio.timeout(SECONDS):
                retry = await _leaving(client, planned, outcome)
        except (httpx.HTTPError, TimeoutError, _LostError) as error:
            outcome.why = f"{type(error).__name__}: {error}"
            return outcome
        if retry is None:
            return outcome
        await asyncio.sleep(retry)
    outcome.why = f"the queue was full {TRIES} times"
    return outcome


async def _leaving(client: httpx.AsyncClient, planned: Planned, outcome: Outcome) -> float | None:
    """`_try`, left at the time that is planned, which closes the connection."""
    if planned.leave is None:
        return await _try(client, planned, outcome)
    work = asyncio.ensure_future(_try(client, planned, outcome))
    done, _ = await asyncio.wait([work], timeout=planned.leave)
    if done:
        return work.result()
    work.cancel()
    await asyncio.wait([work])
    if outcome.end == "lost":  # it may have ended in this very moment
        outcome.end = "left"
    return None


async def _try(client: httpx.AsyncClient, planned: Planned, outcome: Outcome) -> float | None:
    """One try; the seconds to wait for the next one where the queue is full."""
    outcome.texts, outcome.reasons = {}, {}
    headers = {"content-type": "application/json"}
    async with client.stream(
        "POST", f"/v1/{planned.path}", content=planned.content, headers=headers
    ) as response:
        outcome.status = response.status_code
        if response.status_code == FULL:
            await response.aread()
            if "retry-after" not in response.headers:
                raise _LostError("429 without Retry-After")
            return float(response.headers["retry-after"])
        if response.status_code != planned.status:
            said = (await response.aread())[:300].decode("utf-8", "replace")
            raise _LostError(f"{response.status_code} in place of {planned.status}: {said}")
        if planned.status != OK:
            error = _parse(await response.aread()).get("error")
            if not isinstance(error, dict) or not error.get("message"):
                raise _LostError(f"an error that is not in OpenAI's format: {error}")
            outcome.end = "refused"
        elif not planned.stream:
            values = _parse(await response.aread())
            _take(values, outcome)
            outcome.end = "answered"
        else:
            await _read_stream(response, planned, outcome)
    return None


async def _read_stream(response: httpx.Response, planned: Planned, outcome: Outcome) -> None:
    pieces = 0
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            outcome.end = "answered"
            return
        _take(_parse(data), outcome)
        pieces += 1
        if pieces == planned.leave_pieces:
            outcome.end = "left"
            return
    raise _LostError(f"the stream ended after {pieces} pieces without [DONE]")


def _take(values: dict[str, Any], outcome: Outcome) -> None:
    """Add what a body or a piece of a stream says."""
    if "error" in values:
        raise _LostError(f"the server says {values['error']}")
    outcome.usage = values.get("usage") or outcome.usage
    for choice in values["choices"]:
        index = choice["index"]
        message = choice.get("message") or choice.get("delta") or {}
        text = choice.get("text") or message.get("content") or ""
        outcome.texts[index] = outcome.texts.get(index, "") + text
        if choice.get("finish_reason"):
            outcome.reasons[index] = choice["finish_reason"]


def _parse(data: bytes | str) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise _LostError(f"no JSON object: {data[:200]!r}") from error
