"""python -m benchmarks.masked_kl --rows 256 512 1024 4096 --vocabularies 126464 152064

Time and peak memory of the distillation loss, forward and backward, with one weight for all rows so
that the others can do the same. Each measurement is a process of its own; its peak is what it
allocated beyond its inputs, on a CPU by the operating system's count.

    plain          from all logits at once
    chunked        `masked_linear_kl` in PyTorch
    kernel         the same with its kernel, on a GPU
    trl            TRL's chunked divergence, where trl is installed
    liger          Liger's chunked JSD with beta 0, where liger-kernel is installed
    liger fused    its Triton version, on a GPU

By default a GPU takes the sizes above, those of LLaDA-8B and Dream-7B; a CPU smaller ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.fresh_process import in_fresh_process
from benchmarks.row_file import RowFile
from benchmarks.timing import about, milliseconds
from decode.compare.entries import peak_bytes, reset_peak
from triton_kernels.masked_kl import masked_linear_kl, masked_linear_kl_reference

# Rows, vocabularies and width that are measured by default: on a GPU, on a CPU.
LARGE = ([256, 512, 1024, 4096], [126464, 152064], 4096)
SMALL = ([64, 256], [8192, 32000], 256)
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ways(device: str) -> list[str]:
    """The ways that can be measured here."""
    found = ["plain", "chunked", "kernel"] if device == "cuda" else ["plain", "chunked"]
    if importlib.util.find_spec("trl"):
        found.append("trl")
    if importlib.util.find_spec("liger_kernel"):
        found += ["liger", "liger fused"] if device == "cuda" else ["liger"]
    return found


def loss_of(way: str) -> Loss:
    """loss(student, teacher, head, weight), the mean KL(teacher || student) of the rows where every
    weight is one over their number."""
    if way == "plain":
        return masked_linear_kl_reference
    if way == "trl":
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        def trl(student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor) -> Tensor:
            rows = ChunkedDivergenceFunction.apply(student, head, None, teacher, head, None, 0.0)[0]
            return (rows * weight).sum()

        return trl
    if way.startswith("liger"):
        return _liger(fused=way == "liger fused")
    return partial(masked_linear_kl, kernel=way == "kernel")


def _liger(*, fused: bool) -> Loss:
    if fused:
        from liger_kernel.transformers import LigerFusedLinearJSD

        module = LigerFusedLinearJSD(jsd_beta=0.0)
    else:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)

    def liger(student: Tensor, teacher: Tensor, head: Tensor, weight: Tensor) -> Tensor:
        labels = torch.zeros(len(student), dtype=torch.int64, device=student.device)
        loss: Tensor = module(student, head, teacher, head, labels)
        return loss

    return liger


def measure(
    way: str, rows: int, vocabulary: int, width: int, dtype: str, device: str, repeat: int
) -> dict[str, Any]:
    """Median milliseconds and peak MiB of one way."""
    rng = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    student, teacher = (
        torch.randn(rows, width, generator=rng, device=device).to(kind) for _ in range(2)
    )
    head = (torch.randn(vocabulary, width, generator=rng, device=device) / width**0.5).to(kind)
    weight = torch.full((rows,), 1 / rows, device=device)
    student.requires_grad_()
    loss = loss_of(way)

    def once() -> None:
        torch.autograd.grad(loss(student, teacher, head, weight), student)

    before = _memory(device)
    once()
    peak = _memory(device, peak=True) - before
    return {"ms": milliseconds(once, device, repeat), "peak_mib": peak / 2**20}


def _memory(device: str, *, peak: bool = False) -> int:
    if device == "cuda":
        if not peak:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if not peak:
        reset_peak([os.getpid()])
    return peak_bytes([os.getpid()]) or 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    rows, vocabularies, width = LARGE if cuda else SMALL
    parser.add_argument("--rows", type=int, nargs="+", default=rows)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=vocabularies)
    parser.add_argument("--width", type=int, default=width, help="of a hidden state")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device = "cuda" if cuda else "cpu"
    name = torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads"
    print(f"{name}, {options.dtype}, width {options.width}, torch {torch.__version__}")
    measured = ways(device)
    head = "".join(f"{way + ', ms':>16}{'MiB':>7}" for way in measured)
    print(f"{'vocabulary':>10}{'rows':>6}{head}")
    table = RowFile(options.json, {**about(options.dtype), "width": options.width})
    for vocabulary in options.vocabularies:
        for rows in options.rows:
            line = f"{vocabulary:>10}{rows:>6}"
            for way in measured:
                shape = (rows, vocabulary, options.width, options.dtype)
                found = in_fresh_process(measure, way, *shape, device, options.repeat)
                sizes = {"way": way, "rows": rows, "vocabulary": vocabulary}
                table.add({**sizes, **(found or {"ms": None, "peak_mib": None})})
                if found is None:
                    line += f"{'no memory':>23}"
                else:
                    line += f"{found['ms']:>16.1f}{found['peak_mib']:>7.0f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
