"""The application: `create_app` puts models behind OpenAI's routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

import d2f
from d2f import chat
from d2f.errors import InputError
from d2f.tasks import DEFAULT_TASKS, make_problems
from decode.decoders.base import Option, options_of
from decode.engine.prompts import Prompt
from decode.server.answers import Answers, ChatAnswers, CompletionAnswers
from decode.server.generation import Generation, choose_decoder, likelihood_of, make_jobs
from decode.server.middleware import ID_HEADER, Record, RequestFrame, read_json
from decode.server.models import Kind, ServedModel, Settings
from decode.server.protocol import (
    ApiError,
    Asked,
    ChatFields,
    CompletionFields,
    Fields,
    Ids,
    Messages,
    read_fields,
)
from decode.server.state import Metrics, ServerState, state_of
from decode.server.stream import StreamedAnswer, watched

# /v1/completions and /v1/chat/completions.

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


# /v1/models: what is served, and with which decoders.

router_about_models = APIRouter()


@router_about_models.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All of them."""
    models = state_of(request).models.values()
    return {"object": "list", "data": [describe(served) for served in models]}


@router_about_models.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> dict[str, Any]:
    """One of them; a name may have slashes."""
    return describe(state_of(request).find(name))


def describe(served: ServedModel) -> dict[str, Any]:
    """OpenAI's fields, vLLM's max_model_len, and what is only ours (`d2f`)."""
    contract = served.model.contract
    card = Model(id=served.name, object="model", created=served.created, owned_by="d2f-toolkit")
    return card.model_dump(exclude_unset=True) | {
        "max_model_len": served.context_length,
        "d2f": {
            "family": contract.family,
            "objective": contract.objective,
            "block_size": contract.block_size,
            "end_ids": list(served.model.end_ids),
            "context_length": served.context_length,
            "default_decoder": next(
                name for name, kind in served.decoders.items() if kind is served.default
            ),
            "decoders": [
                _describe_decoder(served, name, kind) for name, kind in served.decoders.items()
            ],
        },
    }


def _describe_decoder(served: ServedModel, name: str, kind: Kind) -> dict[str, Any]:
    given = served.options(kind)
    return {
        "name": name,
        "summary": kind.summary,
        "labels": dict(kind.labels),
        "options": [_describe_option(option, given) for option in options_of(kind)],
    }


def _describe_option(option: Option, given: dict[str, Any]) -> dict[str, Any]:
    """An option; where the operator gave it, the default is his."""
    own = option.name in given
    default = given[option.name] if own else option.default
    kind = list(option.kind) if isinstance(option.kind, tuple) else option.kind.__name__
    return {
        "name": option.name,
        "kind": kind,
        "default": default,
        "shown": str(default) if own else option.shown,
        "help": option.help,
    }


# /tokenize, /detokenize and /tokenizer_info, as vLLM has them.

router_tokenization = APIRouter()


class _Tokenize(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class _Detokenize(Fields):
    model: str | None = None
    tokens: Ids


@router_tokenization.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids of a text, or of messages through the chat template. add_special_tokens: by default
    for a text, as its template writes those of messages."""
    asked = read_fields(_Tokenize, await read_json(request))
    served = _model(state_of(request), asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "expected one of prompt and messages", param="prompt")
    if not asked.add_generation_prompt:
        raise ApiError(
            400, "add_generation_prompt false is not supported", param="add_generation_prompt"
        )
    ids = await asyncio.to_thread(_ids, served, asked)
    tokenizer = _tokenizer(served)
    texts = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": served.context_length,
        "tokens": ids,
        "token_strs": texts,
    }


@router_tokenization.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """The text of ids, special tokens with it."""
    asked = read_fields(_Detokenize, await read_json(request))
    served = _model(state_of(request), asked.model)
    wrong = [token for token in asked.tokens if not 0 <= token < served.model.vocab_size]
    if wrong:
        raise ApiError(
            400,
            f"tokens must lie in [0, {served.model.vocab_size}), got {wrong[0]}",
            param="tokens",
        )
    return {"prompt": await asyncio.to_thread(_tokenizer(served).decode, asked.tokens)}


@router_tokenization.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """What the tokenizer is, its special tokens and its chat template."""
    served = _model(state_of(request), model)
    tokenizer = _tokenizer(served)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": served.model.vocab_size,
        "max_model_len": served.context_length,
        "chat_template": tokenizer.chat_template,
        **{
            name: getattr(tokenizer, name)
            for name in ("bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
        },
    }


def _model(state: ServerState, name: str | None) -> ServedModel:
    """The model of that name; where none is named, the first. Raises ApiError."""
    return next(iter(state.models.values())) if name is None else state.find(name)


def _tokenizer(served: ServedModel) -> Any:
    if served.model.tokenizer is None:
        raise ApiError(400, f"the model {served.name} has no tokenizer", param="model")
    return served.model.tokenizer


def _ids(served: ServedModel, asked: _Tokenize) -> list[int]:
    tokenizer = _tokenizer(served)
    try:
        if asked.messages is None:
            text, special = asked.prompt, asked.add_special_tokens is not False
        else:
            text = chat.render(tokenizer, [message.plain() for message in asked.messages])
            special = asked.add_special_tokens is True
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])
    except (InputError, ValueError, TypeError) as error:  # half of a surrogate pair, too
        field = "prompt" if asked.messages is None else "messages"
        raise ApiError(400, str(error), param=field) from error


# How the server is: /health, /ready, /metrics and /version.

router_status = APIRouter()


@router_status.head("/health")  # what monitors ask
@router_status.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router_status.head("/ready")
@router_status.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Requests are taken: it is not stopping, and every engine runs."""
    if not await state_of(request).is_ready():
        raise ApiError(503, "the server takes no requests", code="not_ready")
    return {"status": "ready"}


@router_status.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await state_of(request).metrics_text(), media_type=CONTENT_TYPE_LATEST)


@router_status.get("/version")
async def version() -> dict[str, str]:
    return {"version": d2f.__version__}


# The page at /, its files, and problems to try it with.

PAGE = Path(__file__).with_name("page")
EXAMPLES = 5  # problems a task

router_page_routes = APIRouter()


@router_page_routes.head("/")
@router_page_routes.get("/")
async def page() -> FileResponse:
    return FileResponse(PAGE / "index.html")


@router_page_routes.get("/examples")
def examples() -> list[dict[str, str]]:
    """Held-out problems of the tasks that the bundled models know."""
    return _examples()


@cache
def _examples() -> list[dict[str, str]]:
    return [
        {"task": task, "question": problem.question, "answer": problem.answer}
        for task in DEFAULT_TASKS
        for problem in make_problems(task, "heldout", EXAMPLES)
    ]


def create_app(models: Sequence[ServedModel], settings: Settings | None = None) -> FastAPI:
    """The application that serves these models; its end cancels what they decode and closes their
    engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await state.cancel()

    by_name = {served.name: served for served in models}
    state = ServerState(by_name, settings or Settings(), Metrics(by_name))
    app = new_app(state, lifespan)
    for part in (router, router_about_models, router_tokenization):
        app.include_router(part)
    return app


def new_app(
    state: ServerState, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastAPI:
    """An application with all that concerns no model: the frame around every request, errors, how
    the server is, and the page."""
    settings = state.settings
    # No pages of documentation: they load scripts from elsewhere.
    app = FastAPI(title="d2f-toolkit", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = state
    for part in (router_status, router_page_routes):
        app.include_router(part)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestFrame, state=state)
    if settings.cors_origins:  # around the frame: what a browser asks first bears no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", ID_HEADER],
            expose_headers=[ID_HEADER],
        )
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    return cast(ApiError, error).response()


async def _http_error(request: Request, error: Exception) -> Response:
    error = cast(HTTPException, error)
    said = {404: f"there is no {request.url.path}", 405: f"{request.method} is not for this path"}
    return ApiError(
        error.status_code,
        said.get(error.status_code, str(error.detail)),
        headers=error.headers,
    ).response()
