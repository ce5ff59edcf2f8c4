"""python -m benchmarks.kernels attention|loss|confidence

Time each Triton kernel beside its plain reference and beside what PyTorch and others have. On a GPU
decoding's calls run in a CUDA graph over inputs that take turns, so that neither Python's launches
nor the L2 cache are measured; a CPU measures the plain ways at smaller sizes.

attention: one layer of LLaDA-8B's heads (32 over 32) and Dream-7B's (28 over 4), dimension 128.
Decoding: rows of one block or of two over cached keys. Training: forward and backward.
    kernel   the Triton kernel; decoding only
    sdpa     scaled_dot_product_attention with a mask (`span_attention_reference`)
    flex     flex_attention, compiled, with the spans as its block mask, made beforehand
    flash    FlashAttention as PyTorch has it, where every row sees every key

loss: the distillation loss, forward and backward, each way in a process of its own; the peak is
what it allocated beyond its inputs.
    plain    from all logits at once
    chunked  `masked_linear_kl` in PyTorch
    kernel   the same with its kernel, on a GPU
    liger    Liger's chunked JSD with beta 0, where liger-kernel is installed

confidence: from hidden states to token and confidence of each row.
    head     the linear layer alone
    plain    and `confidence_reference` on its logits
    kernel   and the kernel
    sampled  and the kernel with a temperature of 1, which draws noise for every logit
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import parser
from benchmarks.common import (
    RowFile,
    about,
    copies_beyond_cache,
    default_dtype,
    device,
    in_fresh_process,
    milliseconds,
    peak_bytes,
    replayed_milliseconds,
)
from d2f import spans as sp
from triton_kernels.confidence import confidence_of_logits, confidence_reference
from triton_kernels.draws import Draws
from triton_kernels.flex import FlexSpans
from triton_kernels.masked_kl import masked_linear_kl, masked_linear_kl_reference
from triton_kernels.span_attention import span_attention

HEADS = {"LLaDA-8B": (32, 32), "Dream-7B": (28, 4)}
DIM = 128
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def decoding_spans(rows: int, cached: int, blocks: int = 2) -> Tensor:
    """Make the spans of one or two blocks that are being decoded: each sees what is cached, itself
    and the block before it."""
    first = -(-rows // blocks)
    ends = [cached + first] * first + [cached + rows] * (rows - first)
    return torch.tensor([[[0, end]] for end in ends], dtype=torch.int32)


def attention_ways(spans: Tensor, slots: int, dtype: torch.dtype) -> dict[str, Attention]:
    """Each way over these spans that runs here, from q ``[T, H, D]`` and k, v ``[H_kv, S, D]``."""
    where = spans.to(device())
    found: dict[str, Attention] = {
        "sdpa": lambda q, k, v: span_attention(q, k, v, where, kernel=False, check=False)
    }
    if device() == "cuda":
        found["kernel"] = lambda q, k, v: span_attention(q, k, v, where, kernel=True, check=False)
        torch._dynamo.reset()  # a compiled shape stays in memory, and their number is limited
        found["flex"] = _batched(FlexSpans(where[None], slots))
    whole = bool((spans[..., 1] - spans[..., 0]).sum(1).eq(slots).all())
    if whole and (device() != "cuda" or dtype.itemsize == 2):  # a GPU has none in fp32
        found["flash"] = _batched(_flash)
    return found


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def _batched(attention: Attention) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(0, 1)[None], k[None], v[None])[0].transpose(0, 1)

    return run


def measure_attention(
    heads: tuple[int, int], spans: Tensor, slots: int, train: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Median milliseconds of each way."""
    dtype = getattr(torch, options.dtype)
    q = torch.randn(len(spans), heads[0], DIM, device=device()).to(dtype)
    size = 2 * heads[1] * slots * DIM * dtype.itemsize
    copies = 1 if train else copies_beyond_cache(size, device())
    caches = [
        [torch.randn(heads[1], slots, DIM, device=device()).to(dtype) for _ in range(2)]
        for _ in range(copies)
    ]
    ways = attention_ways(spans, slots, dtype)
    if not train:
        with torch.inference_mode():
            return {
                way: replayed_milliseconds(
                    lambda i, run=run: run(q, *caches[i]), copies, device(), options.repeat
                )
                for way, run in ways.items()
            }
    inputs = [x.requires_grad_() for x in (q, *caches[0])]
    upstream = torch.randn_like(q)

    def step(run: Attention) -> None:
        torch.autograd.grad(run(*inputs), inputs, upstream)

    return {
        way: milliseconds(partial(step, run), device(), options.repeat)
        for way, run in ways.items()
        if way != "kernel"
    }


def attention(options: argparse.Namespace, table: RowFile) -> None:
    """Measure attention in decoding and in training."""
    for model, heads in HEADS.items():
        for cached in options.cached:
            for rows in options.rows:
                for blocks in (1, 2):
                    spans = decoding_spans(rows, cached, blocks)
                    found = measure_attention(heads, spans, cached + rows, False, options)
                    sizes = {"rows": rows, "cached": cached, "blocks": blocks}
                    show(table, {"what": "decoding", "model": model, **sizes, **found})
        for length in options.lengths:
            for what, spans in (
                ("block-causal", sp.block_causal(length, length // 4, 32)),
                ("bidirectional", sp.bidirectional(length)),
            ):
                found = measure_attention(heads, spans, length, True, options)
                show(table, {"what": what, "model": model, "positions": length, **found})


def loss_of(way: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """loss(student, teacher, head, weight): the mean KL(teacher || student) of the rows."""
    if way == "plain":
        return masked_linear_kl_reference
    if way == "liger":
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)

        def liger(student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor) -> Tensor:
            labels = torch.zeros(len(student), dtype=torch.int64, device=student.device)
            found: Tensor = module(student, head, teacher, head, labels)
            return found

        return liger
    return partial(masked_linear_kl, kernel=way == "kernel")


def measure_loss(
    way: str, rows: int, vocabulary: int, width: int, dtype: str, repeat: int
) -> dict[str, Any]:
    """Median milliseconds and peak MiB of one way."""
    rng = torch.Generator(device()).manual_seed(0)
    kind = getattr(torch, dtype)
    student, teacher = (
        torch.randn(rows, width, generator=rng, device=device()).to(kind) for _ in range(2)
    )
    head = (torch.randn(vocabulary, width, generator=rng, device=device()) / width**0.5).to(kind)
    weight = torch.full((rows,), 1 / rows, device=device())
    student.requires_grad_()
    loss = loss_of(way)

    def once() -> None:
        torch.autograd.grad(loss(student, teacher, head, weight), student)

    before = peak_bytes(device(), reset=True)
    once()
    peak = peak_bytes(device()) - before
    return {"ms": milliseconds(once, device(), repeat), "peak_mib": peak / 2**20}


def loss(options: argparse.Namespace, table: RowFile) -> None:
    """Measure the distillation loss."""
    ways = ["plain", "chunked", *["kernel"] * (device() == "cuda")]
    ways += ["liger"] * (importlib.util.find_spec("liger_kernel") is not None)
    for vocabulary in options.vocabularies:
        for rows in options.rows:
            for way in ways:
                shape = (rows, vocabulary, options.width, options.dtype, options.repeat)
                found = in_fresh_process(measure_loss, way, *shape) or {"ms": None}
                show(table, {"way": way, "rows": rows, "vocabulary": vocabulary, **found})


def confidence(options: argparse.Namespace, table: RowFile) -> None:
    """Measure token and confidence from hidden states."""
    ways: dict[str, Callable[[Tensor, Tensor], object]] = {
        "head": F.linear,
        "plain": lambda x, head: confidence_reference(F.linear(x, head), mask_id=1),
    }
    if device() == "cuda":
        kernel = partial(confidence_of_logits, mask_id=1, kernel=True)
        ways["kernel"] = lambda x, head: kernel(F.linear(x, head))
        ways["sampled"] = lambda x, head: kernel(F.linear(x, head), draws=_draws(x))
    for vocabulary in options.vocabularies:
        kind = getattr(torch, options.dtype)
        head = torch.randn(vocabulary, options.width, device=device()).to(kind)
        for rows in options.rows:
            x = torch.randn(rows, options.width, device=device()).to(kind)
            # One copy: the head alone is more than a GPU's L2 cache holds.
            found = {
                way: replayed_milliseconds(
                    lambda _, run=run, x=x, head=head: run(x, head), 1, device(), options.repeat
                )
                for way, run in ways.items()
            }
            show(table, {"vocabulary": vocabulary, "rows": rows, **found})


def _draws(x: Tensor) -> Draws:
    row = torch.arange(len(x), device=x.device)
    return Draws(torch.zeros_like(row), row, torch.ones(len(x), device=x.device))


def show(table: RowFile, row: dict[str, Any]) -> None:
    """Keep a row and print it; times are in milliseconds."""
    table.add(row)
    parts = (f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
    print("  ".join(parts), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line names."""
    given = parser(__doc__)
    cuda = device() == "cuda"
    kinds = {"attention": attention, "loss": loss, "confidence": confidence}
    vocabularies = [126464, 152064] if cuda else [8192]
    given.add_argument("kernel", choices=kinds)
    given.add_argument("--rows", type=int, nargs="+", default=[16, 64, 128])
    given.add_argument("--cached", type=int, nargs="+", default=[512, 4096] if cuda else [512])
    given.add_argument("--lengths", type=int, nargs="+", default=[4096] if cuda else [512])
    given.add_argument("--vocabularies", type=int, nargs="+", default=vocabularies)
    given.add_argument("--width", type=int, default=4096 if cuda else 256, help="of hidden states")
    given.add_argument("--dtype", default=default_dtype())
    given.add_argument("--repeat", type=int, default=20)
    given.add_argument("--json", type=Path, help="file for the numbers")
    options = given.parse_args(arguments)
    facts = about(options.dtype)
    print(f"{facts['device']}, {options.dtype}, torch {facts['torch']}; ms")
    kinds[options.kernel](options, RowFile(options.json, facts))


if __name__ == "__main__":
    main()
