"""The application: `create_app` puts models behind OpenAI's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from decode.server import about_models, decoding, page_routes, status, tokenization
from decode.server.api_error import ApiError
from decode.server.metrics import Metrics
from decode.server.request_frame import ID_HEADER, RequestFrame
from decode.server.served_model import ServedModel
from decode.server.server_state import ServerState
from decode.server.settings import Settings


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
    for module in (decoding, about_models, tokenization):
        app.include_router(module.router)
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
    for module in (status, page_routes):
        app.include_router(module.router)
    app.mount("/page", StaticFiles(directory=page_routes.PAGE), name="page")
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
