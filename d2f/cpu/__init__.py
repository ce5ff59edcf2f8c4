"""A layer's cache write and attention on a CPU in one call of C++ (span_attention.cpp), for
compiled forwards in fp32.

scaled_dot_product_attention is called once a request and layer, which for decoding's few rows costs
several times what it computes. This code takes all requests' rows in one call, reads the spans as
they are, and shares rows and heads among PyTorch's threads.

It is built when a model is compiled, by the compiler that `torch.compile` uses and into its cache
on disk, and looked at beside the plain computation before its first use. ``D2F_KERNELS=0`` leaves
it out.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_kernels.dispatch import compare, random_inputs
from triton_kernels.span_attention import span_attention_reference, write_slots

DIMS = (8, 16, 32, 64, 80, 96, 128)  # head dimensions that it has code for
# Rows times slots of a request, the mean of a forward's, up to which it is the faster one: beyond,
# tiles of rows that share what they read pay, which scaled_dot_product_attention has.
MOST = 16 * 1024


class _Layer(ctypes.Structure):
    """`Layer` of span_attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "key", "value")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_head", "value_row")),
        *((name, ctypes.c_void_p) for name in ("places", "keys", "values", "spans", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "slots", "dim")),
        *((name, ctypes.c_int64) for name in ("count", "threads")),
        ("scale", ctypes.c_float),
    )


def built(*names: str) -> Any:
    """The code of these files beside this one, one behind the other, compiled. Raises whatever a
    compiler may."""
    from torch._inductor.codecache import CppCodeCache

    files = (Path(__file__).with_name(name) for name in names)
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return CppCodeCache.load(source, "cpu", extra_flags=("-ffp-contract=fast",))


@cache
def library() -> Any:
    """The compiled code. Raises whatever a compiler may."""
    return built("span_attention.cpp")


@cache
def can_attend(dim: int) -> bool:
    """Whether the code can be built here and gives what the plain computation gives, in heads of
    `dim`; asked once, warns where not."""
    if dim not in DIMS:
        return False
    try:
        with torch.inference_mode(False):
            _check(dim)
    except Exception as error:  # whatever a compiler or the linker may raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"attention in C++ does not work here, the plain one is used: {reason[0]}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def pays(spans: Tensor, requests: int) -> bool:
    """Whether it is the faster one for a forward of so many requests with spans ``[T, K, 2]``."""
    seen = int((spans[..., 1] - spans[..., 0]).sum())
    return seen <= MOST * requests


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    spans: Tensor,
    scale: float,
) -> Tensor:
    """Write key and value ``[1, H_kv, T, D]`` to the slots `places`, int64 ``[T]``, of keys and
    values ``[1, H_kv, S, D]``; then attention of query ``[1, H, T, D]`` over `spans`, int32
    ``[T, K, 2]``, as ``[1, T, H, D]``. fp32 on a CPU; D is one of DIMS."""
    _, heads, rows, dim = query.shape
    # Of rows that are computed alone only the last stride matters to the code.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    spans = spans.contiguous()
    out = query.new_empty((1, rows, heads, dim))
    layer = _Layer(
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        query.stride(1), query.stride(2), key.stride(1), key.stride(2),
        value.stride(1), value.stride(2),
        places.data_ptr(), keys.data_ptr(), values.data_ptr(), spans.data_ptr(), out.data_ptr(),
        rows, heads, keys.shape[1], keys.shape[2], dim, spans.shape[1], torch.get_num_threads(),
        scale,
    )  # fmt: skip
    if library().write_and_attend(ctypes.byref(layer)):
        raise ValueError(f"the head dimension must be one of {DIMS}, got {dim}")
    return out


def _check(dim: int) -> None:
    """Two requests, heads that share keys, two spans a row, a row that sees nothing."""
    rows, heads, kv_heads, slots = 5, 4, 2, 90
    one = (1, kv_heads, rows, dim)
    shapes = ((1, heads, rows, dim), one, one, *2 * ((1, kv_heads, slots, dim),))
    inputs = random_inputs(shapes, torch.float32, torch.device("cpu"))
    places = torch.tensor([3, 60, 61, 62, 89])
    ranges = [
        [[0, 4], [0, 0]],
        [[50, 63], [0, 0]],
        [[50, 61], [64, 70]],
        [[0, 0]] * 2,
        [[7, 90], [0, 0]],
    ]
    spans = torch.tensor(ranges, dtype=torch.int32)

    def compute(given: Sequence[Tensor], kernel: bool) -> list[Tensor]:
        query, key, value, keys, values = (x.clone() for x in given)
        if kernel:
            out = write_and_attend(query, key, value, places, keys, values, spans, dim**-0.5)
        else:
            write_slots(keys[0], values[0], places, key[0], value[0])
            out = span_attention_reference(query, keys, values, spans[None]).transpose(1, 2)
        return [out, keys, values]

    compare("attention in C++", inputs, compute)
