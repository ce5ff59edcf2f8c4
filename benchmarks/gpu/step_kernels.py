"""python -m benchmarks.gpu.step_kernels --shape LLaDA-8B --rows 64 --cached 512 4096

Where the time of a decoding forward goes on a GPU: its time from the host's rows to the tokens on
the host beside its floor (`benchmarks.decode_step`), how many kernels it launches, how long these
compute, and the longest of them; as the model is, and after `model.compile()`. On a CPU, which has
no graph, the operators take the kernels' place.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import decode_step
from benchmarks.shapes import SHAPES, build, check_fits
from benchmarks.timing import about
from d2f.errors import InputError
from d2f.files import write_beside

LONGEST = 18  # kernels that are listed
MODELS = ("plain", "compiled")  # in this order: a compiled model stays so


def kernels_of(run: Callable[[], object], device: str) -> dict[str, tuple[int, float]]:
    """Calls and milliseconds of each kernel of a call, the longest first."""
    cuda = device == "cuda"
    activity, kind = (
        (ProfilerActivity.CUDA, DeviceType.CUDA) if cuda else (ProfilerActivity.CPU, DeviceType.CPU)
    )
    with profile(activities=[activity]) as recorded:
        run()
        if cuda:
            torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in recorded.events():
        if event.device_type == kind:
            calls, taken = found.get(event.name, (0, 0.0))
            own = event.device_time if cuda else event.self_cpu_time_total  # microseconds
            found[event.name] = calls + 1, taken + own / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.step_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", default="LLaDA-8B" if cuda else "small", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--cached", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device, dtype = "cuda" if cuda else "cpu", getattr(torch, options.dtype)
    most = max(options.cached)
    needed = decode_step.memory_needed(options.shape, dtype, options.rows, most, device)
    try:
        check_fits({options.shape: needed}, device)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    speed = decode_step.bandwidth(device)
    facts: dict[str, Any] = {**about(options.dtype), "bytes_per_second": speed}
    print(f"{facts['device']}, {options.dtype}, {speed / 1e9:.0f} GB/s, torch {facts['torch']}")
    model = build(options.shape, dtype, device)
    found: dict[str, list[dict[str, Any]]] = {"measured": [], "kernels": []}
    for way in [way for way in MODELS if way in options.models]:
        if way == "compiled":
            model.compile()
        for cached in options.cached:
            ways = decode_step.ours(model, options.rows, cached, device)
            run = ways["graph" if cuda else "eager"]
            floor = 1e3 * decode_step.bytes_needed(model, options.rows, cached) / speed
            taken = 1e3 * decode_step.seconds(run, device, options.repeat)
            kernels = kernels_of(run, device)
            sizes = {"model": way, "rows": options.rows, "cached": cached}
            calls = sum(calls for calls, _ in kernels.values())
            row = {
                "floor": floor, "ms": taken, "floors": taken / floor, "kernels": calls,
                "kernels a layer": calls / model.backbone.config.num_hidden_layers,
                "busy, ms": sum(ms for _, ms in kernels.values()),
            }  # fmt: skip
            found["measured"].append(sizes | row)
            print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                           for k, v in (sizes | row).items()), flush=True)  # fmt: skip
            for name, (count, ms) in list(kernels.items())[:LONGEST]:
                us = 1e3 * ms / count
                of_it = {"kernel": name[:90], "calls": count, "ms": ms, "us a call": us}
                found["kernels"].append(sizes | of_it)
                print(f"  {ms:8.3f} ms {count:5} x {us:7.2f} us  {name[:90]}", flush=True)
            if options.json is not None:
                write_beside(options.json, json.dumps({**facts, **found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
