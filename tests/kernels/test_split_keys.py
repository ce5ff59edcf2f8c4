"""Keys split over programs: as many splits as a row's spans are worth, which the kernel decides on
the device, and never so many that joining them is a large part of the work."""

from __future__ import annotations

import pytest
import torch

from triton_kernels import span_attention as tiles
from triton_kernels.span_attention import span_attention

LLADA = (32, 32, 128)  # heads, key heads, head dimension of LLaDA-8B
DREAM = (28, 4, 128)


def tensors(rows, slots, heads, kv_heads, dim, device="cpu", dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    shapes = ((rows, heads, dim), (kv_heads, slots, dim), (kv_heads, slots, dim))
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


@pytest.fixture
def used(monkeypatch):
    """The splits that computed for each tile, of each call that joined some."""
    seen = []

    class Watched:
        def __getitem__(self, grid):
            def launch(part, most, total, used, *rest, **sizes):
                seen.append(used.tolist())
                return join[grid](part, most, total, used, *rest, **sizes)

            return launch

    join = tiles._join
    monkeypatch.setattr(tiles, "_join", Watched())
    return seen


def check(q, k, v, spans):
    got, want = (span_attention(q, k, v, spans, kernel=kernel) for kernel in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return got


@pytest.mark.parametrize("least", [1, 40, 150, 1000])
def test_split_keys_are_joined_to_the_same_output(device, monkeypatch, used, least):
    """However many splits compute: eight, some, or one of the eight that the grid has."""
    monkeypatch.setattr(tiles.Shape, "splits", lambda self: 8)
    monkeypatch.setattr(tiles.Shape, "least_keys", lambda self: least)
    rows = [[[0, 300], [300, 300]], [[290, 300], [0, 7]], [[4, 4], [9, 9]], [[150, 151], [0, 1]]]
    spans = torch.tensor(rows, dtype=torch.int32, device=device)
    got = check(*tensors(4, 300, 4, 2, 32, device=device), spans)
    assert got[2].abs().max().item() == 0.0, "a row that sees nothing"
    # The first ranges reach over 300 keys, the second over 7.
    assert used == [[max(1, min(307 // least, 8))]]


def test_a_row_of_few_keys_is_not_split_in_a_long_cache(device, used):
    """Other requests' slots are no reason: 16 rows see 100 keys of 2,048, the next 16 all."""
    spans = torch.tensor([[[1000, 1100]]] * 16 + [[[0, 2048]]] * 16, dtype=torch.int32)
    args = tensors(32, 2048, 2, 2, 32, device=device)
    assert tiles.Shape(*args, spans).splits() == 16
    check(*args, spans.to(device))
    assert used == [[1, 16]]


def test_a_grid_of_splits_follows_from_sizes_alone():
    """A CUDA graph replays it, whatever the rows of the next forward see."""
    for slots, splits in ((512, 1), (4096, 4), (65536, 8)):
        assert shape_of(torch.empty(64, 3, 2, device="meta"), slots, *LLADA).splits() == splits


def shape_of(spans, slots, heads, kv_heads, dim):
    """Of a call in bf16."""
    q = torch.empty(len(spans), heads, dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(kv_heads, slots, dim, dtype=torch.bfloat16, device="meta")
    return tiles.Shape(q, k, k, spans)
