"""Check the fields of requests: OpenAI's, some of vLLM's and this server's own. Errors have
OpenAI's format.

A field that is null counts as not given. Nothing is ignored silently: an unsupported field must
have the value that asks for nothing, and an unknown one is a 400.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

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

from d2f.config import explain
from d2f.errors import EngineClosedError, InputError, QueueFullError, RequestError, brief
from decode.decoders.session import MOST

RETRY_SECONDS = 1  # what a client is told to wait when the queue is full
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An error that a client is told: ``{"error": {"message", "type", "param", "code"}}``.

    param: the field that is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.message = brief(message)  # it may quote the client: one printable line
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else brief(param)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def as_api_error(error: Exception) -> ApiError | None:
    """Translate an error of the engine; None for a mistake of the server itself."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(429, f"{error}; try again", code="queue_full", headers=wait)
    if isinstance(error, EngineClosedError):
        return ApiError(503, f"the server is stopping: {error}", code="stopping")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took too long", code="timeout")
    if isinstance(error, RequestError):
        return ApiError(500, f"the request failed: {error}", code="failed")
    return None


MOST_FIELDS = 256  # of an object
MOST_STOPS = 32
LONGEST_STOP = 256  # characters

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Ids = Annotated[list[int], Field(fail_fast=True)]  # the first wrong one is enough

# The values that ask for nothing, by unsupported field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_json": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}


class Fields(BaseModel):
    """Fields that are checked as they are: no number is read from text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: Any, info: ValidationInfo) -> Any:
        """Drop null fields, and refuse what has too many elements before it looks at them."""
        if not isinstance(values, dict):
            return values
        if len(values) > MOST_FIELDS:
            raise ApiError(400, f"expected at most {MOST_FIELDS} fields, got {len(values)}")
        most = info.context["most"] if info.context else MOST
        for name, value in values.items():
            if isinstance(value, list) and len(value) > most:
                raise ApiError(
                    400,
                    f"{name}: expected at most {most} elements, as many as the context holds, got "
                    f"{len(value)}",
                    param=name,
                )
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Asked(Fields):
    """The fields of both endpoints. Others are options of the decoder, which checks them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None  # this and the next two change nothing in an answer
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    decoder: str | None = None
    events: bool = False

    @property
    def stops(self) -> tuple[str, ...] | None:
        """Return the stop strings; None where the field is not given."""
        if self.stop is None:
            return None
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionFields(Asked):
    prompt: str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None  # 0: with echo and logprobs

    @property
    def tops(self) -> int | None:
        """Likeliest tokens to list beside each log-probability, 0 or 1; None for no
        log-probabilities. Raises ApiError (400)."""
        if self.max_tokens == 0 and (not self.scored or self.stream):
            raise ApiError(
                400,
                "max_tokens: expected at least 1, got 0, which asks for the prompt's likelihoods "
                "alone: with echo and logprobs, and no stream",
                param="max_tokens",
            )
        return None if self.logprobs is None else _checked_tops("logprobs", self.logprobs)

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


class ChatFields(Asked):
    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def tops(self) -> int | None:
        """As `CompletionFields.tops`."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return _checked_tops("top_logprobs", self.top_logprobs or 0) if self.logprobs else None


def _checked_tops(field: str, tops: int) -> int:
    if tops > 1:
        raise ApiError(
            400,
            f"{field} must be at most 1, got {tops}: a decoder that decides many positions at once "
            "keeps the likeliest token of each",
            param=field,
        )
    return tops


Kind = TypeVar("Kind", bound=Fields)


def read_fields(kind: type[Kind], body: bytes, most: int) -> Kind:
    """Parse and check the JSON of a request.

    most: elements of a list. Lists and objects of more are refused before their elements are
    looked at, which would take long. Raises ApiError (400), which names the field.
    """
    try:
        values = json.loads(body, parse_constant=_refuse_constant)
        if not isinstance(values, dict):
            raise ApiError(400, f"the body must be a JSON object, got {type(values).__name__}")
        return _checked(kind, values, most)
    except RecursionError as error:
        raise ApiError(400, "the body is not JSON: it is nested too deep") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _checked(kind: type[Kind], values: dict[str, Any], most: int) -> Kind:
    given = {name: value for name, value in values.items() if value is not None}
    for name in [name for name in given if name in _NEUTRAL and name not in kind.model_fields]:
        if not any(_same(given[name], neutral) for neutral in _NEUTRAL[name]):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported")
        del given[name]
    try:
        return kind.model_validate(given, context={"most": most})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["loc"]
        field = str(first[0]) if first else None
        raise ApiError(400, explain(error, given, "request"), param=field) from error


def _same(given: Any, neutral: Any) -> bool:
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)
