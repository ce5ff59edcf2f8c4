"""python -m benchmarks.confidence --rows 1 16 32 64 128 --vocabularies 32000 126464 152064

Time from hidden states to token and confidence of each row, three ways:

    plain      a linear layer, then `confidence_reference` on its logits
    two-pass   a linear layer, then the kernel on its logits
    fused      the kernel from hidden states; no logits in memory

The kernels run on a GPU only; elsewhere the plain way alone is measured, by default at smaller
sizes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.timing import about, milliseconds
from d2f.files import write_beside
from triton_kernels.confidence import (
    confidence_head,
    confidence_of_logits,
    confidence_reference,
)

# Vocabularies and width that are measured by default: on a GPU, on a CPU.
LARGE, SMALL = ([32000, 126464, 152064], 4096), ([8192, 32000], 256)
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "plain": lambda x, head: confidence_reference(F.linear(x, head), mask_id=1),
    "two-pass": lambda x, head: confidence_of_logits(F.linear(x, head), mask_id=1, kernel=True),
    "fused": lambda x, head: confidence_head(x, head, mask_id=1, kernel=True),
}


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
    ways = list(WAYS) if cuda else ["plain"]
    print(f"{name}, {options.dtype}, width {options.width}, torch {torch.__version__}; ms")
    print(f"{'vocabulary':>10}{'rows':>6}" + "".join(f"{way:>10}" for way in ways))
    table = []
    for vocabulary in options.vocabularies:
        head = torch.randn(vocabulary, options.width, device=device).to(dtype)
        for rows in options.rows:
            x = torch.randn(rows, options.width, device=device).to(dtype)
            found = {
                way: milliseconds(partial(WAYS[way], x, head), device, options.repeat)
                for way in ways
            }
            table.append({"vocabulary": vocabulary, "rows": rows, **found})
            line = "".join(f"{found[way]:>10.3f}" for way in ways)
            print(f"{vocabulary:>10}{rows:>6}{line}", flush=True)
    if options.json is not None:
        found = {**about(options.dtype), "width": options.width, "measured": table}
        write_beside(options.json, json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
