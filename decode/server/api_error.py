"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from d2f.errors import EngineClosedError, InputError, QueueFullError, brief

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
