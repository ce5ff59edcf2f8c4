"""Which tiles of keys the attention kernel visits: all that one of its queries sees, once, and of
the others hardly any, as the engine feeds rows in the order of their slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import random_model

import decode
from decode.engine import engine
from decode.engine.engine import Engine
from decode.engine.request import Request
from triton_kernels.span_attention import Shape, span_attention


def visited(ranges: np.ndarray, width: int) -> list[int]:
    """First keys of the tiles, `width` keys wide, that the kernel's loop visits for the queries of
    a tile, of whose ranges ``[Q, 2]`` it is at one: `span_attention_tiles.unseen_tiles` and
    `_forward` once more, in numpy."""
    some = ranges[:, 1] > ranges[:, 0]
    starts, ends = np.where(some, ranges[:, 0], 2**31 - 1), np.where(some, ranges[:, 1], 0)
    low, high = int(starts.min()), int(ends.max())
    if low >= high:
        return []
    before = np.maximum.accumulate(np.concatenate(([low], ends)))[:-1]
    behind = np.minimum.accumulate(starts[::-1])[::-1]
    first = -(-(before - low) // width)
    count = np.where(some, np.maximum((behind - low) // width - first, 0), 0)
    gap = first - (np.cumsum(count) - count)
    tiles = -(-(high - low) // width) - count.sum()
    return [int(low + (i + count[i >= gap].sum()) * width) for i in range(tiles)]


def seen(ranges: np.ndarray) -> set[int]:
    return {key for start, end in ranges.tolist() for key in range(start, end)}


@st.composite
def queries(draw):
    """Ranges of some requests' queries, mostly in the order of their slots; some see nothing."""
    found, base = [], 0
    for _ in range(draw(st.integers(1, 5))):
        base += draw(st.integers(0, 150))
        end = base + draw(st.integers(1, 90))
        for _ in range(draw(st.integers(1, 3))):
            start = base + draw(st.integers(0, 3))
            found.append(draw(st.sampled_from([(start, max(end, start)), (0, 0)])))
        base = end
    return np.array(draw(st.sampled_from([found, found, found[::-1], sorted(found, key=hash)])))


@settings(max_examples=200)
@given(queries(), st.sampled_from([1, 4, 32]))
def test_every_key_that_is_seen_is_in_one_tile_that_is_visited(ranges, width):
    tiles = visited(ranges, width)
    assert len(tiles) == len(set(tiles))
    covered = {key for first in tiles for key in range(first, first + width)}
    assert seen(ranges) <= covered


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ranges=queries())
def test_the_kernel_loads_no_other_tile(device, ranges):
    """Keys that it must not load are NaN, which a weight of 0 would not hide."""
    spans = torch.from_numpy(ranges).to(torch.int32)[:, None]
    slots = int(ranges.max(initial=1))
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=rng) for s in ((len(spans), 2, 32), *[(2, slots, 32)] * 2))
    want = span_attention(q, k, v, spans, kernel=False)
    shape = Shape(q, k, v, spans)
    loaded = np.zeros(slots, dtype=bool)
    for tile in range(0, len(ranges), shape.tile):
        for first in visited(ranges[tile : tile + shape.tile], shape.keys):
            loaded[first : first + shape.keys] = True
    k[:, ~loaded], v[:, ~loaded] = torch.nan, torch.nan
    got = span_attention(*(x.to(device) for x in (q, k, v, spans)), kernel=True)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def recorded(decoder: decode.Decoder, batch: int) -> list[np.ndarray]:
    """The spans of every forward of a run in which requests come and go."""
    model, draw = random_model("llada"), np.random.default_rng(batch)
    requests = [
        Request(i, draw.integers(8, 200, n).tolist(), decoder, model.contract, None)
        for i, n in enumerate(draw.integers(20, 160, batch + 4))
    ]
    sizes = sorted((request.session.slots for request in requests), reverse=True)
    runner, found = Engine(model, batch_size=batch, slots=sum(sizes[:batch])), []
    real = engine.join

    def keep(fed):
        flat = real(fed)
        found.append(flat.spans)
        return flat

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "join", keep)
        for request in requests:
            runner.submit(request)
        list(runner.run())
    return found


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(
    "decoder",
    [
        decode.D2F(4, tau_conf=0.2, max_new_tokens=32),
        decode.D2F(16, tau_conf=0.2, max_new_tokens=48),
        decode.WeDLM(8, max_new_tokens=24),
    ],
    ids=lambda decoder: f"{decoder.name}-{getattr(decoder, 'block_size', '')}",
)
def test_real_forwards_visit_at_most_1_3_times_the_tiles_that_they_need(decoder, batch):
    """Needed are as many tiles as the keys that a tile of queries sees fill, wherever they lie."""
    forwards = recorded(decoder, batch)
    for rows, width in ((16, 64), (64, 64), (64, 32)):
        loops = needed = 0
        for spans in forwards:
            for first in range(0, len(spans), rows):
                for ranges in spans[first : first + rows].swapaxes(0, 1):
                    loops += len(visited(ranges, width))
                    needed += -(-len(seen(ranges)) // width)
        assert needed
        assert loops <= 1.3 * needed, (rows, width, loops / needed)
