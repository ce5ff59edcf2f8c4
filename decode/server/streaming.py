"""Answers in pieces, as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse

from decode.server.api_error import ApiError
from decode.server.fields import Asked
from decode.server.forward_events import ForwardEvents
from decode.server.generation import Generation
from decode.server.openai_answers import Answers, as_json, usage


def stream_answer(
    generation: Generation, answers: Answers, asked: Asked, send_seconds: float
) -> EventSourceResponse:
    """The response. A client that leaves, or does not read for send_seconds, cancels it."""
    return EventSourceResponse(
        _lines(generation, answers, asked), sep="\n", send_timeout=send_seconds
    )


async def _lines(generation: Generation, answers: Answers, asked: Asked) -> AsyncIterator[bytes]:
    options = asked.stream_options
    with_usage = options is not None and options.include_usage
    always = options is not None and options.continuous_usage_stats
    forwards = ForwardEvents(generation) if asked.events else None

    def line(chunk: dict[str, Any], **more: Any) -> bytes:
        if always or (with_usage and not chunk["choices"]):
            more["usage"] = as_json(usage(generation))
        elif with_usage:
            more["usage"] = None
        return _event(chunk | more)

    opened = set()
    try:
        async with aclosing(generation.events()) as events:
            async for choice, event in events:
                if choice.index not in opened:
                    opened.add(choice.index)
                    first = answers.first(choice)
                    if first is not None:
                        yield line(first)
                text = choice.piece(event)
                if forwards is not None:
                    yield line(answers.chunk(choice, text), d2f=forwards.describe(choice, event))
                elif text or event.result is not None:
                    yield line(answers.chunk(choice, text))
    except ApiError as error:
        yield _event(error.content)
        return
    if with_usage:
        yield line(answers.last())
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    """One event; JSON has no line breaks."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
