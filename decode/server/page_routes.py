"""The page at /, its files, and problems to try it with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from d2f.tasks import DEFAULT_TASKS, make_problems

PAGE = Path(__file__).with_name("page")
EXAMPLES = 5  # problems a task

router = APIRouter()


@router.head("/")
@router.get("/")
async def page() -> FileResponse:
    return FileResponse(PAGE / "index.html")


@router.get("/examples")
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
