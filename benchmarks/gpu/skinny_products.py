"""python -m benchmarks.gpu.skinny_products --shapes LLaDA-8B

Bytes a second of decoding's matrix products: few rows times each weight of a layer, and the output
head. What reads one input (q, k and v; gate and up) is measured as products of its own, one after
the other, and as one product with the weights joined, of which the others are views.

Weights take turns, so that none is found in the GPU's cache; on a GPU the products are in a CUDA
graph, so that their launches cost nothing. Counted are the weights' bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn.functional import linear
from transformers import PretrainedConfig

from benchmarks.row_file import RowFile
from benchmarks.shapes import SHAPES, default_shapes
from benchmarks.timing import about, copies_beyond_cache, replayed_milliseconds


def layers(config: PretrainedConfig) -> dict[str, tuple[int, list[int]]]:
    """Inputs, and outputs of each product, of what shares an input."""
    hidden, inner = config.hidden_size, config.intermediate_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "q, k, v": (hidden, [queries, keys, keys]),
        "o": (queries, [hidden]),
        "gate, up": (hidden, [inner, inner]),
        "down": (inner, [hidden]),
        "head": (hidden, [config.vocab_size]),
    }


@torch.inference_mode()
def measure(
    width: int, outputs: list[int], rows: int, dtype: torch.dtype, device: str, repeat: int
) -> dict[str, float]:
    """Microseconds and GB/s of a group's products apart and, where there are several, joined."""
    size = sum(outputs) * width * dtype.itemsize
    turns = copies_beyond_cache(size, device)
    joined = [torch.randn(sum(outputs), width, device=device, dtype=dtype) for _ in range(turns)]
    apart = [weight.split(outputs) for weight in joined]
    x = torch.randn(rows, width, device=device, dtype=dtype)
    ways: dict[str, Callable[[int], object]] = {
        "apart": lambda i: [linear(x, weight) for weight in apart[i]]
    }
    if len(outputs) > 1:
        ways["joined"] = lambda i: linear(x, joined[i])
    found = {}
    for way, run in ways.items():
        found[f"{way}, us"] = taken = 1e3 * replayed_milliseconds(run, turns, device, repeat)
        found[f"{way}, GB/s"] = size / taken / 1e3
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.skinny_products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cuda = torch.cuda.is_available()
    usual = default_shapes(dict.fromkeys(SHAPES, 0), "cuda" if cuda else "cpu")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=usual)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 256])
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device, dtype = "cuda" if cuda else "cpu", getattr(torch, options.dtype)
    facts = about(options.dtype)
    file = RowFile(options.json, facts)
    print(f"{facts['device']}, {options.dtype}, torch {facts['torch']}")
    for shape in options.shapes:
        for name, (width, outputs) in layers(SHAPES[shape]()).items():
            for rows in options.rows:
                found = measure(width, outputs, rows, dtype, device, options.repeat)
                file.add({"shape": shape, "products": name, "rows": rows, **found})
                said = "".join(f"  {what} {value:.1f}" for what, value in found.items())
                print(f"{shape:<10}{name:<10}{rows:>4} rows{said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
