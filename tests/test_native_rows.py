"""A forward in C++ gives the hidden states of the plain one, whatever the model's kind, rows and
spans; what it is not made for is compiled, and where it cannot be built nothing is lost."""

from __future__ import annotations

import copy
import gc
import shutil
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

import decode
from d2f import cpu as native
from d2f.attention import Segment, SpanPlan
from d2f.compile import CompiledRows
from d2f.convert import build
from d2f.cpu import rows as native_rows
from d2f.cpu.packed import can_pack

if shutil.which("g++") is None and shutil.which("clang++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)
if not can_pack(random_model("llada").backbone):  # not `fits`, which is tested here
    pytest.skip("this machine has no packed layers", allow_module_level=True)

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


BACKBONES = {
    "llama": random_model("llada").backbone,
    "qwen2": _biased(),
    "qwen3": _qwen3(),
}


@pytest.fixture(scope="module", params=BACKBONES)
def forwards(request):
    """The backbone, its forward in C++, and the backbone in fp64."""
    backbone = BACKBONES[request.param]
    assert native_rows.fits(backbone)
    return backbone, native_rows.NativeRows(backbone), copy.deepcopy(backbone).double()


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


def _cache(backbone, dtype, seed):
    config = backbone.config
    cache = native_rows.SlotCache(config, SLOTS, dtype=dtype, device=torch.device("cpu"))
    rng = torch.Generator().manual_seed(seed)
    for buffer in (b for pair in cache.layers for b in pair):
        buffer.copy_(torch.randn(buffer.shape, generator=rng))
    return cache


def _plain(backbone, batch, cache):
    tokens, positions, cache.slots, spans = batch
    plan = SpanPlan(spans)
    return backbone.model(
        input_ids=tokens[None], position_ids=positions[None], spans=plan, past_key_values=cache
    ).last_hidden_state[0]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(0, 9), st.sampled_from([1, 3]), st.booleans())
def test_it_is_as_near_to_fp64_as_the_plain_forward(forwards, batch, seed, threads, wide):
    """wide: attention by the plain way, layer by layer, as for rows that see very much."""
    backbone, ours, exact = forwards
    caches = [_cache(backbone, dtype, seed) for dtype in (torch.float64, *[torch.float32] * 2)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "MOST", -1 if wide else native.MOST)
            truth = _plain(exact, batch, caches[0])
            plain = _plain(backbone, batch, caches[1])
            tokens, positions, caches[2].slots, spans = batch
            got = ours(tokens, positions, SpanPlan(spans), caches[2])
    finally:
        torch.set_num_threads(before)
    allowed = 4 * (plain - truth).abs().max().item() + 1e-5
    assert (got - truth).abs().max().item() <= allowed
    kept = [torch.stack([torch.stack(pair) for pair in cache.layers]) for cache in caches]
    allowed = 4 * (kept[1] - kept[0]).abs().max().item() + 1e-5
    assert (kept[2] - kept[0]).abs().max().item() <= allowed
    fed = batch[2]
    others = [slot for slot in range(SLOTS) if slot not in fed]
    assert torch.equal(kept[2][..., others, :], kept[1][..., others, :])  # nothing else is written


def test_positions_beyond_the_table_of_angles_get_theirs(forwards):
    backbone, ours, _ = forwards
    batch = (torch.tensor([5]), torch.tensor([700]), torch.tensor([0]), torch.tensor([[[0, 1]]]))
    caches = [_cache(backbone, torch.float32, 0) for _ in range(2)]
    with torch.inference_mode():
        plain = _plain(backbone, batch, caches[0])
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
        cache = _cache(backbone, torch.float32, 1)
        cache.layers[0][0][:, :, 2] = value
        cache.slots = slots
        with torch.inference_mode():
            found.append(ours(torch.tensor([1, 2, 3, 4]), slots, plan, cache))
    assert found[1][:2].isnan().all()
    assert torch.equal(found[1][2:], found[0][2:])


def test_a_compiled_model_has_it_and_its_memory_goes_with_the_model():
    model = fresh_model("llada", seed=4)
    model.compile()
    rows = model.compiled_rows
    assert isinstance(rows, native_rows.NativeRows)
    gone = [weakref.ref(rows), *(weakref.ref(product) for product in rows.products)]
    del model, rows
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def _without_silu():
    return build(
        "llada", tokenizer(), hidden_size=32, intermediate_size=64, layers=1, heads=4, kv_heads=2,
        context_length=64, hidden_act="gelu",
    )  # fmt: skip


def _by_length():
    return build(
        "causal", tokenizer(), hidden_size=32, intermediate_size=64, layers=1, heads=4, kv_heads=2,
        context_length=64, rope_parameters={"rope_type": "dynamic", "factor": 2.0},
    )  # fmt: skip


def _hooked():
    model = fresh_model("llada")
    model.backbone.model.layers[0].register_forward_hook(lambda module, inputs, out: out)
    return model


def _replaced():
    model = fresh_model("llada")
    mlp = model.backbone.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj)
    return model


def _other_heads():
    return build(
        "llada", tokenizer(), hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=2,
        context_length=64, head_dim=24,
    )  # fmt: skip


@pytest.mark.parametrize("make", [_without_silu, _by_length, _hooked, _replaced, _other_heads])
def test_a_model_of_another_kind_is_left_to_torch_compile(make):
    assert not native_rows.fits(make().backbone)


@pytest.mark.parametrize("told", ["0", None])
def test_without_it_torch_compile_gives_the_tokens(told, monkeypatch):
    def broken():
        raise OSError("no such file: g++")

    monkeypatch.setattr(native_rows, "library", broken)
    model = fresh_model("causal")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if told is not None:
            monkeypatch.setenv("D2F_KERNELS", told)
        model.compile()
    warned = [str(w.message) for w in said if "forwards in C++" in str(w.message)]
    reason = "forwards in C++ do not work here, torch.compile is used: no such file: g++"
    assert warned == ([] if told else [reason])
    assert isinstance(model.compiled_rows, CompiledRows)
    plain, fast = (
        decode.generate(m, [[5, 6, 7]], decode.Autoregressive(8))[0].raw_tokens
        for m in (random_model("causal"), model)
    )
    assert fast == plain


def test_code_that_computes_something_else_is_not_used(monkeypatch):
    model = fresh_model("llada", seed=5)
    angles = native_rows.NativeRows._angles
    monkeypatch.setattr(
        native_rows.NativeRows, "_angles", lambda self, n: angles(self, n).flip(1).contiguous()
    )
    with pytest.warns(RuntimeWarning, match="hidden states .* differ"):
        assert native_rows.native_rows(model.backbone, model.new_cache) is None
