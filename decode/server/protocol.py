"""Check the fields of requests: OpenAI's, some of vLLM's and this server's own. Errors have
OpenAI's format.

A field that is null counts as not given. Nothing is ignored silently: an unsupported field must
have the value that asks for nothing, and an unknown one is a 400.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from fastapi.responses import JSONResponse
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from d2f.config import explain
from d2f.errors import EngineClosedError, InputError, QueueFullError, RequestError, brief
from decode.decoders.session import MOST

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_CLOSE = {"Connection": "close"}
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: _CLOSE,  # what is left of the body is not read
    413: _CLOSE,
    429: {"Retry-After": "1"},
    503: _CLOSE,
}


class ApiError(HTTPException):
    """Tell a client of an error: ``{"error": {"message", "type", "param", "code"}}``. param: the
    field that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        said = brief(message)  # it may quote the client: one printable line
        super().__init__(status, said, _HEADERS.get(status))
        self.code = code
        kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        param = None if param is None else brief(param)
        self.content = {"error": {"message": said, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status_code, self.headers)


# The errors of an engine: their status, OpenAI's code, and what is said.
_ERRORS: dict[type[Exception], tuple[int, str | None, str]] = {
    InputError: (400, None, "{}"),
    QueueFullError: (429, "queue_full", "{}; try again"),
    EngineClosedError: (503, "stopping", "the server is stopping: {}"),
    TimeoutError: (504, "timeout", "the request took too long"),
    RequestError: (500, "failed", "the request failed: {}"),
}


def as_api_error(error: Exception) -> ApiError | None:
    """Translate an error of the engine; None for a mistake of the server itself."""
    if isinstance(error, ApiError):
        return error
    for kind, (status, code, text) in _ERRORS.items():
        if isinstance(error, kind):
            return ApiError(status, text.format(error), code=code)
    return None


@contextmanager
def blaming(param: str, before: str = "") -> Iterator[None]:
    """Raise an InputError as the ApiError of a field. before: begins its message."""
    try:
        yield
    except InputError as error:
        raise ApiError(400, f"{before}{error}", param=param) from error


MOST_FIELDS = 200
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Tops = Annotated[int, Field(ge=0, le=1)]  # a decoder keeps no more than the likeliest token
Ids = Annotated[list[int], Field(fail_fast=True)]  # the first wrong one is enough

# The values that ask for nothing, of unsupported fields.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "min_p", "min_tokens", "presence_penalty"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "repetition_penalty"), (1,)),
    **dict.fromkeys(("store", "use_beam_search"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("functions", "tools"), ([],)),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
    **dict.fromkeys(("function_call", "tool_choice"), ("none", "auto")),
    **dict.fromkeys(("guided_json", "prompt_logprobs"), ()),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}


class Fields(BaseModel):
    """Check fields as they are: no number is read from text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any, info: ValidationInfo) -> Any:
        """Drop null fields, and refuse too many fields or elements of a list before they are
        checked one by one, which would take long."""
        if not isinstance(values, dict):
            return values
        if len(values) > MOST_FIELDS:
            raise ValueError(f"expected at most {MOST_FIELDS} fields, got {len(values)}")
        most = info.context["most"] if info.context else MOST
        for name, value in values.items():
            if isinstance(value, list) and len(value) > most:
                what = f"{name}: expected at most {most} elements, as many as the context holds"
                raise ApiError(400, f"{what}, got {len(value)}", param=name)
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextRequest(Fields):
    """Check the fields of both endpoints. Others are options of the decoder, which checks them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=32)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None  # this and the next two change nothing in an answer
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    decoder: str | None = None
    events: bool = False

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        for name in ("stream_options", "events"):
            if getattr(self, name) and not self.stream:
                raise ApiError(400, f"{name} needs stream", param=name)
        return self


class CompletionRequest(TextRequest):
    prompt: str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)]
    echo: bool = False
    logprobs: Tops | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None  # 0: with echo and logprobs

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens == 0 and (not self.scored or self.stream):
            raise ApiError(
                400,
                "max_tokens: expected at least 1, got 0, which asks for the prompt's likelihoods "
                "alone: with echo and logprobs, and no stream",
                param="max_tokens",
            )
        return self

    @property
    def tops(self) -> int | None:
        """Count the likeliest tokens to list beside each log-probability; None without any."""
        return self.logprobs

    @property
    def scored(self) -> bool:
        """Tell whether the likelihoods of the prompts are asked for."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """List the prompt or prompts."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if alone or not prompt else prompt


_OTHER_PARTS = {"image_url": "images", "input_audio": "sounds", "file": "files"}


class TextPart(Fields):
    type: Literal["text"]
    text: str


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    # An answer of OpenAI's that is sent back has them empty.
    annotations: Annotated[list[Any], Field(max_length=0)] = []
    tool_calls: Annotated[list[Any], Field(max_length=0)] = []

    @field_validator("content", mode="before")
    @classmethod
    def _refuse_other_kinds(cls, content: Any) -> Any:
        """Say one thing of a part that is no text, in place of all that is wrong with it."""
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _OTHER_PARTS:
                raise ValueError(f"{_OTHER_PARTS[kind]} are not supported")
        return content

    def plain(self) -> dict[str, str]:
        """Return the message as a chat template takes it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class ChatRequest(TextRequest):
    scored: ClassVar[bool] = False  # of completions alone: likelihoods of the prompt

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Tops | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        one, other = self.max_tokens, self.max_completion_tokens
        if None not in (one, other) and one != other:
            raise ApiError(
                400,
                f"max_tokens is {one} and max_completion_tokens {other}: expected one",
                param="max_tokens",
            )
        self.max_tokens = one or other
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return self

    @property
    def tops(self) -> int | None:
        """Count the likeliest tokens to list beside each log-probability; None without any."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """List the one prompt: the messages."""
        return [[message.plain() for message in self.messages]]


AnyRequest = CompletionRequest | ChatRequest
Kind = TypeVar("Kind", bound=Fields)


def read_fields(kind: type[Kind], body: bytes, most: int) -> Kind:
    """Parse and check the JSON of a request. Raises ApiError (400), which names the field.

    most: elements of a list.
    """
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"the body must be a JSON object, got {type(values).__name__}")
    for name in values.keys() & _NEUTRAL.keys() - kind.model_fields.keys():
        value, neutral = values.pop(name), (None, *_NEUTRAL[name])
        if not any(value == one and type(value) in (type(one), float) for one in neutral):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported")
    try:
        return kind.model_validate(values, context={"most": most})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["loc"]
        field = str(first[0]) if first else None
        raise ApiError(400, explain(error, values, "request"), param=field) from error
