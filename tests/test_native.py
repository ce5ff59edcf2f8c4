"""Attention in C++ gives what plain attention gives, a row the same whatever else is fed, and where
it cannot be built the plain one computes."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model

import decode
from d2f import cpu as native
from triton_kernels.span_attention import span_attention_reference, write_slots

if shutil.which("g++") is None and shutil.which("clang++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)


@st.composite
def layers(draw):
    """(head dimension, heads, heads of keys, slots, spans [T, K, 2], seed)"""
    slots = draw(st.integers(1, 80))
    rows = draw(st.integers(1, min(slots, 20)))
    count = draw(st.integers(1, 3))
    spans = np.zeros((rows, count, 2), np.int32)
    for row in spans:  # 2 * count sorted ends: ranges that do not overlap, some of them empty
        row.ravel()[:] = sorted(
            draw(st.lists(st.integers(0, slots), min_size=2 * count, max_size=2 * count))
        )
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (4, 1)]))
    return (
        draw(st.sampled_from(native.DIMS)),
        kv_heads * group,
        kv_heads,
        slots,
        spans,
        draw(st.integers(0, 99)),
    )


def _inputs(layer):
    """query, key, value, keys, values as a layer hands them over, places, spans; normal."""
    dim, heads, kv_heads, slots, spans, seed = layer
    rng = torch.Generator().manual_seed(seed)
    rows = len(spans)
    new = [
        torch.randn(1, rows, h, dim, generator=rng).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    ]
    cache = [torch.randn(1, kv_heads, slots, dim, generator=rng) for _ in range(2)]
    places = torch.randperm(slots, generator=rng)[:rows]
    return *new, places, *cache, torch.from_numpy(spans)


def _plain(query, key, value, places, keys, values, spans, scale):
    write_slots(keys[0], values[0], places, key[0], value[0])
    return span_attention_reference(query, keys, values, spans[None], scale=scale).transpose(1, 2)


@settings(max_examples=150, deadline=None)
@given(layers(), st.sampled_from([0.125, 1.0, 3.0]))
def test_it_is_as_near_to_fp64_as_plain_attention(layer, scale):
    *inputs, spans = _inputs(layer)
    found = []
    for compute, dtype in (
        (_plain, torch.float64),
        (_plain, torch.float32),
        (native.write_and_attend, torch.float32),
    ):
        given = [x.clone() if x.dtype == torch.int64 else x.to(dtype, copy=True) for x in inputs]
        found.append((compute(*given, spans, scale).double(), given[4:]))
    (truth, _), (plain, kept), (ours, written) = found
    for theirs, own in zip(kept, written, strict=True):
        assert torch.equal(theirs, own)
    error = (ours - truth).abs().max().item()
    assert error <= 2 * (plain - truth).abs().max().item() + 2e-6, error


@settings(max_examples=50, deadline=None)
@given(layers(), st.data())
def test_a_row_does_not_depend_on_the_others_nor_on_the_threads(layer, data):
    query, key, value, places, keys, values, spans = _inputs(layer)
    before = torch.get_num_threads()
    together = native.write_and_attend(query, key, value, places, keys, values, spans, 0.25)
    at = slice(
        *sorted(
            data.draw(st.lists(st.integers(0, len(spans)), min_size=2, max_size=2, unique=True))
        )
    )
    torch.set_num_threads(before % 4 + 1)
    try:
        part = [x[:, :, at] for x in (query, key, value)]
        alone = native.write_and_attend(*part, places[at], keys, values, spans[at], 0.25)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together[:, at])


def test_other_head_dimensions_are_refused_before_anything_is_written():
    one = torch.ones(1, 1, 1, 24)
    cache = torch.zeros(1, 1, 4, 24)
    with pytest.raises(ValueError, match="got 24"):
        native.write_and_attend(
            one,
            one,
            one,
            torch.tensor([0]),
            cache,
            cache,
            torch.tensor([[[0, 1]]], dtype=torch.int32),
            1.0,
        )
    assert not cache.any()


def test_compiled_decoding_takes_it_and_gives_the_plain_tokens(monkeypatch):
    calls = []
    attend = native.write_and_attend

    def counted(*given):
        calls.append(given[0].shape)
        return attend(*given)

    monkeypatch.setattr("d2f.compile.write_and_attend", counted)
    monkeypatch.setattr("d2f.cpu.rows.fits", lambda backbone: False)
    model = fresh_model("llada")
    model.compile()
    calls.clear()  # of the trials
    prompts = [[5, 6, 7, 8, 9], [11], [20, 21, 22], [30, 31, 32, 33]]
    decoder = decode.D2F(block_size=4, tau_conf=0.5, max_new_tokens=24)
    fast = decode.generate(model, prompts, decoder, batch_size=4)
    assert calls
    plain = decode.generate(random_model("llada"), prompts, decoder, batch_size=4)
    assert [r.raw_tokens for r in fast] == [r.raw_tokens for r in plain]


@pytest.mark.parametrize("told", ["0", None])
def test_without_it_the_plain_one_computes(told, monkeypatch):
    def broken():
        raise OSError("no such file: g++")

    monkeypatch.setattr("d2f.cpu.rows.fits", lambda backbone: False)
    monkeypatch.setattr(native, "library", broken)
    native.can_attend.cache_clear()
    model = fresh_model("causal")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if told is not None:
            monkeypatch.setenv("D2F_KERNELS", told)
        model.compile()
    native.can_attend.cache_clear()
    warned = [str(w.message) for w in said if "attention in C++" in str(w.message)]
    assert warned == (
        []
        if told
        else ["attention in C++ does not work here, the plain one is used: no such file: g++"]
    )
    fast = decode.generate(model, [[5, 6, 7]], decode.Autoregressive(8))
    assert (
        fast[0].raw_tokens
        == decode.generate(random_model("causal"), [[5, 6, 7]], decode.Autoregressive(8))[
            0
        ].raw_tokens
    )


def test_many_rows_on_many_slots_are_for_tiled_attention():
    few = torch.tensor([[[0, 100]]] * 16, dtype=torch.int32)
    many = torch.tensor([[[0, 1000]]] * 64, dtype=torch.int32)
    assert native.pays(few, 1)
    assert not native.pays(many, 1)
    assert native.pays(torch.cat([many[:1]] * 16), 16)
