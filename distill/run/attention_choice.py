"""Which attention a training run computes with: on a GPU the fastest at its own shape, measured
before the first step, kept beside the run so that a resumed one computes the same."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from d2f.attention import SpanPlan, Way
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.model import DiffusionModel

FILE_NAME = "attention.json"
WAYS: tuple[Way, ...] = ("flex", "sdpa")
_REPEAT = 10


def choose_attention(
    wanted: str, model: DiffusionModel, spans: Tensor, dtype: torch.dtype, output: Path
) -> Way:
    """The way of the run in `output`: the wanted one, or for "auto" the one kept there, else the
    fastest (`measure_attention`), which is written there; sdpa where there is no GPU.

    spans: int32 ``[R, L, K, 2]`` of a step. dtype: what attention computes in.
    """
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if not spans.is_cuda:
        return "sdpa"
    path = output / FILE_NAME
    # Ways differ in rounding: a resumed run computes by the one that it began with.
    if path.is_file():
        kept: Way = json.loads(path.read_text(encoding="utf-8"))["chosen"]
        if kept in WAYS:  # an earlier version had others
            return kept
    found = measure_attention(model, spans, dtype)
    chosen = min(found, key=found.__getitem__)
    write_beside(path, json.dumps({"chosen": chosen, "milliseconds": found}) + "\n")
    said = ", ".join(f"{way} {ms:.3f} ms" for way, ms in found.items())
    print(f"attention: {chosen} ({said} a layer, forward and backward, at {list(spans.shape[:2])})")
    return chosen


def check_attention(wanted: str, device: torch.device) -> None:
    """Raise InputError for an attention that cannot train on the device."""
    if wanted == "flex" and device.type != "cuda":
        raise InputError(f"attention {wanted} trains on a GPU only, this is {device}: take sdpa")


def attention_dtype(accelerator: Accelerator) -> torch.dtype:
    """What attention computes in under the run's mixed precision."""
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return kinds.get(accelerator.mixed_precision, torch.float32)


def measure_attention(model: DiffusionModel, spans: Tensor, dtype: torch.dtype) -> dict[Way, float]:
    """Milliseconds of a layer's attention, forward and backward, by each way that works, with a
    layer's share of making the mask."""
    config = model.backbone.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    batch, length = spans.shape[:2]
    # [R, heads, L, dim], and keys and values with their own number of heads.
    shapes = ((batch, heads, length, dim), *((batch, kv_heads, length, dim),) * 2)
    options: dict[str, Any] = {"dtype": dtype, "device": spans.device, "requires_grad": True}
    q, k, v = (torch.randn(shape, **options) for shape in shapes)
    upstream = torch.randn(batch, length, heads, dim, dtype=dtype, device=spans.device)
    layers = config.num_hidden_layers

    def step(way: Way) -> None:
        # Made once a forward and shared by the layers, as in training.
        plan = SpanPlan(spans, way=way)
        for _ in range(layers):
            out = plan.attend(None, q, k, v)
            torch.autograd.grad(out, (q, k, v), upstream)

    found: dict[Way, float] = {}
    for way in WAYS:
        try:
            found[way] = _milliseconds(lambda way=way: step(way), spans.device) / layers
        except (RuntimeError, NotImplementedError) as error:  # memory, or no such kernel
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"attention by {way} does not work here: {reason}", stacklevel=2)
    return found


def _milliseconds(run: Any, device: torch.device) -> float:
    """Median wall time of a call, waited for, after one that is not counted."""
    times = []
    for _ in range(_REPEAT + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    # The first call compiles.
    return sorted(times[1:])[_REPEAT // 2]
