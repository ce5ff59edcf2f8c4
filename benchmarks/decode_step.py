"""python -m benchmarks.decode_step --shapes LLaDA-8B Dream-7B

Time of one decoding forward of a large model with random weights, from the rows on the host to the
tokens and confidences on the host, against its floor: the bytes that it must read (all weights but
the embedding's table, keys and values of all cached positions) over the memory bandwidth, which is
measured here by copying a large buffer (bytes read and written). 16 to 128 rows, which are two
blocks being decoded, on 512 to 4,096 cached keys:

    graph          the engine's on a GPU: kernels, padded rows, a CUDA graph
    eager          the engine's without a graph
    compiled       the first of these that there is, of the model after `DiffusionModel.compile`
    sdpa           the graph with attention by scaled_dot_product_attention and a mask
    flex           without a graph, attention by flex_attention, its block mask made beforehand
    transformers   the model's own forward with a DynamicCache and a mask, all logits of its rows,
                   RoPE in the model's dtype

By default a GPU takes LLaDA-8B and Dream-7B, a CPU tiny and small; it has no graph and no
flex.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks import parser
from benchmarks.common import (
    MASK_ID,
    SHAPES,
    RowFile,
    about,
    build,
    bytes_needed,
    default_dtype,
    default_shapes,
    device,
    seconds,
)
from benchmarks.kernels import decoding_spans
from d2f.attention import NAME, SpanPlan
from d2f.compile import CompiledRows
from d2f.errors import CompileError
from d2f.model import DiffusionModel, Fp32Rotary
from decode.engine.batch import FlatRows, Wanted, prediction_table
from decode.engine.cuda_graphs import GraphForwards
from triton_kernels.dispatch import VARIABLE

Forward = Callable[[], object]


def bandwidth(device: str) -> float:
    """Bytes a second, read and written, of copying a buffer far larger than any cache."""
    source = torch.full(((4 << 30) if device == "cuda" else (256 << 20),), 7, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), device, 10)


def batch(rows: int, cached: int) -> FlatRows:
    """Two blocks behind what is cached; every row is read."""
    places = np.arange(cached, cached + rows)
    spans = decoding_spans(rows, cached).numpy().astype(np.int64)
    tokens = np.full(rows, MASK_ID)
    return FlatRows(tokens, places, places, spans, np.arange(rows), [])


def ours(model: DiffusionModel, rows: int, cached: int, device: str) -> dict[str, Forward]:
    """Return the engine's ways to compute a forward."""
    flat, cache = batch(rows, cached), model.new_cache(cached + rows + 1)
    for layer in cache.layers:
        for buffer in layer:
            buffer.normal_()

    def eager(plan: SpanPlan | None = None) -> object:
        with torch.inference_mode():
            on = flat.on(model.device)
            cache.slots = on.slots
            plan = plan or SpanPlan(on.plan.spans)
            logits = model.decode_rows(on.tokens, on.positions, plan, cache, on.read)
            return prediction_table(logits, MASK_ID, None, None).cpu()

    ways: dict[str, Forward] = {"eager": eager}
    if device == "cuda":
        static, plain = GraphForwards(model, cache), GraphForwards(model, cache)
        flexible = SpanPlan(torch.from_numpy(flat.spans).to(device, torch.int32), way="flex")
        ways["graph"] = lambda: _finished(static, flat)
        ways["sdpa"] = lambda: _without_kernels(lambda: _finished(plain, flat))
        ways["flex"] = lambda: eager(flexible)
    return ways


def _finished(static: GraphForwards, flat: FlatRows) -> object:
    pending = static.start(flat, Wanted())
    assert pending is not None
    return pending()


def _without_kernels(run: Forward) -> object:
    with patch.dict(os.environ, {VARIABLE: "0"}):
        return run()


@contextmanager
def as_transformers_has_it(model: DiffusionModel) -> Iterator[None]:
    """Within it attention is transformers' own, and so is RoPE: `Fp32Rotary` leaves queries and
    keys in fp32, which only `SpanPlan.attend` takes back to the dtype of the values."""
    decoder: Any = model.backbone.model
    ours = decoder.rotary_emb
    model.backbone.set_attn_implementation("sdpa")
    if isinstance(ours, Fp32Rotary):
        decoder.rotary_emb = ours.rotary
    try:
        yield
    finally:
        decoder.rotary_emb = ours
        model.backbone.set_attn_implementation(NAME)


def theirs(model: DiffusionModel, rows: int, cached: int) -> Forward:
    """transformers' own forward, to be called as `as_transformers_has_it`."""
    config = model.backbone.config
    dim = config.hidden_size // config.num_attention_heads
    cache = DynamicCache()
    shape = (1, config.num_key_value_heads, cached, dim)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(shape, dtype=model.dtype, device=model.device)
        cache.update(keys, torch.randn_like(keys), layer)
    places = torch.arange(cached, cached + rows, device=model.device)[None]
    ends = decoding_spans(rows, cached)[:, 0, 1].to(model.device)
    seen = torch.arange(cached + rows, device=model.device)[None] < ends[:, None]
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=model.device)
    mask.masked_fill_(~seen, torch.finfo(model.dtype).min)
    tokens = torch.full_like(places, MASK_ID)

    def run() -> object:
        with torch.inference_mode():
            logits = model.backbone(
                input_ids=tokens, attention_mask=mask[None, None], position_ids=places,
                past_key_values=cache, use_cache=True,
            ).logits[0]  # fmt: skip
            cache.crop(-rows)
            return prediction_table(logits, MASK_ID, None, None).cpu()

    return run


def measure(
    model: DiffusionModel,
    rows: int,
    cached: int,
    device: str,
    repeat: int,
    compiled: CompiledRows | None = None,
) -> dict[str, float]:
    """Milliseconds of each way."""
    found = {}
    for way, run in ours(model, rows, cached, device).items():
        found[way] = 1e3 * seconds(run, device, repeat)
    if compiled is not None:
        model.compiled_rows = compiled
        ways = ours(model, rows, cached, device)
        found["compiled"] = 1e3 * seconds(ways.get("graph", ways["eager"]), device, repeat)
        model.compiled_rows = None
    with as_transformers_has_it(model):
        found["transformers"] = 1e3 * seconds(theirs(model, rows, cached), device, repeat)
    return found


def try_compile(model: DiffusionModel) -> CompiledRows | None:
    """Compile as `DiffusionModel.compile` does; None, with a line that says why, where it fails."""
    try:
        return CompiledRows(model.backbone, model.new_cache)
    except CompileError as error:
        print(f"not measured compiled: {error}", file=sys.stderr)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    given = parser(__doc__)
    given.add_argument("--shapes", nargs="+", choices=SHAPES, default=default_shapes())
    given.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128])
    given.add_argument("--cached", type=int, nargs="+", default=[512, 2048, 4096])
    given.add_argument("--dtype", default=default_dtype())
    given.add_argument("--repeat", type=int, default=20)
    given.add_argument("--json", type=Path, help="file for the numbers")
    options = given.parse_args(arguments)
    speed = bandwidth(device())
    facts: dict[str, Any] = {**about(options.dtype), "bytes_per_second": speed}
    print(f"{facts['device']}, {options.dtype}, {speed / 1e9:.0f} GB/s, torch {facts['torch']}; ms")
    table = RowFile(options.json, facts)
    for shape in options.shapes:
        model = build(shape, getattr(torch, options.dtype), device())
        compiled = try_compile(model)
        for cached, rows in product(options.cached, options.rows):
            floor = 1e3 * bytes_needed(model, rows, cached) / speed
            found = measure(model, rows, cached, device(), options.repeat, compiled)
            table.add({"shape": shape, "rows": rows, "cached": cached, "floor": floor, **found})
            times = "".join(f"  {way} {ms:.3f} ({ms / floor:.2f})" for way, ms in found.items())
            print(f"{shape:<9}{rows:>4} on {cached:<5} floor {floor:.3f}{times}", flush=True)
        del model, compiled
    return 0


if __name__ == "__main__":
    sys.exit(main())
