"""A measurement in a process of its own, so that its memory is its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch


def in_fresh_process(
    measure: Callable[..., dict[str, Any]], *arguments: Any
) -> dict[str, Any] | None:
    """What measure(*arguments) returns, None where the GPU's memory did not suffice.

    Raises RuntimeError where the process was killed or failed.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_serve, args=(results, measure, arguments))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{arguments[0]}: its process ended with status {process.exitcode}")
    found: dict[str, Any] | None = results.get()
    return found


def _serve(results: Any, measure: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        results.put(measure(*arguments))
    except torch.cuda.OutOfMemoryError:
        results.put(None)
