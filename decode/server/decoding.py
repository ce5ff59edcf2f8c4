"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from decode.engine.prompts import Prompt
from decode.server.api_error import ApiError
from decode.server.disconnects import watched
from decode.server.fields import Asked, ChatFields, CompletionFields, read_fields
from decode.server.generation import Generation
from decode.server.openai_answers import Answers, ChatAnswers, CompletionAnswers
from decode.server.request_body import read_json
from decode.server.request_decoder import choose_decoder, likelihood_of
from decode.server.request_frame import Record
from decode.server.request_prompts import make_jobs
from decode.server.server_state import state_of
from decode.server.streaming import StreamedAnswer

SHORT = 1000  # characters, or ids, of all prompts of a request

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Text or ids go on; text is taken as it is, without a chat template."""
    asked = read_fields(CompletionFields, await read_json(request))
    generation = await _begin(request, asked, asked.prompts, "prompt", asked.max_tokens)
    echo = asked.prompts if asked.echo else None
    return await _answer(
        request, generation, CompletionAnswers(generation, asked.wanted, echo), asked
    )


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """An answer to messages, through the model's chat template."""
    asked = read_fields(ChatFields, await read_json(request))
    most = asked.max_completion_tokens
    if most is not None and asked.max_tokens not in (None, most):
        raise ApiError(
            400,
            f"max_tokens is {asked.max_tokens} and max_completion_tokens {most}: expected one",
            param="max_tokens",
        )
    messages = [message.plain() for message in asked.messages]
    generation = await _begin(request, asked, [messages], "messages", most or asked.max_tokens)
    return await _answer(request, generation, ChatAnswers(generation, asked.wanted), asked)


async def _begin(
    request: Request,
    asked: CompletionFields | ChatFields,
    prompts: Sequence[Prompt],
    field: str,
    most: int | None,
) -> Generation:
    """Check everything, then queue it. field: the one that the prompts came in."""
    state, record = state_of(request), Record.of(request)
    settings = state.settings
    if settings.log_prompts:
        record.prompts = prompts
    served = state.find(asked.model)
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    if asked.events and not asked.stream:
        raise ApiError(400, "events needs stream", param="events")
    wanted = asked.wanted
    scored = isinstance(asked, CompletionFields) and asked.scored
    kind = likelihood_of(served) if scored else None
    choices = len(prompts) * asked.n
    if choices > settings.most_choices:
        raise ApiError(
            400,
            f"expected at most {settings.most_choices} answers a request, prompts times n, got "
            f"{choices}",
            param="n" if asked.n > 1 else field,
        )
    decoder = choose_decoder(served, asked, most or None)
    if most == 0 and kind is not None:
        decoder, kind = kind, None  # there is nothing else to decode
    make = partial(make_jobs, served, prompts, decoder, field, fixed=most is not None)
    # A template may take long, and so may a long text: beside the event loop. The way there takes
    # longer than a short text.
    short = field == "prompt" and sum(map(len, prompts)) <= SHORT
    jobs = make() if short else await asyncio.to_thread(make)
    ids = [ids for ids, _ in jobs]
    generation = Generation(
        record.id,
        served,
        decoder,
        jobs,
        asked.n,
        ignore_eos=asked.ignore_eos,
        logprobs=wanted is not None,
        views=asked.events,
        scored=make_jobs(served, ids, kind, field, fixed=True) if kind is not None else (),
        began=record.began,
        seconds=settings.request_seconds,
    )
    record.generation = generation
    await generation.start()
    return generation


async def _answer(
    request: Request, generation: Generation, answers: Answers, asked: Asked
) -> Response:
    if asked.stream:
        return StreamedAnswer(generation, answers, asked, state_of(request).settings)
    with watched(request.receive, generation.leave):
        await generation.run()
    return JSONResponse(answers.whole())
