"""A training step's attention in parts: each part has the keys that it needs, and gives what all of
them at once give."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from d2f import spans as sp
from d2f.attention import Segment, SpanPlan
from distill.objectives.base import TrainingPlan, parts_of

NONE = torch.zeros(0, dtype=torch.int64)  # places that are read: attention does not ask


def test_a_part_reaches_from_its_first_to_its_last_key():
    spans = sp.block_causal(6, 2, 2)[None]
    assert parts_of(spans, 3) == [
        Segment(slice(0, 3), slice(0, 4)),
        Segment(slice(3, 6), slice(0, 6)),
    ]
    assert parts_of(spans, 2) == [
        Segment(slice(first, first + 2), slice(0, first + 2), whole=True) for first in (0, 2, 4)
    ]


def test_two_sequences_of_a_batch_share_their_parts():
    spans = torch.stack([sp.causal(4), sp.bidirectional(4)])
    assert parts_of(spans, 2) == [Segment(slice(a, a + 2), slice(0, 4)) for a in (0, 2)]


def test_rows_that_see_nothing_get_a_masked_key():
    assert parts_of(torch.zeros(1, 3, 1, 2, dtype=torch.int32)) == [
        Segment(slice(0, 3), slice(0, 1))
    ]


@st.composite
def spans(draw):
    """``[B, T, 2, 2]``: of each query none, one or two ranges that do not overlap."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    cuts = st.lists(st.integers(0, length), min_size=4, max_size=4).map(sorted)
    made = draw(st.lists(cuts, min_size=batch * length, max_size=batch * length))
    return torch.tensor(made, dtype=torch.int32).view(batch, length, 2, 2)


@given(spans(), st.integers(1, 5))
def test_parts_give_what_all_keys_at_once_give(spans, rows):
    batch, length = spans.shape[:2]
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    upstream = torch.randn(batch, length, 4, 8)
    plans = SpanPlan(spans, way="sdpa"), TrainingPlan(spans, NONE)
    plans[1].segments = parts_of(spans, rows)
    found = []
    for plan in plans:
        out = plan.attend(None, q, k, v)
        found.append([out, *torch.autograd.grad(out, (q, k, v), upstream)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_flex_attention_is_compiled_outside_a_compiled_layer():
    """Uncompiled it would hold all scores: leaving attention out of a layer's graphs must not
    leave flex_attention as it is."""

    class Layer(torch.nn.Module):
        def forward(self, x, plan):
            return plan.attend(None, x + 1, x + 2, x)  # torch 2.11 needs three tensors

    layer, spans = Layer(), sp.causal(128)[None]
    layer.compile(dynamic=False)
    x = torch.randn(1, 2, 128, 16)
    graphs = []
    for plan in (TrainingPlan(spans, NONE, "sdpa"), TrainingPlan(spans, NONE, "flex")):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            layer(x, plan)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 2]
