"""flex_attention sees what spans say, at more shapes than dynamo would compile of itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from d2f import spans as sp
from d2f.attention import SpanPlan
from triton_kernels import flex


def tensors(rows, keys, device="cpu", dim=16):
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, 4, rows, dim), (2, 2, keys, dim), (2, 2, keys, dim))
    return [torch.randn(shape, generator=rng).to(device) for shape in shapes]


@pytest.fixture
def traced(monkeypatch):
    """Compiled without a compiler behind it, which would take seconds a shape."""
    flex._compiled.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(flex.torch, "compile", partial(torch.compile, backend="eager"))
    limit = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = limit
    flex._compiled.cache_clear()
    torch._dynamo.reset()


def attend(spans, q, k, v, way):
    return SpanPlan(spans, way=way).attend(None, q, k, v)


def test_every_mask_is_the_plain_one(traced, mask):
    spans, keys = mask
    q, k, v = tensors(len(spans), keys)
    got, want = (attend(spans, q, k, v, way) for way in ("flex", "sdpa"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_many_shapes_are_each_compiled_and_a_shape_once(traced):
    """Beyond dynamo's limit of 8 it would run uncompiled, with all scores in memory."""
    counters.clear()
    for rows in range(16, 25):
        q, k, v = tensors(rows, rows)
        for spans in (sp.causal(rows), sp.bidirectional(rows)):
            attend(spans, q, k, v, "flex")
    assert counters["stats"]["unique_graphs"] == 9


def test_beyond_its_own_limit_it_is_an_error_and_not_slow(traced, monkeypatch):
    monkeypatch.setattr(flex, "_SHAPES", 2)
    # Its own patch: set back by pytest, a limit would be gone for the tests after it.
    limit = torch._dynamo.config.patch(recompile_limit=2)
    with limit, pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for rows in range(16, 20):
            attend(sp.causal(rows), *tensors(rows, rows), "flex")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it has no backward on a CPU")
def test_gradients_are_the_plain_ones(mask):
    spans, keys = mask[0].cuda(), mask[1]
    inputs = [x.requires_grad_() for x in tensors(len(spans), keys, "cuda", dim=64)]
    found = []
    for way in ("flex", "sdpa"):
        out = attend(spans, *inputs, way)
        upstream = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
        found.append([out, *torch.autograd.grad(out, inputs, upstream)])
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-2)  # TF32 within flex
