"""The span attention kernels against the plain computation: attention, which tiles of keys it
visits, its splits, and slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_kernels import span_attention as tiles
from triton_kernels.span_attention import HEAD_DIMS, can_run, span_attention, write_slots

HEADS = [(4, 4), (7, 1), (28, 4), (6, 2)]


@st.composite
def spans_over(draw, queries, keys):
    """Spans apart from each other, in any order; some empty."""
    k = draw(st.integers(1, 3))
    rows = []
    for _ in range(queries):
        cuts = sorted(draw(st.lists(st.integers(0, keys), min_size=2 * k, max_size=2 * k)))
        rows.append(draw(st.permutations(list(zip(cuts[::2], cuts[1::2], strict=True)))))
    return torch.tensor(rows, dtype=torch.int32)


def tensors(queries, slots, heads, kv_heads, dim, seed=0, device="cpu", dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads, dim), (kv_heads, slots, dim), (kv_heads, slots, dim))
    return [torch.randn(s, generator=rng).to(device, dtype) for s in shapes]


def equal(q, k, v, spans, scale=None):
    got, want = (
        span_attention(q, k, v, spans, scale=scale, kernel=kernel) for kernel in (True, False)
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return got


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_equals_the_reference(device, data):
    heads, kv_heads = data.draw(st.sampled_from(HEADS))
    queries, slots = data.draw(st.integers(1, 21)), data.draw(st.integers(1, 90))
    spans = data.draw(spans_over(queries, slots)).to(device)
    scale = data.draw(st.sampled_from([None, 0.3]))
    equal(*tensors(queries, slots, heads, kv_heads, 32, device=device), spans, scale=scale)


def test_the_masks_of_decoding_and_training(device, mask):
    spans, keys = mask
    equal(*tensors(len(spans), keys, 7, 1, 32, device=device), spans.to(device))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dimension(device, dim):
    spans = torch.tensor([[[0, 20]], [[3, 19]], [[5, 5]]], dtype=torch.int32, device=device)
    equal(*tensors(3, 20, 2, 1, dim, device=device), spans)


def test_half_precision_errs_no_more_than_the_plain_computation(device, dtype):
    rng = torch.Generator().manual_seed(4)
    ends = torch.randint(1, 130, (33, 1, 1), generator=rng)
    spans = torch.cat((torch.zeros_like(ends), ends), -1).to(device, torch.int32)
    args = tensors(33, 130, 4, 2, 64, device=device, dtype=dtype)
    truth = span_attention(*(x.double() for x in args), spans, kernel=False)
    theirs, got = (span_attention(*args, spans, kernel=kernel) for kernel in (False, True))
    margin = 4 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())
    allowed = (theirs.double() - truth).abs().max() + margin
    assert (got.double() - truth).abs().max() <= allowed


def test_tensors_that_are_not_contiguous(device):
    spans = torch.tensor([[[0, 9]], [[2, 5]]], dtype=torch.int32, device=device)
    q, k, v = tensors(2, 9, 2, 2, 32, device=device)
    want = span_attention(q, k, v, spans, kernel=False)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    strided = [torch.stack((x, x), -1)[..., 0] for x in (q, k, v)]
    wide = torch.stack((spans, spans), 1)[:, 0]
    for parts in (turned, strided):
        torch.testing.assert_close(span_attention(*parts, wide, kernel=True), want)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(1, 3)), min_size=2,
                max_size=5))  # fmt: skip
def test_keys_between_the_requests_of_a_tile_are_not_loaded(device, requests):
    """A tile of keys that no query sees is NaN here, which a weight of 0 would not hide. requests:
    keys that nobody sees, keys of the request, its rows, of which the last sees nothing."""
    ranges, end = [], 0
    for unseen, seen, rows in requests:
        start, end = end + unseen + 64, end + unseen + 64 + seen
        ranges += [(start, end)] * rows + [(0, 0)]
    spans = torch.tensor(ranges, dtype=torch.int32)[:, None]
    q, k, v = tensors(len(spans), end, 2, 2, 32)
    want = span_attention(q, k, v, spans, kernel=False)
    # Tiles begin at the first key that a tile of queries sees, so one may reach that far beyond.
    tile = tiles.Shape(q, k, v, spans).keys
    loaded = torch.zeros(end, dtype=torch.bool)
    for start, stop in ranges:
        loaded[max(0, start - tile + 1) : stop + tile - 1] |= stop > start
    assert not loaded.all()
    k[:, ~loaded], v[:, ~loaded] = torch.nan, torch.nan
    got = span_attention(*(x.to(device) for x in (q, k, v, spans)), kernel=True)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.fixture
def used(monkeypatch):
    """The splits that computed for each tile, of each call that joined some."""
    seen, join = [], tiles._join

    class Watched:
        def __getitem__(self, grid):
            def launch(part, most, total, used, *rest, **sizes):
                seen.append(used.tolist())
                return join[grid](part, most, total, used, *rest, **sizes)

            return launch

    monkeypatch.setattr(tiles, "_join", Watched())
    return seen


@pytest.mark.parametrize("least", [1, 40, 150, 1000])
def test_split_keys_are_joined_to_the_same_output(device, monkeypatch, used, least):
    """However many splits compute: eight, some, or one of the eight that the grid has."""
    monkeypatch.setattr(tiles.Shape, "splits", lambda self: 8)
    monkeypatch.setattr(tiles.Shape, "least_keys", lambda self: least)
    rows = [[[0, 300], [300, 300]], [[290, 300], [0, 7]], [[4, 4], [9, 9]], [[150, 151], [0, 1]]]
    spans = torch.tensor(rows, dtype=torch.int32, device=device)
    got = equal(*tensors(4, 300, 4, 2, 32, device=device), spans)
    assert got[2].abs().max().item() == 0.0, "a row that sees nothing"
    # The first ranges reach over 300 keys, the second over 7.
    assert used == [[max(1, min(307 // least, 8))]]


def test_a_row_of_few_keys_is_not_split_in_a_long_cache(device, used):
    """Other requests' slots are no reason: 16 rows see 100 keys of 2,048, the next 16 all."""
    spans = torch.tensor([[[1000, 1100]]] * 16 + [[[0, 2048]]] * 16, dtype=torch.int32)
    args = tensors(32, 2048, 2, 2, 32, device=device)
    assert tiles.Shape(*args, spans).splits() == 16
    equal(*args, spans.to(device))
    assert used == [[1, 16]]


@pytest.mark.parametrize(("slots", "splits"), [(512, 1), (4096, 4), (65536, 8)])
def test_a_grid_of_splits_follows_from_sizes_alone(slots, splits):
    """A CUDA graph replays it, whatever the rows of the next forward see. LLaDA-8B in bf16."""
    q = torch.empty(64, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(32, slots, 128, dtype=torch.bfloat16, device="meta")
    assert tiles.Shape(q, k, k, torch.empty(64, 3, 2, device="meta")).splits() == splits


def test_keys_and_values_are_written_to_their_slots_only(device):
    k, v = (torch.full((2, 7, 80), float("nan"), device=device) for _ in range(2))
    keys = torch.randn(3, 2, 80, device=device).transpose(0, 1)
    values = torch.randn(2, 3, 80, device=device)
    slots = torch.tensor([5, 0, 3], device=device)
    write_slots(k, v, slots, keys, values, kernel=True)
    assert torch.equal(k[:, slots], keys) and torch.equal(v[:, slots], values)
    assert k[:, [1, 2, 4, 6]].isnan().all() and v[:, [1, 2, 4, 6]].isnan().all()


def test_a_gpu_with_too_little_memory_for_a_tile_gets_a_smaller_one():
    from triton.runtime.errors import OutOfResources

    tried = []

    def launch(keys):
        tried.append(keys)
        if keys > 16:
            raise OutOfResources(300_000, 200_000, "shared memory")

    tiles.with_tile(64, launch)
    assert tried == [64, 32, 16]
    with pytest.raises(OutOfResources):
        tiles.with_tile(16, lambda keys: launch(64))


def test_fp64_and_no_rows_are_the_references(device):
    spans = torch.tensor([[[0, 3]]], dtype=torch.int32, device=device)
    q, k, v = tensors(1, 3, 2, 2, 5, device=device, dtype=torch.float64)
    assert span_attention(q, k, v, spans, kernel=True).dtype == torch.float64
    empty = span_attention(*tensors(0, 3, 2, 2, 32, device=device), spans[:0], kernel=True)
    assert empty.shape == (0, 2, 32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spans": [[[0, 6]], [[0, 1]]]}, r"outside the keys \[0, 5\)"),
        ({"spans": [[[0, 1]]]}, r"int32 \[2, K, 2\]"),
        ({"q": (2, 3, 32)}, "3 query heads do not share 2 key heads"),
        ({"q": (2, 4, 16)}, r"got \[2, 4, 16\], \[2, 5, 32\]"),
        ({"q": (2, 4, 40), "k": (2, 5, 40), "v": (2, 5, 40)}, "head dimension must be one of"),
    ],
)
def test_a_misfit_is_refused_by_name(change, says):
    shapes = {"q": (2, 4, 32), "k": (2, 5, 32), "v": (2, 5, 32)}
    args = [torch.zeros(change.get(name, shape)) for name, shape in shapes.items()]
    spans = torch.tensor(change.get("spans", [[[0, 1]], [[0, 1]]]), dtype=torch.int32)
    with pytest.raises(ValueError, match=says):
        span_attention(*args, spans, kernel=True)


def test_what_wants_a_gradient_is_the_references(device):
    """The kernel has no backward: chosen of itself it stands back, asked for it says so."""
    spans = torch.tensor([[[0, 3]]], dtype=torch.int32, device=device)
    q, k, v = tensors(1, 3, 2, 2, 32, device=device)
    assert can_run(q, k, v)
    for x in (q, k, v):
        x.requires_grad_()
        assert not can_run(q, k, v)
        with pytest.raises(ValueError, match="no backward, and a gradient is wanted"):
            span_attention(q, k, v, spans, kernel=True)
        with torch.no_grad():
            assert can_run(q, k, v)
            span_attention(q, k, v, spans, kernel=True)
        assert span_attention(q, k, v, spans).requires_grad
        x.requires_grad_(False)


def test_mixed_dtypes_are_refused():
    spans = torch.zeros(2, 1, 2, dtype=torch.int32)
    q, k = torch.zeros(2, 2, 32), torch.zeros(2, 5, 32)
    with pytest.raises(ValueError, match="share one floating dtype, got float16, float32"):
        span_attention(q, k.half(), k.half(), spans)
