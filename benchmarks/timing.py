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


def replayed_milliseconds(
    run: Callable[[int], object], copies: int, device: str, repeat: int
) -> float:
    """Milliseconds of a call that may take microseconds: run(0) to run(copies - 1) one after the
    other, the median of `repeat` times, divided by `copies`. On a GPU they are one CUDA graph, so
    Python's launches are not timed."""

    def once() -> None:
        for i in range(copies):
            run(i)

    if device != "cuda":
        return milliseconds(once, device, repeat) / copies
    once()  # compiles what a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return milliseconds(graph.replay, device, repeat) / copies


def copies_beyond_cache(size: int, device: str) -> int:
    """Copies of `size` bytes that a GPU's L2 cache does not hold, so that each is read from memory
    when they take turns; two on a CPU."""
    if device != "cuda":
        return 2
    return max(3, 1 + 4 * torch.cuda.get_device_properties(device).L2_cache_size // size)
