"""The application: `create_app` puts models behind OpenAI's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from decode.server import about_models, decoding, status
from decode.server.api_error import ApiError
from decode.server.served_model import ServedModel
from decode.server.settings import Settings


def create_app(models: Sequence[ServedModel], settings: Settings | None = None) -> FastAPI:
    """The application that serves these models; its end cancels what they decode and closes their
    engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for served in models:
            await served.engine.close(finish=False)

    # No pages of documentation: they load scripts from elsewhere.
    app = FastAPI(title="d2f-toolkit", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.models = {served.name: served for served in models}
    app.state.settings = settings or Settings()
    app.include_router(decoding.router)
    app.include_router(about_models.router)
    app.include_router(status.router)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
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
