"""The forward in C++ gives the hidden states, attention and confidence of the plain one, a row the
same in any batch; other models are compiled, and where it cannot be built nothing is lost."""

from __future__ import annotations

import copy
import ctypes
import gc
import shutil
import warnings
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

import decode
from d2f import cpu
from d2f.attention import Segment, SpanPlan
from d2f.cache import SlotCache
from d2f.compile import CompiledRows
from d2f.convert import build
from d2f.cpu import rows as native
from d2f.cpu import scored
from decode.engine.batch import (
    PredictionRequest,
    Sampler,
    prediction_table,
    table_of,
    wanted_of,
)
from tests.references.predictions import choosing
from triton_kernels.confidence import confidence_reference
from triton_kernels.span_attention import span_attention_reference, write_slots

if shutil.which("g++") is None and shutil.which("clang++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)
if not native.can_pack(random_model("llada").backbone):  # not `fits`, which is tested here
    pytest.skip("layers cannot be packed on this machine", allow_module_level=True)


# Attention (attention.cpp)


class _Layer(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "key", "value")),
        *((name, ctypes.c_int64) for name in ("q_head", "q_row", "key_head", "key_row")),
        *((name, ctypes.c_int64) for name in ("value_head", "value_row")),
        *((name, ctypes.c_void_p) for name in ("places", "keys", "values", "spans", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "slots", "dim")),
        *((name, ctypes.c_int64) for name in ("count", "threads")),
        ("scale", ctypes.c_float),
    )


def attend(query, key, value, places, keys, values, spans, scale, threads=1):
    """Write key and value to their places and attend, in C++."""
    _, heads, rows, dim = query.shape
    spans, out = spans.contiguous(), query.new_empty((1, rows, heads, dim))
    strides = [stride for x in (query, key, value) for stride in x.stride()[1:3]]
    layer = _Layer(
        *(x.data_ptr() for x in (query, key, value)), *strides,
        *(x.data_ptr() for x in (places, keys, values, spans, out)),
        rows, heads, keys.shape[1], keys.shape[2], dim, spans.shape[1], threads, scale,
    )  # fmt: skip
    assert not native.library().write_and_attend(ctypes.byref(layer))
    return out


def plain_attend(query, key, value, places, keys, values, spans, scale):
    write_slots(keys[0], values[0], places, key[0], value[0])
    return span_attention_reference(query, keys, values, spans[None], scale=scale).transpose(1, 2)


@st.composite
def layers(draw):
    """query, key, value, places, keys, values as a layer hands them over, and spans [T, K, 2]."""
    dim, slots = draw(st.sampled_from(native.DIMS)), draw(st.integers(1, 80))
    rows, count = draw(st.integers(1, min(slots, 20))), draw(st.integers(1, 3))
    spans = np.zeros((rows, count, 2), np.int32)
    bounds = st.lists(st.integers(0, slots), min_size=2 * count, max_size=2 * count)
    for row in spans:  # 2 * count sorted ends: ranges that do not overlap, some of them empty
        row.ravel()[:] = sorted(draw(bounds))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (4, 1)]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    new = [
        torch.randn(1, rows, heads, dim, generator=rng).transpose(1, 2)
        for heads in (kv_heads * group, kv_heads, kv_heads)
    ]
    cache = [torch.randn(1, kv_heads, slots, dim, generator=rng) for _ in range(2)]
    places = torch.randperm(slots, generator=rng)[:rows]
    return *new, places, *cache, torch.from_numpy(spans)


@settings(max_examples=100, deadline=None)
@given(layers(), st.sampled_from([0.125, 1.0, 3.0]))
def test_attention_is_as_near_to_fp64_as_plain_attention(layer, scale):
    *inputs, spans = layer
    found = []
    ways = [(plain_attend, torch.float64), (plain_attend, torch.float32), (attend, torch.float32)]
    for compute, dtype in ways:
        given = [x.clone() if x.dtype == torch.int64 else x.to(dtype, copy=True) for x in inputs]
        found.append((compute(*given, spans, scale).double(), given[4:]))
    (truth, _), (plain, kept), (ours, written) = found
    assert all(map(torch.equal, kept, written))
    error = (ours - truth).abs().max().item()
    assert error <= 2 * (plain - truth).abs().max().item() + 2e-6, error


@settings(max_examples=50, deadline=None)
@given(layers(), st.data())
def test_attention_of_a_row_depends_on_neither_the_others_nor_the_threads(layer, data):
    query, key, value, places, keys, values, spans = layer
    together = attend(query, key, value, places, keys, values, spans, 0.25)
    bounds = st.lists(st.integers(0, len(spans)), min_size=2, max_size=2, unique=True)
    at = slice(*sorted(data.draw(bounds)))
    part = [x[:, :, at] for x in (query, key, value)]
    alone = attend(*part, places[at], keys, values, spans[at], 0.25, threads=2)
    assert torch.equal(alone, together[:, at])


def test_many_rows_on_many_slots_are_for_tiled_attention():
    few = torch.tensor([[[0, 100]]] * 16, dtype=torch.int32)
    many = torch.tensor([[[0, 1000]]] * 64, dtype=torch.int32)
    assert native._sees_little(few, 1)
    assert not native._sees_little(many, 1)
    assert native._sees_little(torch.cat([many[:1]] * 16), 16)


# The whole forward (rows.cpp)

SLOTS = 60


def _qwen3():
    """Norms of each head, and widths that are no multiple of a vector's."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=300, hidden_size=36, intermediate_size=59, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    backbone = Qwen3ForCausalLM._from_config(config, attn_implementation="span")
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return backbone.eval()


def _biased():
    """Dream's biases, which begin as zeros."""
    model = fresh_model("dream")
    for name, parameter in model.backbone.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model.backbone


BACKBONES = {"llama": lambda: random_model("llada").backbone, "qwen2": _biased, "qwen3": _qwen3}


@pytest.fixture(scope="module", params=BACKBONES)
def forwards(request):
    """The backbone, its forward in C++, and the backbone in fp64."""
    backbone = BACKBONES[request.param]()
    assert native.fits(backbone)
    return backbone, native.NativeRows(backbone), copy.deepcopy(backbone).double()


@st.composite
def batches(draw):
    """tokens, positions, slots ``[T]``, spans ``[T, K, 2]``; every row sees itself."""
    rows = draw(st.integers(1, 55))  # above 32 not every number of rows is multiplied
    count = draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    slots = torch.randperm(SLOTS, generator=rng)[:rows]
    ends = torch.randint(0, SLOTS + 1, (rows, 2 * count), generator=rng).sort(-1).values
    spans = ends.view(rows, count, 2).int()
    spans[:, 0] = torch.stack([torch.minimum(slots, spans[:, 0, 0]), slots + 1], -1)
    for i in range(1, count):  # no slot twice
        spans[:, i] = spans[:, i].clamp(min=spans[:, i - 1, 1:])
    tokens = torch.randint(0, 290, (rows,), generator=rng)
    return tokens, torch.randint(0, 200, (rows,), generator=rng), slots, spans


def filled_cache(backbone, dtype, seed):
    cache = SlotCache(backbone.config, SLOTS, dtype=dtype, device=torch.device("cpu"))
    rng = torch.Generator().manual_seed(seed)
    for buffer in (b for pair in cache.layers for b in pair):
        buffer.copy_(torch.randn(buffer.shape, generator=rng))
    return cache


def plain_forward(backbone, batch, cache):
    tokens, positions, cache.slots, spans = batch
    plan = SpanPlan(spans)
    return backbone.model(
        input_ids=tokens[None], position_ids=positions[None], spans=plan, past_key_values=cache
    ).last_hidden_state[0]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 9), st.sampled_from([1, 3]), st.booleans())
def test_a_forward_is_as_near_to_fp64_as_the_plain_one(forwards, batch, seed, threads, wide):
    """wide: attention by the plain way, layer by layer, as for rows that see very much."""
    backbone, ours, exact = forwards
    caches = [filled_cache(backbone, d, seed) for d in (torch.float64, *[torch.float32] * 2)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "MOST", -1 if wide else native.MOST)
            truth = plain_forward(exact, batch, caches[0])
            plain = plain_forward(backbone, batch, caches[1])
            tokens, positions, caches[2].slots, spans = batch
            got = ours(tokens, positions, SpanPlan(spans), caches[2])
    finally:
        torch.set_num_threads(before)
    allowed = 4 * (plain - truth).abs().max().item() + 1e-5
    assert (got - truth).abs().max().item() <= allowed
    kept = [torch.stack([torch.stack(pair) for pair in cache.layers]) for cache in caches]
    allowed = 4 * (kept[1] - kept[0]).abs().max().item() + 1e-5
    assert (kept[2] - kept[0]).abs().max().item() <= allowed
    others = [slot for slot in range(SLOTS) if slot not in batch[2]]
    assert torch.equal(kept[2][..., others, :], kept[1][..., others, :])  # nothing else is written


def test_positions_beyond_the_table_of_angles_get_theirs(forwards):
    backbone, ours, _ = forwards
    batch = (torch.tensor([5]), torch.tensor([700]), torch.tensor([0]), torch.tensor([[[0, 1]]]))
    caches = [filled_cache(backbone, torch.float32, 0) for _ in range(2)]
    with torch.inference_mode():
        plain = plain_forward(backbone, batch, caches[0])
        caches[1].slots = batch[2]
        got = ours(batch[0], batch[1], SpanPlan(batch[3].int()), caches[1])
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(caches[1].layers[0][0], caches[0].layers[0][0])


def test_a_row_that_is_not_finite_leaves_the_others_as_they_are(forwards):
    """Two requests in one forward, the first of which has met a NaN in its slots."""
    backbone, ours, _ = forwards
    slots = torch.tensor([0, 1, 30, 31])
    spans = torch.tensor([[[0, 3]], [[0, 3]], [[30, 32]], [[30, 32]]], dtype=torch.int32)
    plan = SpanPlan(spans, [Segment(slice(0, 2), slice(0, 3)), Segment(slice(2, 4), slice(30, 32))])
    found = []
    for value in (0.5, torch.nan):
        cache = filled_cache(backbone, torch.float32, 1)
        cache.layers[0][0][:, :, 2] = value
        cache.slots = slots
        with torch.inference_mode():
            found.append(ours(torch.tensor([1, 2, 3, 4]), slots, plan, cache))
    assert found[1][:2].isnan().all()
    assert torch.equal(found[1][2:], found[0][2:])


@given(st.integers(1, 1 << 20))
def test_few_numbers_of_rows_are_multiplied(rows):
    """oneDNN generates code for each."""
    fed = native.multiplied_rows(rows)
    assert rows <= fed <= rows * 17 / 16
    octave = 1 << (rows - 1).bit_length() - 1 if rows > 1 else 1
    numbers = {native.multiplied_rows(octave + i) for i in range(1, min(octave, 4096) + 1)}
    assert len(numbers) <= 16


def test_a_small_model_is_warmed_up_for_every_usual_number_of_rows(monkeypatch):
    warmed = set()
    monkeypatch.setattr(native.Product, "__call__", lambda _, x: warmed.add(len(x)))
    rows = native.NativeRows(random_model("llada").backbone)
    rows.warm_up()
    assert {native.multiplied_rows(rows) for rows in range(1, 513)} == warmed
    warmed.clear()
    monkeypatch.setattr(native, "SMALL", 0)
    rows.warm_up()
    assert not warmed


def test_a_compiled_model_has_it_and_its_memory_goes_with_the_model():
    model = fresh_model("llada", seed=4)
    model.compile()
    rows = model.compiled_rows
    assert isinstance(rows, cpu.NativeRows)
    gone = [weakref.ref(rows), *(weakref.ref(product) for product in rows.products)]
    del model, rows
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def _of(family="llada", **more):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "kv_heads": 2}
    return build(family, tokenizer(), context_length=64, **({"heads": 4} | sizes | more))


def _hooked():
    model = fresh_model("llada")
    model.backbone.model.layers[0].register_forward_hook(lambda module, inputs, out: out)
    return model


def _replaced():
    model = fresh_model("llada")
    mlp = model.backbone.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj)
    return model


@pytest.mark.parametrize("make", [
    lambda: _of(hidden_act="gelu"),
    lambda: _of("causal", rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    lambda: _of(heads=2, head_dim=24),
    _hooked, _replaced,
])  # fmt: skip
def test_a_model_of_another_kind_is_left_to_torch_compile(make):
    assert not native.fits(make().backbone)


@pytest.mark.parametrize("told", ["0", None])
def test_without_it_torch_compile_gives_the_tokens(told, monkeypatch):
    def broken():
        raise OSError("no such file: g++")

    monkeypatch.setattr(native, "library", broken)
    if told is not None:
        monkeypatch.setenv("D2F_KERNELS", told)
    model = fresh_model("causal")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.compile()
    warned = [str(w.message) for w in said if "forwards in C++" in str(w.message)]
    reason = "forwards in C++ do not work here, torch.compile is used: no such file: g++"
    assert warned == ([] if told else [reason])
    assert isinstance(model.compiled_rows, CompiledRows) and not model.scores_natively
    plain, fast = (
        decode.generate(m, [[5, 6, 7]], decode.Autoregressive(8))[0].raw_tokens
        for m in (random_model("causal"), model)
    )
    assert fast == plain


def test_code_that_computes_something_else_is_not_used(monkeypatch):
    model = fresh_model("llada", seed=5)
    angles = native.NativeRows._angles
    monkeypatch.setattr(
        native.NativeRows, "_angles", lambda self, n: angles(self, n).flip(1).contiguous()
    )
    with pytest.warns(RuntimeWarning, match="hidden states .* differ"):
        assert cpu.compiled_rows(model.backbone, model.new_cache) is None


# Token and confidence (confidence.cpp)


@st.composite
def asked(draw):
    """Logits ``[N, V]``, some equal, some -inf; a mask id or none; a token of each row."""
    rows, vocabulary = draw(st.integers(1, 7)), draw(st.integers(2, 2100))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(rows, vocabulary, generator=rng) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    if draw(st.booleans()):
        logits = logits.round()
    hidden = draw(st.sampled_from([0.0, 0.5]))
    logits[torch.rand(rows, vocabulary, generator=rng) < hidden] = -torch.inf
    mask_id = draw(st.none() | st.integers(0, vocabulary - 1))
    for row in range(rows):  # something may be chosen
        place = int(torch.randint(vocabulary, (), generator=rng))
        logits[row, (place + 1) % vocabulary if place == mask_id else place] = 2.0
    return logits, mask_id, torch.randint(vocabulary, (rows,), generator=rng)


@settings(max_examples=150)
@given(asked())
def test_the_table_is_the_plain_one_and_that_of_each_row_alone(asked):
    logits, mask_id, named = asked
    found = confidence_reference(logits.double(), mask_id=mask_id, named=named)
    columns = [found.probability, found.named, found.named_log, found.entropy, found.margin]
    got, plain = scored(logits, mask_id, named), prediction_table(logits, mask_id, named, None)
    assert got[0].tolist() == plain[0].tolist()
    truth = torch.stack([column.double() for column in columns])
    torch.testing.assert_close(got[1:], truth, rtol=1e-5, atol=1e-6)
    assert scored(logits, mask_id, None).tolist() == got[:2].tolist()
    for row in range(len(logits)):
        part = slice(row, row + 1)
        assert scored(logits[part], mask_id, named[part])[:, 0].tolist() == got[:, row].tolist()


@settings(max_examples=50)
@given(asked(), st.integers(0, 999))
def test_drawn_rows_and_the_greedy_ones_beside_them_are_those_alone(asked, seed):
    logits, mask_id, _ = asked
    ways = [{}, {"temperature": 0.8, "seed": seed}, {"temperature": 1.0, "top_k": 3, "top_p": 0.7}]
    groups = [
        PredictionRequest(Sampler(choosing(**ways[row % 3]), mask_id), 1)
        for row in range(len(logits))
    ]
    fast, plain = (table_of(logits, wanted_of(groups), native=way) for way in (True, False))
    assert fast[0].tolist() == plain[0].tolist()
    torch.testing.assert_close(fast[1], plain[1], rtol=1e-5, atol=1e-6)
    for row, group in enumerate(groups):
        alone = table_of(logits[row : row + 1], wanted_of([group]), native=True)
        assert alone[:, 0].tolist() == fast[:, row].tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 3, 8, 20])
def test_a_row_that_is_not_finite_is_seen(bad, place):
    logits = torch.zeros(3, 21)
    logits[1, place] = bad
    found = scored(logits, 3, torch.zeros(3, dtype=torch.int64))
    assert found[1].isnan().tolist() == [False, True, False]


def test_a_compiled_model_decodes_with_it_what_the_plain_one_does(monkeypatch):
    calls = []

    def count(logits, *more):
        calls.append(len(logits))
        return scored(logits, *more)

    monkeypatch.setattr("decode.engine.batch.scored", count)
    model, prompts = fresh_model("llada"), [[5, 6, 7], [9]]
    options = [{}, {"forced_pick": "entropy"}, {"temperature": 1.0, "seed": 3}]
    decoders = [decode.D2F(4, max_new_tokens=8, **own) for own in options]
    want = [[r.tokens for r in decode.generate(model, prompts, d)] for d in decoders]
    assert not calls
    model.compile()
    assert [[r.tokens for r in decode.generate(model, prompts, d)] for d in decoders] == want
    assert calls
