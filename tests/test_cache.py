"""The slot cache: what is fed is rewritten, what is not fed stays."""

from itertools import pairwise

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d2f import spans as sp
from d2f.attention import Segment, SpanPlan
from d2f.cache import SlotPool


@given(st.integers(1, 24), st.lists(st.integers(1, 12) | st.just("free"), max_size=40), st.data())
def test_pool_gives_runs_that_never_overlap_wherever_one_is_free(slots, wishes, data):
    """First fit: the lowest free run that is long enough, None only where there is none."""
    pool, owned = SlotPool(slots), {}
    for wish in wishes:
        if wish == "free":
            if owned:
                start = data.draw(st.sampled_from(sorted(owned)))
                pool.free(start)
                del owned[start]
            continue
        if wish > slots:
            with pytest.raises(ValueError, match=f"{wish} slots cannot fit in a cache of {slots}"):
                pool.allocate(wish)
            continue
        taken = {slot for start, count in owned.items() for slot in range(start, start + count)}
        fits = [
            start
            for start in range(slots - wish + 1)
            if not taken & set(range(start, start + wish))
        ]
        got = pool.allocate(wish)
        assert got == (fits[0] if fits else None)
        if got is not None:
            owned[got] = wish
    for start in list(owned):
        pool.free(start)
    assert pool.allocate(slots) == 0, "all is given back"


def feed(model, cache, tokens, slots, spans):
    """Logits of all rows fed, position = slot."""
    cache.slots = torch.tensor(slots)
    with torch.inference_mode():
        return model.decode_rows(
            torch.tensor(tokens), cache.slots, SpanPlan(spans), cache, torch.arange(len(slots))
        )


def test_a_cache_takes_memory_only_as_it_is_written(llada):
    """Also as zeros: room for long requests is made before the first of them comes."""
    process = psutil.Process()
    before = process.memory_info().rss
    cache = llada.new_cache(1 << 21)
    size = sum(part.nbytes for layer in cache.layers for part in layer)
    assert size > 1 << 28 and not any(part[..., -9:, :].any() for part in cache.layers[-1])
    assert process.memory_info().rss - before < size / 8


def test_feeding_a_row_again_overwrites_its_slot_and_no_other(llada):
    cache = llada.new_cache(10)
    feed(llada, cache, [5, 6, 7, 8], [2, 3, 4, 5], sp.shift(sp.causal(4), 2))
    before = [(k.clone(), v.clone()) for k, v in cache.layers]
    feed(llada, cache, [40], [4], torch.tensor([[[2, 5]]], dtype=torch.int32))
    for layer, old in zip(cache.layers, before, strict=True):
        for new, was in zip(layer, old, strict=True):
            changed = (new != was).any(-1).any(1)[0]
            assert changed.nonzero().flatten().tolist() == [4]


def test_only_the_rows_read_get_logits(dream):
    cache = dream.new_cache(4)
    cache.slots = torch.arange(4)
    args = (torch.tensor([5, 6, 7, 8]), torch.arange(4), SpanPlan(sp.causal(4)), cache)
    with torch.inference_mode():
        every = dream.decode_rows(*args, torch.arange(4))
        some = dream.decode_rows(*args, torch.tensor([3, 1]))
    assert torch.allclose(some, every[[3, 1]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llada", "dream"])
@settings(max_examples=15)
@given(data=st.data())
def test_cached_blocks_give_the_uncached_logits(family, data, request):
    """D2F's exact cache. Each block is fed twice with noise (masks), once with its final tokens
    and then never again; its last logits are those of one uncached block-causal forward, to fp32
    rounding, although the buffer begins full of another request's leavings."""
    model = request.getfixturevalue(family)
    prompt, size = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    length = prompt + data.draw(st.integers(1, 20))
    base = data.draw(st.integers(0, 5))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    ids = torch.randint(4, 96, (length,), generator=rng)
    spans = sp.block_causal(length, prompt, size)
    with torch.inference_mode():
        want = model.forward(ids[None], spans)[0]

    cache = model.new_cache(base + length + 3)
    for buffers in cache.layers:
        for buffer in buffers:
            buffer.normal_(std=10.0, generator=rng)
    edges = [0, *range(prompt, length, size), length]
    got = []
    for start, end in pairwise(edges):
        rows = torch.arange(start, end)
        cache.slots = rows + base
        plan_spans = sp.shift(spans[start:end], base)
        segment = Segment(slice(0, end - start), slice(base, base + end))
        for noisy in (True, True, False):
            keep = torch.rand(end - start, generator=rng) < 0.5
            fed = torch.where(keep, ids[rows], 3) if noisy else ids[rows]
            with torch.inference_mode():
                logits = model.decode_rows(
                    fed, rows, SpanPlan(plan_spans, [segment]), cache, torch.arange(end - start)
                )
        got.append(logits)
    error = (torch.cat(got) - want).abs().max() / want.abs().max()
    assert error < 1e-5
