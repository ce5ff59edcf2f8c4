"""python -m benchmarks.span_attention

Time of attention over spans in one layer, for LLaDA-8B's heads (32 over 32) and Dream-7B's (28 over
4), of dimension 128. Decoding: 16 to 128 rows of one block or of two over 512 to 4,096 cached keys,
forward; on a GPU in a CUDA graph, over caches that take turns, so that neither Python's launches
nor the L2 cache are measured. Training: a block-causal sample and a bidirectional one, forward and
backward.

    kernel   the Triton kernel; decoding only
    sdpa     scaled_dot_product_attention with a mask (`span_attention_reference`)
    flex     flex_attention, compiled, with the spans as its block mask, made beforehand
    flash    FlashAttention as PyTorch has it, where every row sees every key: it takes no mask

The kernel and flex_attention run on a GPU only; a CPU measures the others, by default at shorter
lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.row_file import RowFile
from benchmarks.timing import about, copies_beyond_cache, milliseconds, replayed_milliseconds
from d2f import spans as sp
from triton_kernels.flex import FlexSpans
from triton_kernels.span_attention import span_attention

HEADS = {"LLaDA-8B": (32, 32), "Dream-7B": (28, 4)}
DIM = 128
# Cached keys and lengths of training that are measured by default: on a GPU, on a CPU.
LARGE, SMALL = ([512, 2048, 4096], [1024, 4096]), ([512], [512])
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def decoding_spans(rows: int, cached: int, blocks: int = 2) -> Tensor:
    """One or two blocks that are being decoded: each sees what is cached, itself and what is
    before."""
    first = -(-rows // blocks)
    ends = [cached + first] * first + [cached + rows] * (rows - first)
    return torch.tensor([[[0, end]] for end in ends], dtype=torch.int32)


def ways(spans: Tensor, slots: int, device: str, dtype: torch.dtype) -> dict[str, Attention]:
    """Each way over these spans that runs here, from q ``[T, H, D]`` and k, v ``[H_kv, S, D]``."""
    where = spans.to(device)
    found: dict[str, Attention] = {
        "sdpa": lambda q, k, v: span_attention(q, k, v, where, kernel=False, check=False)
    }
    if device == "cuda":
        found["kernel"] = lambda q, k, v: span_attention(q, k, v, where, kernel=True, check=False)
        torch._dynamo.reset()  # a compiled shape stays in memory, and their number is limited
        found["flex"] = _batched(FlexSpans(where[None], slots))
    whole = bool((spans[..., 1] - spans[..., 0]).sum(1).eq(slots).all())
    if whole and (device != "cuda" or dtype.itemsize == 2):  # a GPU has none in fp32
        found["flash"] = _batched(_flash)
    return found


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _batched(attention: Attention) -> Attention:
    """From a batch of one to what the flat batch gives."""

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
    copies = (
        1 if train else copies_beyond_cache(2 * heads[1] * slots * DIM * dtype.itemsize, device)
    )
    caches = [
        [torch.randn(heads[1], slots, DIM, device=device).to(dtype) for _ in range(2)]
        for _ in range(copies)
    ]
    if not train:
        with torch.inference_mode():
            return {
                way: replayed_milliseconds(
                    lambda i, run=run: run(q, *caches[i]), copies, device, options.repeat
                )
                for way, run in ways(spans, slots, device, dtype).items()
            }
    inputs = [x.requires_grad_() for x in (q, *caches[0])]
    upstream = torch.randn_like(q)

    def step(run: Attention) -> None:
        torch.autograd.grad(run(*inputs), inputs, upstream)

    return {
        way: milliseconds(partial(step, run), device, options.repeat)
        for way, run in ways(spans, slots, device, dtype).items()
        if way != "kernel"
    }


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
    table = RowFile(options.json, about(options.dtype))

    def show(what: str, model: str, found: dict[str, float], **sizes: int) -> None:
        table.add({"what": what, "model": model, **sizes, **found})
        said = ", ".join(f"{size} {n}" for n, size in sizes.items())
        times = "".join(f"  {way} {ms:.3f}" for way, ms in found.items())
        print(f"{what:<14}{model:<10}{said:<36}{times}", flush=True)

    for model, heads in HEADS.items():
        for cached in options.cached:
            for rows in options.rows:
                for blocks in (1, 2):
                    spans = decoding_spans(rows, cached, blocks)
                    found = measure(heads, spans, cached + rows, False, options)
                    show("decoding", model, found, rows=rows, cached=cached, blocks=blocks)
        for length in options.lengths:
            for what, spans in (
                ("block-causal", sp.block_causal(length, length // 4, 32)),
                ("bidirectional", sp.bidirectional(length)),
            ):
                found = measure(heads, spans, length, True, options)
                show(what, model, found, positions=length)


if __name__ == "__main__":
    main()
