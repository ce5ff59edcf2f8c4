"""How the server is: /health, /ready, /metrics and /version."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

import d2f
from decode.server.api_error import ApiError
from decode.server.server_state import state_of

router = APIRouter()


@router.head("/health")  # what monitors ask
@router.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.head("/ready")
@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """Requests are taken: it is not stopping, and every engine runs."""
    if not await state_of(request).is_ready():
        raise ApiError(503, "the server takes no requests", code="not_ready")
    return {"status": "ready"}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await state_of(request).metrics_text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": d2f.__version__}
