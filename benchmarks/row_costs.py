"""python -m benchmarks.row_costs --model models/smollm2 --adapter ADAPTER --json FILE

Time forwards of few rows on a CPU, in C++: what a row costs says how many drafts a forward should
feed. A forward reads all weights once, so the time of one row is set against the bytes of the
weights over the read bandwidth, measured in the same run by summing a large buffer. Rows of a
self-drafting adapter, where one is given, follow one clean row. A prompt's forward is set against
the arithmetic of PyTorch's own product of two square matrices, measured in the same run; in fp32
where the CPU multiplies no bf16, as the forward widens it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import d2f
from benchmarks import parser
from benchmarks.common import RowFile, about, milliseconds
from d2f import spans
from d2f.attention import SpanPlan
from d2f.contract import DRAFT
from d2f.model import DiffusionModel
from distill.trainer import cpu_has_bf16

ROWS = (1, 2, 4, 6, 8, 9, 12, 16, 24, 32)


def read_bandwidth(repeat: int) -> float:
    """Bytes a second of reading a buffer that is far larger than the caches."""
    buffer = torch.ones(1 << 27, dtype=torch.int64)  # 1 GiB
    return 1e3 * buffer.nbytes / milliseconds(buffer.sum, "cpu", repeat)


def arithmetic(dtype: torch.dtype, repeat: int) -> float:
    """Operations a second of a product of two matrices [2048, 2048]."""
    a, b = torch.ones(2, 2048, 2048, dtype=dtype)
    return 1e3 * 2 * 2048**3 / milliseconds(lambda: a @ b, "cpu", repeat)


def forward_ms(
    model: DiffusionModel,
    rows: int,
    cached: int,
    drafts: bool,
    repeat: int,
    read: slice = slice(None),
) -> float:
    """Median milliseconds of a forward of so many rows behind what is cached, which reads some."""
    cache = model.new_cache(cached + rows)
    for layer in cache.layers:
        for buffer in layer:
            buffer.normal_()
    places = torch.arange(cached, cached + rows)
    cache.slots = places
    seen = spans.causal(cached + rows)[cached:]
    tokens = torch.full((rows,), 100)
    if drafts:
        tokens[1:] = DRAFT

    @torch.inference_mode()
    def once() -> None:
        model.decode_rows(tokens, places, SpanPlan(seen), cache, torch.arange(rows)[read])

    return milliseconds(once, "cpu", repeat)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line names."""
    given = parser(__doc__)
    given.add_argument("--model", required=True)
    given.add_argument("--adapter", help="a self-drafting one")
    given.add_argument("--rows", type=int, nargs="+", default=ROWS)
    given.add_argument("--cached", type=int, default=256)
    given.add_argument("--prompt", type=int, default=512, help="tokens of a prompt; 0: none")
    given.add_argument("--repeat", type=int, default=30)
    given.add_argument("--json", type=Path, help="file for the numbers")
    options = given.parse_args(arguments)
    speed = read_bandwidth(5)
    table = RowFile(options.json, {**about("float32 and bfloat16"), "bytes_per_second": speed})
    print(
        f"{speed / 1e9:.1f} GB/s read, {torch.get_num_threads()} threads, {options.cached} cached"
    )
    for dtype in ("bfloat16", "float32"):
        model = d2f.load(options.model, adapter=options.adapter, dtype=dtype, device="cpu")
        model.compile()
        tied = model.config.tie_word_embeddings  # an embedding is looked up, a head is read
        size = sum(
            p.nbytes
            for name, p in model.backbone.named_parameters()
            if "lora_" not in name and (tied or "embed_tokens" not in name)
        )
        floor = 1e3 * size / speed
        first = 0.0
        for rows in options.rows:
            shape = (rows, options.cached)
            found = {"clean_ms": forward_ms(model, *shape, False, options.repeat)}
            if model.gate is not None and rows > 1:
                found["drafts_ms"] = forward_ms(model, *shape, True, options.repeat)
            first = first or found["clean_ms"]
            table.add({"dtype": dtype, "rows": rows, "floor_ms": floor, **found})
            times = "  ".join(f"{k} {v:.2f} ({v / first:.2f})" for k, v in found.items())
            print(f"{dtype} {rows:>3} rows  {times}  {floor / found['clean_ms']:.0%}", flush=True)
        if not options.prompt:
            continue
        layers = model.backbone.model.layers
        inside = sum(p.numel() for n, p in layers.named_parameters() if "lora_" not in n)
        operations = 2 * inside * options.prompt
        took = forward_ms(model, options.prompt, 0, False, 10, slice(-1, None))
        most = arithmetic(getattr(torch, dtype) if cpu_has_bf16() else torch.float32, 10)
        table.add({"dtype": dtype, "prompt": options.prompt, "ms": took, "operations_s": most})
        print(
            f"{dtype} a prompt of {options.prompt} {took:.1f} ms, its products alone "
            f"{1e3 * operations / took / most:.0%} of {most / 1e12:.2f} Tflop/s"
        )


if __name__ == "__main__":
    sys.exit(main())
