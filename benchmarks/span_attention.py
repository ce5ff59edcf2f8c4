"""python -m benchmarks.span_attention

Time of attention over spans in one layer, for LLaDA-8B's heads (32 over 32) and Dream-7B's (28 over
4), of dimension 128. Decoding: 16 to 128 rows over 512 to 4,096 cached keys, forward. Training:
block-causal samples, forward and backward. Beside the kernel, what PyTorch has:

    sdpa     scaled_dot_product_attention with a mask (`span_attention_reference`)
    flex     flex_attention, compiled, with the spans as its block mask, made beforehand

The kernel and flex_attention run on a GPU only; elsewhere sdpa alone is measured, by default at
shorter lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import about, milliseconds
from d2f import spans as sp
from d2f.files import write_beside
from triton_kernels.flex import FlexSpans
from triton_kernels.span_attention import span_attention

HEADS = {"LLaDA-8B": (32, 32), "Dream-7B": (28, 4)}
DIM = 128
# Cached keys and lengths of training that are measured by default: on a GPU, on a CPU.
LARGE, SMALL = ([512, 2048, 4096], [1024, 4096]), ([512], [512])


def decoding_spans(rows: int, cached: int) -> Tensor:
    """Two blocks that are being decoded: each sees what is cached, itself and what is before."""
    half = -(-rows // 2)
    ends = [cached + half] * half + [cached + rows] * (rows - half)
    return torch.tensor([[[0, end]] for end in ends], dtype=torch.int32)


def flex(spans: Tensor, slots: int, device: str) -> Callable[..., Tensor]:
    """flex_attention over these spans, from q ``[T, H, D]`` and k, v ``[H_kv, S, D]``."""
    attention = FlexSpans(spans.to(device)[None], slots)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(0, 1)[None], k[None], v[None])[0].transpose(0, 1)

    return run


def measure(
    heads: tuple[int, int], spans: Tensor, slots: int, train: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Median milliseconds of each way."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    q = torch.randn(len(spans), heads[0], DIM, device=device).to(dtype)
    k, v = (torch.randn(heads[1], slots, DIM, device=device).to(dtype) for _ in range(2))
    where = spans.to(device)
    ways: dict[str, Callable[..., Tensor]] = {
        "sdpa": lambda *x: span_attention(*x, where, kernel=False, check=False)
    }
    if device == "cuda":
        ways["kernel"] = lambda *x: span_attention(*x, where, kernel=True, check=False)
        ways["flex"] = flex(spans, slots, device)
    if train:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    upstream = torch.randn_like(q)

    def once(way: str) -> None:
        out = ways[way](q, k, v)
        if train:
            torch.autograd.grad(out, (q, k, v), upstream)

    return {way: milliseconds(partial(once, way), device, options.repeat) for way in ways}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128])
    cached, lengths = LARGE if cuda else SMALL
    parser.add_argument("--cached", type=int, nargs="+", default=cached)
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="of training")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    name = torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads"
    print(f"{name}, {options.dtype}, torch {torch.__version__}; ms")
    table: list[dict[str, Any]] = []

    def show(what: str, model: str, found: dict[str, float], **sizes: int) -> None:
        table.append({"what": what, "model": model, **sizes, **found})
        said = ", ".join(f"{size} {n}" for n, size in sizes.items())
        times = "".join(f"  {way} {ms:.3f}" for way, ms in found.items())
        print(f"{what:<9}{model:<10}{said:<26}{times}", flush=True)

    for model, heads in HEADS.items():
        for cached in options.cached:
            for rows in options.rows:
                spans = decoding_spans(rows, cached)
                found = measure(heads, spans, cached + rows, False, options)
                show("decoding", model, found, rows=rows, cached=cached)
        for length in options.lengths:
            spans = sp.block_causal(length, length // 4, 32)
            found = measure(heads, spans, length, True, options)
            show("training", model, found, positions=length)
    if options.json is not None:
        found = {**about(options.dtype), "measured": table}
        write_beside(options.json, json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
