"""python -m benchmarks.confidence --rows 1 16 32 64 128 --vocabularies 32000 126464 152064

Time from hidden states to token and confidence of each row: the linear layer (head), and after it

    plain      `confidence_reference` on its logits
    kernel     the kernel on its logits
    sampled    the kernel with a temperature of 1, which draws noise for every logit
    native     the C++ of compiled models (`d2f.cpu.rows`) on its logits

The kernel runs on a GPU only; elsewhere head, plain and native are measured, in fp32, by default at
smaller sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.row_file import RowFile
from benchmarks.timing import about, replayed_milliseconds
from d2f.cpu.rows import scored
from triton_kernels.confidence import confidence_of_logits, confidence_reference
from triton_kernels.draws import Draws

# Vocabularies and width that are measured by default: on a GPU, on a CPU.
LARGE, SMALL = ([32000, 126464, 152064], 4096), ([8192, 32000], 256)
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "head": F.linear,
    "plain": lambda x, head: confidence_reference(F.linear(x, head), mask_id=1),
    "kernel": lambda x, head: confidence_of_logits(F.linear(x, head), mask_id=1, kernel=True),
    "sampled": lambda x, head: confidence_of_logits(
        F.linear(x, head), mask_id=1, draws=_draws(x), kernel=True
    ),
    "native": lambda x, head: scored(F.linear(x, head), 1, torch.zeros(len(x), dtype=torch.int64)),
}
ON_GPU, ON_CPU = ["head", "plain", "kernel", "sampled"], ["head", "plain", "native"]


def _draws(x: torch.Tensor) -> Draws:
    row = torch.arange(len(x), device=x.device)
    return Draws(torch.zeros_like(row), row, torch.ones(len(x), device=x.device))


def _call(way: str, x: torch.Tensor, head: torch.Tensor, copy: int) -> object:
    return WAYS[way](x, head)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    vocabularies, width = LARGE if cuda else SMALL
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=vocabularies)
    parser.add_argument("--width", type=int, default=width, help="of a hidden state")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device, dtype = "cuda" if cuda else "cpu", getattr(torch, options.dtype)
    name = torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads"
    ways = ON_GPU if cuda else ON_CPU
    if not cuda and dtype != torch.float32:
        ways = ["head", "plain"]
    print(f"{name}, {options.dtype}, width {options.width}, torch {torch.__version__}; ms")
    print(f"{'vocabulary':>10}{'rows':>6}" + "".join(f"{way:>10}" for way in ways))
    table = RowFile(options.json, {**about(options.dtype), "width": options.width})
    for vocabulary in options.vocabularies:
        head = torch.randn(vocabulary, options.width, device=device).to(dtype)
        for rows in options.rows:
            x = torch.randn(rows, options.width, device=device).to(dtype)
            # One copy: the head alone is more than a GPU's L2 cache holds.
            found = {
                way: replayed_milliseconds(partial(_call, way, x, head), 1, device, options.repeat)
                for way in ways
            }
            table.add({"vocabulary": vocabulary, "rows": rows, **found})
            line = "".join(f"{found[way]:>10.3f}" for way in ways)
            print(f"{vocabulary:>10}{rows:>6}{line}", flush=True)


if __name__ == "__main__":
    main()
