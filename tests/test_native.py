"""The forward in C++ gives the logits and confidence of the plain one, a row the same in any batch;
other models are compiled, and where it cannot be built nothing is lost."""

from __future__ import annotations

import copy
import gc
import platform
import shutil
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model, tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

import decode
from d2f import cpu, spans
from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.convert import build
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

if shutil.which("g++") is None and shutil.which("clang++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)


SLOTS = 60


def _qwen3(dim=16, group=2, **sizes):
    """Norms of each head, and widths that are no multiple of a vector's."""
    torch.manual_seed(3)
    config = Qwen3Config(**{
        "vocab_size": 300, "hidden_size": 36, "intermediate_size": 59, "num_hidden_layers": 2,
        "head_dim": dim, "num_attention_heads": 2 * group, "num_key_value_heads": 2,
        "max_position_embeddings": 256, **sizes,
    })  # fmt: skip
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
    "llama": lambda: random_model("llada").backbone,
    "qwen2": _biased,
    # Head dimensions of either width of vectors, and heads that are computed 1 to 4 at a time.
    **{
        f"qwen3 {d} {g}": lambda d=d, g=g: _qwen3(d, g)
        for d, g in [(16, 2), (64, 7), (80, 3), (128, 1)]
    },
}
# What a CPU without the newer instructions runs.
OLDER = {
    "no tiles": ("-mno-amx-tile",),
    "no bf16 products": ("-mno-avx512bf16",),
    "avx2": ("-mno-avx512f",),
}


CASES = [("own", name) for name in BACKBONES]
if platform.machine() == "x86_64":
    CASES += [(way, name) for way in OLDER for name in ("qwen2", "qwen3 80 3", "qwen3 128 1")]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def forwards(request):
    """The backbone, its forward in C++, the same in bf16, and the backbone in bf16; the code as it
    is compiled for this CPU or for older ones."""
    from torch._inductor.codecache import CppCodeCache

    way, name = request.param
    backbone = BACKBONES[name]()
    assert cpu.fits(backbone)
    rounded = copy.deepcopy(backbone).to(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        if way != "own":
            flags = ("-ffp-contract=fast", *OLDER[way])
            older = CppCodeCache.load(cpu.source(), "cpu", extra_flags=flags)
            assert older is not cpu.library()
            patch.setattr(cpu, "library", lambda: older)
        made = cpu.NativeRows(backbone), cpu.NativeRows(rounded)
    return backbone, *made, rounded


@st.composite
def batches(draw):
    """tokens, positions, slots ``[T]``, spans ``[T, K, 2]``; every row sees itself."""
    rows, count = draw(st.integers(1, 55)), draw(st.integers(1, 3))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    slots = torch.randperm(SLOTS, generator=rng)[:rows]
    ends = torch.randint(0, SLOTS + 1, (rows, 2 * count), generator=rng).sort(-1).values
    spans = ends.view(rows, count, 2).int()
    spans[:, 0] = torch.stack([torch.minimum(slots, spans[:, 0, 0]), slots + 1], -1)
    for i in range(1, count):  # no slot twice
        spans[:, i] = spans[:, i].clamp(min=spans[:, i - 1, 1:])
    if draw(st.booleans()):  # one behind the other, as in a prompt: they are read together
        slots, spans = torch.arange(SLOTS - rows, SLOTS), spans[:1].repeat(rows, 1, 1)
        spans[:, -1] = torch.tensor([SLOTS - rows - 1, SLOTS])
        if draw(st.booleans()):
            spans[:, -1, 1] = slots + 1
        spans[:, :-1] = spans[:, :-1].clamp(max=SLOTS - rows - 1)
    tokens = torch.randint(0, 290, (rows,), generator=rng)
    return tokens, torch.randint(0, 200, (rows,), generator=rng), slots, spans


def filled_cache(backbone, dtype, seed):
    cache = SlotCache(backbone.config, SLOTS, dtype=dtype, device=torch.device("cpu"))
    rng = torch.Generator().manual_seed(seed)
    for buffer in (b for pair in cache.layers for b in pair):
        buffer.copy_(torch.randn(buffer.shape, generator=rng).bfloat16())  # the same in any dtype
    return cache


def plain_forward(backbone, batch, cache):
    tokens, positions, cache.slots, spans = batch
    hidden = backbone.model(
        input_ids=tokens[None], position_ids=positions[None], spans=SpanPlan(spans),
        past_key_values=cache,
    ).last_hidden_state[0]  # fmt: skip
    return backbone.lm_head(hidden)


def fed(ours, batch, cache, read=None, threads=1):
    """Logits of the forward in C++, on a number of threads."""
    tokens, positions, cache.slots, spans = batch
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        every = torch.arange(len(tokens))
        return ours(tokens, positions, SpanPlan(spans), cache, every if read is None else read)
    finally:
        torch.set_num_threads(before)


def kept(cache):
    return torch.stack([torch.stack(pair) for pair in cache.layers])


@settings(max_examples=15, deadline=None)
@given(batches(), st.integers(0, 9))
@torch.inference_mode()
def test_a_forward_is_as_near_to_fp64_as_the_plain_one(forwards, batch, seed):
    backbone, *ours, rounded = forwards
    for plain, fast, room in ((backbone, ours[0], 1e-5), (rounded, ours[1], 1e-2)):
        dtype = plain.dtype
        caches = [filled_cache(plain, d, seed) for d in (torch.float64, dtype, dtype)]
        truth = plain_forward(copy.deepcopy(plain).double(), batch, caches[0])
        error = (plain_forward(plain, batch, caches[1]) - truth).abs().max().item()
        got = fed(fast, batch, caches[2])
        assert (got - truth).abs().max().item() <= 4 * error + room
        exact, theirs, written = map(kept, caches)
        error = (theirs - exact).abs().max().item()
        assert (written - exact).abs().max().item() <= 4 * error + room
        others = [slot for slot in range(SLOTS) if slot not in batch[2]]
        assert torch.equal(written[..., others, :], theirs[..., others, :])  # nothing else changes


@settings(max_examples=15, deadline=None)
@given(batches(), st.data())
@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_in_any_batch_and_on_any_threads(forwards, batch, data):
    """Each row sees the cache, so those that are fed alone find the others' keys there."""
    backbone, *ours, rounded = forwards
    for plain, fast in ((backbone, ours[0]), (rounded, ours[1])):
        cache = filled_cache(plain, plain.dtype, 0)
        together = fed(fast, batch, cache)
        written = kept(cache)
        rows = len(batch[0])
        bounds = st.lists(st.integers(0, rows), min_size=2, max_size=2, unique=True)
        part = slice(*sorted(data.draw(bounds)))
        alone = fed(fast, [x[part] for x in batch], cache, threads=2)
        assert torch.equal(alone, together[part])
        assert torch.equal(kept(cache), written)
        read = torch.arange(rows).flip(0)[::2]
        assert torch.equal(fed(fast, batch, cache, read, threads=3), together[read])


def test_positions_beyond_the_table_of_angles_get_theirs(forwards):
    backbone, ours, *_ = forwards
    spans = torch.tensor([[[0, 1]]], dtype=torch.int32)
    batch = (torch.tensor([5]), torch.tensor([700]), torch.tensor([0]), spans)
    caches = [filled_cache(backbone, torch.float32, 0) for _ in range(2)]
    with torch.inference_mode():
        torch.testing.assert_close(
            fed(ours, batch, caches[1]), plain_forward(backbone, batch, caches[0])
        )
    torch.testing.assert_close(caches[1].layers[0][0], caches[0].layers[0][0])


def test_a_row_that_is_not_finite_leaves_the_others_as_they_are(forwards):
    """Two requests in one forward, the first of which has met a NaN in its slots."""
    backbone, ours, *_ = forwards
    slots = torch.tensor([0, 1, 30, 31])
    spans = torch.tensor([[[0, 3]], [[0, 3]], [[30, 32]], [[30, 32]]], dtype=torch.int32)
    found = []
    for value in (0.5, torch.nan):
        cache = filled_cache(backbone, torch.float32, 1)
        cache.layers[0][0][:, :, 2] = value
        with torch.inference_mode():
            found.append(fed(ours, (torch.tensor([1, 2, 3, 4]), slots, slots, spans), cache))
    assert found[1][:2].isnan().all()
    assert torch.equal(found[1][2:], found[0][2:])


def test_a_row_that_sees_nothing_has_an_answer(forwards):
    backbone, ours, *_ = forwards
    spans = torch.zeros(1, 1, 2, dtype=torch.int32)
    batch = (torch.tensor([5]), torch.tensor([3]), torch.tensor([0]), spans)
    with torch.inference_mode():
        assert fed(ours, batch, filled_cache(backbone, torch.float32, 0)).isfinite().all()


def test_a_compiled_model_has_it_and_its_memory_goes_with_the_model():
    model = fresh_model("llada", seed=4)
    model.compile()
    rows = model.compiled_rows
    assert isinstance(rows, cpu.NativeRows)
    model.compile()  # once is enough
    assert model.compiled_rows is rows
    gone = [weakref.ref(rows), *(weakref.ref(tensor) for tensor in rows._kept)]
    del model, rows
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_take_the_place_of_the_others(tied, dtype, monkeypatch):
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96}
    backbone = _qwen3(tie_word_embeddings=tied, **sizes).to(dtype)
    weights = {name: value.clone() for name, value in backbone.state_dict().items()}
    slots = torch.arange(4)
    batch = (torch.tensor([1, 2, 319, 16]), slots, slots, spans.causal(4))

    def plain():
        with torch.inference_mode():
            return backbone(batch[0][None], spans=SpanPlan(batch[3][None]), use_cache=False).logits

    def ours(rows):
        with torch.inference_mode():
            return fed(rows, batch, filled_cache(backbone, dtype, 0))

    expected = ours(cpu.NativeRows(backbone)), plain()
    monkeypatch.setattr(cpu, "ONCE", 0)
    rows = cpu.NativeRows(backbone)
    assert torch.equal(ours(rows), expected[0])
    # Whoever else reads the weights finds them as they were.
    assert torch.equal(plain(), expected[1])
    found = backbone.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    parameters = list(backbone.parameters())
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*parameters, *rows._kept]}
    assert sum(s.nbytes() for s in held.values()) < 1.15 * sum(p.nbytes for p in parameters)


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
    assert not cpu.fits(make().backbone)


def test_without_it_torch_compile_is_used(monkeypatch):
    """test_compiled.py has the tokens that it gives."""

    def broken():
        raise OSError("no such file: g++")

    model = fresh_model("causal")
    with monkeypatch.context() as patch:
        patch.setenv("D2F_KERNELS", "0")
        assert cpu.compiled_rows(model.backbone, model.new_cache) is None  # without a word
    monkeypatch.setattr(cpu, "library", broken)
    monkeypatch.setattr("d2f.compile.CompiledRows", lambda *given: given)
    said = r"forwards in C\+\+ do not work here, torch.compile is used: no such file: g\+\+"
    with pytest.warns(RuntimeWarning, match=said):
        model.compile()
    assert model.compiled_rows == (model.backbone, model.new_cache) and not model.scores_natively


def test_code_that_computes_something_else_is_not_used(monkeypatch):
    model = fresh_model("llada", seed=5)
    angles = cpu.NativeRows._angles
    monkeypatch.setattr(
        cpu.NativeRows, "_angles", lambda self, n: angles(self, n).flip(1).contiguous()
    )
    with pytest.warns(RuntimeWarning, match="logits .* differ"):
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
