"""Span attention: the plain PyTorch computation, and its place inside transformers' models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import d2f.attention
import triton_kernels.span_attention
from d2f import spans as sp
from d2f.attention import Segment, SpanPlan, span_attention_forward
from triton_kernels.span_attention import (
    HEAD_DIMS,
    span_attention,
    span_attention_reference,
    span_mask,
)

HEADS = [(4, 4), (4, 2), (7, 1), (28, 4)]


@st.composite
def spans_over(draw, queries, keys, k=None):
    """Random spans: cut points in order make ranges that cannot overlap; their order is free."""
    k = k or draw(st.integers(1, 3))
    point = st.integers(0, keys)
    rows = []
    for _ in range(queries):
        cuts = sorted(draw(st.lists(point, min_size=2 * k, max_size=2 * k)))
        rows.append(draw(st.permutations(list(zip(cuts[::2], cuts[1::2], strict=True)))))
    return torch.tensor(rows, dtype=torch.int32)


@st.composite
def problems(draw):
    """q, k, v in fp32 and spans for a batch, with grouped heads."""
    heads, kv_heads = draw(st.sampled_from(HEADS))
    shape = st.tuples(st.integers(1, 2), st.integers(1, 6), st.integers(1, 19))
    batch, queries, keys = draw(shape)
    rng = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    q = torch.randn(batch, heads, queries, 8, generator=rng)
    k, v = (torch.randn(batch, kv_heads, keys, 8, generator=rng) for _ in range(2))
    rows = draw(st.integers(1, batch))
    rows = 1 if rows < batch else batch  # spans of the whole batch, or of each sample
    ranges = draw(st.integers(1, 3))
    spans = torch.stack([draw(spans_over(queries, keys, ranges)) for _ in range(rows)])
    return q, k, v, spans


def one_by_one(q, k, v, spans, scale=None):
    """The definition, a query at a time, in fp64."""
    q, k, v = q.double(), k.double(), v.double()
    scale = scale or q.shape[-1] ** -0.5
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for t, ranges in enumerate(spans[b % len(spans)].tolist()):
            keys = sorted({key for start, end in ranges for key in range(start, end)})
            for h in range(q.shape[1]):
                if keys:
                    weights = (k[b, h // group, keys] @ q[b, h, t] * scale).softmax(0)
                    out[b, h, t] = weights @ v[b, h // group, keys]
    return out


def plainly(q, k, v, spans, scale=None):
    """Scores, softmax and weighted sum in the dtype of the inputs: the error one may make."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~span_mask(spans, k.shape[2])[:, None], float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


@given(st.data())
def test_mask_holds_exactly_the_keys_of_the_spans(data):
    keys, first = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 10))
    spans = data.draw(spans_over(4, first + keys + 5))
    mask = span_mask(spans, keys, first)
    want = [
        [any(a <= key < b for a, b in row) for key in range(first, first + keys)]
        for row in spans.tolist()
    ]
    assert mask.tolist() == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(problem=problems(), scale=st.none() | st.just(1.7))
def test_reference_errs_no_more_than_the_plain_computation(dtype, problem, scale):
    """Against the definition in fp64, with one rounding of the largest value as margin."""
    q, k, v = (x.to(dtype) for x in problem[:3])
    spans = problem[3]
    truth = one_by_one(q, k, v, spans, scale)
    out = span_attention_reference(q, k, v, spans, scale=scale)
    assert out.dtype == dtype
    assert out.shape == q.shape
    allowed = (plainly(q, k, v, spans, scale).double() - truth).abs().max()
    margin = torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())
    assert (out.double() - truth).abs().max() <= allowed + margin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [1, 5])
def test_a_query_without_keys_gives_exactly_zero_and_no_bad_gradient(dtype, queries):
    """Padding rows see nothing; neither their output nor their gradient may spoil a batch."""
    q, k, v = (torch.randn(1, 4, n, 8, dtype=dtype, requires_grad=True) for n in (queries, 9, 9))
    spans = sp.pack([sp.causal(queries // 2)], queries)[None]
    out = span_attention_reference(q, k, v, spans)
    assert (out[:, :, queries // 2 :] == 0).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[:, :, queries // 2 :] == 0).all()


def test_keys_outside_the_spans_do_not_matter():
    """Stale slots of a cache must not reach the result, to the bit."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, 8) for n in (6, 12, 12))
    spans = sp.shift(sp.causal(6), 3)
    before = span_attention_reference(q, k, v, spans[None])
    k[:, :, :3], v[:, :, 9:] = 1e4, -1e4
    assert torch.equal(span_attention_reference(q, k, v, spans[None]), before)


def test_heads_that_do_not_divide_are_an_error():
    q, k = torch.zeros(1, 6, 2, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="6 query heads do not share 4 key heads"):
        span_attention_reference(q, k, k, sp.causal(2)[None])


@settings(max_examples=25)
@given(st.data())
def test_segments_of_a_flat_batch_equal_each_request_alone(data):
    """To the bit: what else is in the batch cannot reach a request."""
    heads, kv_heads = data.draw(st.sampled_from(HEADS))
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 11)), min_size=1, max_size=4)
    )
    k_spans = data.draw(st.integers(1, 3))
    alone = [data.draw(spans_over(rows, slots, k=k_spans)) for rows, slots in shapes]
    gap = data.draw(st.integers(0, 3))  # slots between requests belong to nobody

    segments, absolute, row, slot = [], [], 0, gap
    for (rows, slots), spans in zip(shapes, alone, strict=True):
        segments.append(Segment(slice(row, row + rows), slice(slot, slot + slots)))
        absolute.append(sp.shift(spans, slot))
        row, slot = row + rows, slot + slots + gap
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    q = torch.randn(1, heads, row, 8, generator=rng)
    k, v = (torch.randn(1, kv_heads, slot, 8, generator=rng) for _ in range(2))

    plan = SpanPlan(torch.cat(absolute), segments)
    out, _ = span_attention_forward(None, q, k, v, None, spans=plan)
    for part, spans in zip(segments, alone, strict=True):
        own = (q[:, :, part.rows], k[:, :, part.slots], v[:, :, part.slots])
        want, _ = span_attention_forward(None, *own, None, spans=SpanPlan(spans))
        assert torch.equal(out[:, part.rows], want)
    whole, _ = span_attention_forward(None, q, k, v, None, spans=SpanPlan(torch.cat(absolute)))
    assert torch.allclose(out, whole, rtol=1e-5, atol=1e-6), "segments change no value"


def test_a_plan_builds_a_mask_no_larger_than_its_segment():
    spans = torch.cat([sp.shift(sp.causal(3), 10), sp.shift(sp.causal(2), 40)])
    plan = SpanPlan(
        spans, [Segment(slice(0, 3), slice(10, 13)), Segment(slice(3, 5), slice(40, 44))]
    )
    assert plan.segment_mask(0).tolist() == torch.ones(1, 3, 3).tril().bool().tolist()
    assert plan.segment_mask(1).int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0]]]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_a_whole_segment_needs_no_mask(heads, kv_heads):
    """What its rows see without one is what they see under a mask of all slots, beside a request
    that has one."""
    torch.manual_seed(0)
    q = torch.randn(1, heads, 7, 8)
    k, v = (torch.randn(1, kv_heads, 20, 8) for _ in range(2))
    spans = torch.cat([sp.shift(sp.bidirectional(9)[:4], 2), sp.shift(sp.causal(3), 12)])
    parts = [Segment(slice(0, 4), slice(2, 11)), Segment(slice(4, 7), slice(12, 15))]
    want, _ = span_attention_forward(None, q, k, v, None, spans=SpanPlan(spans, parts))
    whole = SpanPlan(spans, [Segment(slice(0, 4), slice(2, 11), whole=True), parts[1]])
    assert whole.segment_mask(0) is None
    out, _ = span_attention_forward(None, q, k, v, None, spans=whole)
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-6)


def test_a_model_refuses_a_forward_without_spans(llada):
    """Else transformers would run with no mask at all, silently."""
    with pytest.raises(ValueError, match="needs spans"):
        llada.backbone(torch.tensor([[5, 6, 7]]))


def test_spans_decide_what_a_model_sees(llada):
    """A token changes the rows that see it, and no other."""
    ids = torch.arange(4, 16)[None]
    other = ids.clone()
    other[0, 6] = 50
    spans = sp.block_causal(12, 4, 4)
    with torch.inference_mode():
        changed = (llada.forward(ids, spans) != llada.forward(other, spans)).any(-1)[0]
    assert changed.tolist() == [False] * 4 + [True] * 8


def test_packed_sequences_equal_each_alone(dream):
    """Packing by spans, with positions that start again: what training on packed rows relies on."""
    parts = [torch.arange(4, 11), torch.arange(30, 35)]
    masks = [sp.block_causal(7, 2, 3), sp.block_causal(5, 0, 2)]
    row = torch.cat([*parts, torch.zeros(3, dtype=torch.long)])[None]
    positions = torch.cat([torch.arange(7), torch.arange(5), torch.arange(3)])[None]
    with torch.inference_mode():
        packed = dream.forward(row, sp.pack(masks, 15), positions)[0]
        first, second = (
            dream.forward(ids[None], mask)[0] for ids, mask in zip(parts, masks, strict=True)
        )
    assert torch.allclose(packed[:7], first, rtol=1e-5, atol=1e-5)
    assert torch.allclose(packed[7:12], second, rtol=1e-5, atol=1e-5)
    assert packed.isfinite().all()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_runs_the_kernel_in_every_layer_where_it_is_chosen(llada, monkeypatch, batch):
    """As on a GPU; a batch is laid out flat, each sample with its spans."""
    calls = []

    def spied(*args, **options):
        calls.append(options)
        return span_attention(*args, **options)

    ids = torch.arange(4, 4 + 8 * batch).view(batch, 8)
    spans = torch.stack([sp.causal(8), sp.block_causal(8, 3, 2)])[:batch]
    with torch.inference_mode():
        want = llada.forward(ids, spans)
        monkeypatch.setattr(d2f.attention, "span_attention", spied)
        monkeypatch.setattr(triton_kernels.span_attention, "HEAD_DIMS", (16, *HEAD_DIMS))
        got = llada.forward(ids, SpanPlan(spans, way="kernel"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(calls) == llada.backbone.config.num_hidden_layers
