"""/health, /ready and /version, and the page at /."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

import d2f

PAGE = Path(__file__).with_name("page")

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": d2f.__version__}


@router.get("/")
async def page() -> FileResponse:
    return FileResponse(PAGE / "index.html")
