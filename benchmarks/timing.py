"""Timing of a call on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], device: str, repeat: int) -> float:
    """Median of `repeat` calls after three that are not counted; on a GPU by its own clock."""
    for _ in range(3):
        run()
    if device != "cuda":
        times = []
        for _ in range(repeat):
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    for began, ended in pairs:
        began.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(began.elapsed_time(ended) for began, ended in pairs)
