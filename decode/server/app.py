"""Put models behind OpenAI's routes: `create_app`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

import d2f
from d2f.tasks import DEFAULT_TASKS, make_problems
from decode.decoders.base import options_of
from decode.server.answers import Answers, StreamedAnswer
from decode.server.generation import (
    Generation,
    choose_decoder,
    encode_prompt,
    likelihood_of,
    make_jobs,
)
from decode.server.middleware import ID_HEADER, Record, RequestFrame
from decode.server.models import Kind, ServedModel
from decode.server.options import Options
from decode.server.protocol import (
    AnyRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Fields,
    Ids,
    Messages,
    blaming,
    read_fields,
)
from decode.server.state import ServerState, state_of

PAGE = Path(__file__).with_name("page")
EXAMPLES = 5  # problems a task
LARGE_BODY = 100_000  # bytes that take long enough to hold up others

router = APIRouter()
Found = TypeVar("Found")
Asked = TypeVar("Asked", bound=Fields)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """Continue text or ids, which are taken as they are, without a chat template."""
    return await _answer(request, await _read(CompletionRequest, request), "prompt")


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """Answer messages, through the model's chat template."""
    return await _answer(request, await _read(ChatRequest, request), "messages")


async def _read(kind: type[Asked], request: Request) -> Asked:
    """Read and check the fields of a request. Raises ApiError: 415 for another type than JSON or a
    packed body, 413 for a large one (not read to its end), 408 for a slow one, 400 as
    `read_fields`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # which a form of another site's page cannot send
        raise ApiError(415, f"expected Content-Type application/json, got {content_type or 'none'}")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":  # the limit would not bound what it unpacks to
        raise ApiError(415, f"expected no Content-Encoding, got {coding}")
    state = state_of(request)
    most, seconds = state.most_body, state.options.body_timeout
    too_large = ApiError(413, f"the body has more than {most} bytes (the server's --max-body)")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds") from error
    read = partial(read_fields, kind, bytes(body), state.most_elements)
    return read() if len(body) < LARGE_BODY else await asyncio.to_thread(read)


async def _prepare(request: Request, asked: AnyRequest, field: str) -> Generation:
    """Check everything, and encode the prompts."""
    record: Record = request.scope["d2f.record"]
    state, prompts = state_of(request), asked.prompts
    options = state.options
    if options.log_prompts:
        record.prompts = prompts
    served = state.find(asked.model)
    scorer = likelihood_of(served) if asked.scored else None
    choices = len(prompts) * asked.n
    most = min(options.max_choices, options.max_batch + options.max_waiting)
    if choices > most:
        raise ApiError(
            400,
            f"expected at most {most} answers a request, prompts times n, got {choices}",
            param="n" if asked.n > 1 else field,
        )
    decoder = choose_decoder(served, asked)
    if asked.max_tokens == 0 and scorer is not None:
        decoder, scorer = scorer, None  # there is nothing else to decode
    fixed = asked.max_tokens is not None
    make = partial(make_jobs, served, prompts, decoder, field, fixed=fixed)
    jobs = await beside(request, served, make)
    ids = [ids for ids, _ in jobs]
    record.generation = Generation(
        record.id,
        served,
        asked,
        decoder,
        jobs,
        scored=() if scorer is None else make_jobs(served, ids, scorer, field, fixed=True),
        began=record.began,
        limit=options.request_timeout,
    )
    return record.generation


async def _answer(request: Request, asked: AnyRequest, field: str) -> Response:
    """Queue it, and wait for its answers, or stream them. field: the one of the prompts."""
    generation = await _prepare(request, asked, field)
    answers = Answers(generation, asked)
    if asked.stream:
        response = StreamedAnswer(answers, state_of(request).options)
        generation.start(response.take)
        return response
    generation.start()
    await unless_gone(request, generation.run())
    return JSONResponse(answers.whole())


async def beside(request: Request, served: ServedModel, work: Callable[[], Found]) -> Found:
    """Do a model's work of preparation beside the event loop, one at a time; the turn of a client
    that has left is skipped."""
    loop = asyncio.get_running_loop()
    return await unless_gone(request, loop.run_in_executor(served.preparing, work))


async def unless_gone(request: Request, work: Awaitable[Found]) -> Found:
    """Wait for work, and cancel it once the client has left. Raises ClientDisconnect then."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watcher = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        watcher.cancel()
        if working.cancel():
            await asyncio.wait({working})


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    models = state_of(request).models.values()
    return {"object": "list", "data": [describe(served) for served in models]}


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> dict[str, Any]:
    """Describe one model; a name may have slashes."""
    return describe(state_of(request).find(name))


def describe(served: ServedModel) -> dict[str, Any]:
    """Describe a model by OpenAI's fields, vLLM's max_model_len, and our own under `d2f`."""
    contract = served.model.contract
    return {
        "id": served.name,
        "created": served.created,
        "object": "model",
        "owned_by": "d2f-toolkit",
        "max_model_len": served.context_length,
        "d2f": {
            "family": contract.family,
            "objective": contract.objective,
            "block_size": contract.block_size,
            "end_ids": list(served.model.end_ids),
            "context_length": served.context_length,
            "default_decoder": next(iter(served.decoders)),
            "decoders": [
                {
                    "name": name,
                    "summary": kind.summary,
                    "labels": dict(kind.labels),
                    "options": _describe_options(served, kind),
                }
                for name, kind in served.decoders.items()
            ],
        },
    }


def _describe_options(served: ServedModel, kind: Kind) -> list[dict[str, Any]]:
    """Describe a decoder's options; defaults that the operator gave are the operator's."""
    given = served.options(kind)
    return [
        {
            "name": option.name,
            "kind": option.kind.__name__ if isinstance(option.kind, type) else [*option.kind],
            "default": given.get(option.name, option.default),
            "shown": str(given[option.name]) if option.name in given else option.shown,
            "help": option.help,
        }
        for option in options_of(kind)
    ]


class _Tokenize(Fields):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False


class _Detokenize(Fields):
    model: str | None = None
    tokens: Ids


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Encode a text, or messages through the chat template, as vLLM does.

    add_special_tokens: by default for a text; the template writes those of messages.
    """
    asked = await _read(_Tokenize, request)
    served = state_of(request).find(asked.model)
    tokenizer = _tokenizer(served)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "expected one of prompt and messages", param="prompt")
    ids = await beside(request, served, partial(_ids, served, asked))
    texts = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": served.context_length,
        "tokens": ids,
        "token_strs": texts,
    }


def _ids(served: ServedModel, asked: _Tokenize) -> list[int]:
    field, chat = ("prompt", False) if asked.messages is None else ("messages", True)
    prompt: Any = asked.prompt or [message.plain() for message in asked.messages or []]
    with blaming(field):
        ids = encode_prompt(served, prompt, field)
    special = asked.add_special_tokens
    if special is None or special != chat:
        return ids
    tokenizer = _tokenizer(served)
    if chat:
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(prompt, add_special_tokens=special)["input_ids"])


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """Decode ids, special tokens with them."""
    asked = await _read(_Detokenize, request)
    served = state_of(request).find(asked.model)
    size = served.model.vocab_size
    wrong = next((token for token in asked.tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise ApiError(400, f"tokens must lie in [0, {size}), got {wrong}", param="tokens")
    return {"prompt": str(_tokenizer(served).decode(asked.tokens))}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> dict[str, Any]:
    """Describe the tokenizer: its class, its special tokens and its chat template."""
    served = state_of(request).find(model)
    tokenizer = _tokenizer(served)
    names = ("chat_template", "bos_token", "eos_token", "pad_token", "unk_token", "mask_token")
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": served.model.vocab_size,
        "max_model_len": served.context_length,
        **{name: getattr(tokenizer, name) for name in names},
    }


def _tokenizer(served: ServedModel) -> Any:
    if served.model.tokenizer is None:
        raise ApiError(400, f"the model {served.name} has no tokenizer", param="model")
    return served.model.tokenizer


@router.head("/health")  # what monitors ask
@router.get("/health")
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@router.head("/ready")
@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Say whether requests are taken: the server is not stopping, and every engine runs."""
    if not state_of(request).ready:
        raise ApiError(503, "the server takes no requests", code="not_ready")
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = generate_latest(state_of(request).metrics.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": d2f.__version__}


@router.head("/")
@router.get("/")
async def page() -> FileResponse:
    return FileResponse(PAGE / "index.html")


@router.get("/examples")
def examples() -> list[dict[str, str]]:
    """List held-out problems of the tasks that the bundled models know."""
    return [
        {"task": task, "question": problem.question, "answer": problem.answer}
        for task in DEFAULT_TASKS
        for problem in make_problems(task, "heldout", EXAMPLES)
    ]


def create_app(models: Sequence[ServedModel], options: Options | None = None) -> FastAPI:
    """Make the application that serves these models. Its end cancels what they decode and closes
    their engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await state.cancel()

    state = ServerState({served.name: served for served in models}, options or Options())
    # No pages of documentation: they load scripts from elsewhere.
    app = FastAPI(title="d2f-toolkit", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = state
    app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(RequestFrame, state=state)
    if state.options.cors_origin:  # around the frame: what a browser asks first bears no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.options.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", ID_HEADER],
            expose_headers=[ID_HEADER],
        )
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Put starlette's errors, as of a path that is none, into OpenAI's format."""
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    said = f"{request.method} {request.url.path}: {error.detail}"
    answer = ApiError(error.status_code, said).response()
    answer.headers.update(error.headers or {})
    return answer
