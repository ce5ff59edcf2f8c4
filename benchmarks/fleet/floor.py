"""The time of a forward on a GPU that nobody has run it on: its floor."""

from __future__ import annotations

import math

from benchmarks.fleet.forward_time import ForwardTime
from benchmarks.model_size import GPUS, REST, size_of


def floor(model: str, gpu_name: str) -> ForwardTime:
    """What a forward of a shape of `benchmarks.shapes`, in bf16, takes at least by the GPU's data
    sheet (`benchmarks.model_size`): until so many rows the reading of the weights, from there on
    the arithmetic; the cached slots' reading is added to either. Python, launches and everything
    else that a real forward has are not in it."""
    size, gpu = size_of(model), GPUS[gpu_name]
    least = size.floor_ms(gpu, 1)
    rows = math.ceil(least / (1e3 * size.flops(1) / gpu.flops))  # from where arithmetic is longer
    return ForwardTime(
        kind="estimated floor",
        points=tuple((count, size.floor_ms(gpu, count)) for count in (1, rows, 2 * rows)),
        cached_ms=1e3 * REST * size.slot / gpu.bandwidth,
    )
