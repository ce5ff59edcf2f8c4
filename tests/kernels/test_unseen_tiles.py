"""Which tiles of keys the attention kernel visits: all that one of its queries sees, once, and
no others."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
