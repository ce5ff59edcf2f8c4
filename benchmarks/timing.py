"""Timing of a call on a device, and what the device is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def about(dtype: str) -> dict[str, Any]:
    """What a benchmark's numbers were measured on."""
    import triton

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if cuda
        else f"cpu, {torch.get_num_threads()} threads",
        "dtype": dtype,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


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
