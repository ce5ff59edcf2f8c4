"""The lines and the file of `python -m benchmarks.decode_step --count`.

What is assumed of the GPU: that each launch reads and writes at the speed at which memory is
copied, whatever its size, and that the gap holds all that this leaves out: the last blocks of one
launch draining, the first loads of the next arriving. Not counted: the copies in and out, and the
choice of the tokens from the logits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.forward_count import Gpu, Launch, bytes_needed, count
from benchmarks.shapes import build
from d2f.files import write_beside

AIM = 1.25  # times the floor


def report(
    shapes: Sequence[str],
    rows: Sequence[int],
    cached: Sequence[int],
    dtype: torch.dtype,
    gpu: Gpu,
    path: Path | None,
) -> None:
    """Count and print each size, and a middle layer's launches of the first; all of it to `path`.
    The floor is `bytes_needed` at the memory's speed."""
    print(
        f"counted, not measured: {dtype}, {gpu.bytes_per_second / 1e9:.0f} GB/s, "
        f"{gpu.flops_per_second / 1e12:.0f} TFLOP/s, {1e6 * gpu.gap:.1f} us between launches"
    )
    table: list[dict[str, Any]] = []
    for shape in shapes:
        model = build(shape, dtype, "meta")
        for slots in cached:
            for size in rows:
                floor = bytes_needed(model, size, slots)
                ways = count(model, size, slots)
                print(
                    f"{shape}, {size} rows on {slots}: floor {floor / 1e9:.2f} GB, "
                    f"{1e3 * floor / gpu.bytes_per_second:.2f} ms"
                )
                found = {}
                for way, launches in ways.items():
                    moved = sum(launch.bytes for launch in launches)
                    took = gpu.seconds(launches)
                    print(
                        f"  {way:<9}{len(launches):>5} launches, {moved / 1e9:.2f} GB "
                        f"({moved / floor:.2f}), {1e3 * took:.2f} ms "
                        f"({took * gpu.bytes_per_second / floor:.2f}); {AIM} times the floor up "
                        f"to {1e6 * _widest_gap(launches, floor, gpu):.1f} us between launches"
                    )
                    found[way] = {
                        "milliseconds": 1e3 * took,
                        "launches": [
                            {"name": x.name, "bytes": x.bytes, "flops": x.flops} for x in launches
                        ],
                    }
                if not table:
                    for way, launches in ways.items():
                        _print_layer(way, layer(launches), gpu)
                sizes = {"shape": shape, "rows": size, "cached": slots, "floor_bytes": floor}
                table.append({**sizes, **found})
    if path is not None:
        kept = {"dtype": str(dtype), **dataclasses.asdict(gpu), "counted": table}
        write_beside(path, json.dumps(kept) + "\n")


def layer(launches: Sequence[Launch]) -> list[Launch]:
    """Those of the second layer, from after its attention to the next one's."""
    ends = [i for i, launch in enumerate(launches) if launch.name == "write"]
    return list(launches[ends[1] + 1 : ends[2] + 1])


def _widest_gap(launches: Sequence[Launch], floor: int, gpu: Gpu) -> float:
    """The seconds between launches with which the forward takes `AIM` times its floor; below 0
    where it takes more even without any."""
    without = dataclasses.replace(gpu, gap=0.0).seconds(launches)
    return (AIM * floor / gpu.bytes_per_second - without) / len(launches)


def _print_layer(way: str, launches: Sequence[Launch], gpu: Gpu) -> None:
    print(f"  a layer {way}: {len(launches)} launches, {1e6 * gpu.seconds(launches):.0f} us")
    for launch in launches:
        flops = f"{launch.flops / 1e9:9.2f} GFLOP" if launch.flops else ""
        print(f"    {launch.bytes / 1e6:9.3f} MB{flops:<16}  {launch.name}")
