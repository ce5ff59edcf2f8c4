"""The fields of requests: OpenAI's, some of vLLM's, and this server's own.

A field that is null is not given. A field of theirs that is not supported is refused unless it has
the value that asks for nothing, and so is one that nobody knows: none is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from d2f.config import explain
from d2f.errors import EngineClosedError, InputError, QueueFullError, brief
from decode.decoders.base import MOST

# Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``.

RETRY_SECONDS = 1  # what a client is told to wait where the queue is full


class ApiError(Exception):
    """What a client is told in place of an answer. param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        # What it quotes came from outside: kept to what can be printed.
        self.message = brief(message)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else brief(param)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


def as_api_error(error: BaseException, *, param: str | None = None) -> ApiError:
    """What a client is told of an error of the engine's. param: the field that an InputError is
    of."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=param)
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(RETRY_SECONDS)}
        return ApiError(429, f"{error}; try again", code="queue_full", headers=wait)
    if isinstance(error, EngineClosedError):
        return ApiError(503, f"the server is stopping: {error}", code="stopping")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took too long", code="timeout")
    return ApiError(500, f"the request failed: {error}", code="failed")


MOST_FIELDS = 256  # of an object
MOST_STOPS = 32
LONGEST_STOP = 256  # characters

Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Count = Annotated[int, Field(ge=1, le=MOST)]
# Of a list of a million wrong ones the first is enough.
Ids = Annotated[list[int], Field(fail_fast=True)]

# What asks for nothing, of fields that are not supported.
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
    """What is checked as it is: no number is read from text."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


@dataclass(frozen=True)
class Wanted:
    """Log-probabilities that an answer is to have. top: whether the likeliest token is listed,
    too."""

    top: bool

    @staticmethod
    def of(field: str, tops: int) -> Wanted:
        """Those of so many tokens a position. Raises ApiError (400)."""
        if tops > 1:
            raise ApiError(
                400,
                f"{field} must be at most 1, got {tops}: a decoder that decides many positions at "
                "once keeps the likeliest token of each",
                param=field,
            )
        return Wanted(tops == 1)


class Asked(Fields):
    """What both endpoints take. Other fields are options of the decoder, which it checks."""

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
        """The stop strings, None where the field is not given."""
        if self.stop is None:
            return None
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionFields(Asked):
    prompt: str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MOST)] | None = None  # 0: with echo and logprobs

    @property
    def wanted(self) -> Wanted | None:
        """The log-probabilities that are asked for. Raises ApiError."""
        if self.max_tokens == 0 and (not self.scored or self.stream):
            raise ApiError(
                400,
                "max_tokens: expected at least 1, got 0, which asks for the prompt's likelihoods "
                "alone: with echo and logprobs, and no stream",
                param="max_tokens",
            )
        if self.logprobs is None:
            return None
        return Wanted.of("logprobs", self.logprobs)

    @property
    def scored(self) -> bool:
        """Whether the likelihoods of the prompts are asked for."""
        return self.echo and self.logprobs is not None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, as a list."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if alone or not prompt else prompt


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

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
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
    def wanted(self) -> Wanted | None:
        """The log-probabilities that are asked for. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return Wanted.of("top_logprobs", self.top_logprobs or 0) if self.logprobs else None


Kind = TypeVar("Kind", bound=Fields)


def read_fields(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """The fields of a request's JSON. Raises ApiError (400), which names the field."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in [name for name in given if name in _NEUTRAL and name not in kind.model_fields]:
        if not any(_same(given[name], neutral) for neutral in _NEUTRAL[name]):
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported")
        del given[name]
    given = _without_null(given)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["loc"]
        field = str(first[0]) if first else None
        raise ApiError(400, explain(error, given, "request"), param=field) from error


def _without_null(value: Any) -> Any:
    """Objects within objects without their null fields. Raises ApiError (400) for one that has more
    than anyone means: to list what is wrong with each takes long."""
    if isinstance(value, dict):
        if len(value) > MOST_FIELDS:
            raise ApiError(400, f"expected at most {MOST_FIELDS} fields, got {len(value)}")
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_null(one) for one in value]
    return value


def _same(given: Any, neutral: Any) -> bool:
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)
