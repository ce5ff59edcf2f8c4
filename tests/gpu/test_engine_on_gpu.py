"""The engine on a GPU: its graphs, its kernels, its draws, beside what the plain path gives."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest
import torch
from tiny import tokenizer

import d2f
import decode
from d2f.attention import SpanPlan
from d2f.convert import build
from d2f.model import DiffusionModel
from d2f.tasks import make_problems
from decode.engine.batch import (
    FlatRows,
    PredictionRequest,
    Sampler,
    Wanted,
    prediction_table,
    table_of,
    wanted_of,
)
from decode.engine.cuda_graphs import SIZES, GraphForward, GraphForwards
from decode.engine.engine import Engine
from decode.engine.request import Request
from tests.references.predictions import choosing

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:no CUDA graph|the Triton kernel"),
]
CACHED = 70


def wide_model(dtype: torch.dtype, *, width: int = 1024, heads: int = 8) -> DiffusionModel:
    """Two layers of a width at which matrices are as those of large models: head dimension 128."""
    torch.manual_seed(0)
    model = build(
        "llada", tokenizer(), hidden_size=width, intermediate_size=3 * width, layers=2,
        heads=heads, kv_heads=heads, context_length=2048,
    )  # fmt: skip
    model.backbone.to(DEVICE, dtype).eval()
    return model


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    return wide_model(getattr(torch, request.param))


@pytest.fixture(scope="module")
def plain_model():
    """In fp32, where rows give the same tokens in forwards of any shape."""
    return wide_model(torch.float32)


def batch(count: int) -> FlatRows:
    """Rows behind others that are cached; a third of them see those alone."""
    places = CACHED + np.arange(count)
    ends = np.where(np.arange(count) % 3, CACHED + count, CACHED)
    spans = np.stack((np.zeros(count, dtype=np.int64), ends), -1)[:, None]
    return FlatRows(8 + places % 200, places, places, spans, np.arange(count), [])


def wishes(count: int) -> dict[str, Wanted]:
    queried = 8 + np.arange(count) % 90
    warm = [choosing(), choosing(0.8, seed=3), choosing(1.2, seed=2**63 + 5)]
    part = [choosing(0.8, top_k=5, seed=1), choosing(1.0, top_p=0.7), choosing()]

    def drawn(samplings, queried=None):
        counts = [count // 3, count // 3, count - 2 * (count // 3)]
        groups = [
            PredictionRequest(Sampler(sampling, 1), own)
            for sampling, own in zip(samplings, counts, strict=True)
        ]
        return Wanted(queried, wanted_of(groups).draws, 1)

    return {
        "greedy": Wanted(mask_id=1),
        "scores": Wanted(queried, mask_id=1),
        "drawn": drawn(warm),
        "filtered with scores": drawn(part, queried),
    }


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_captured_and_replays_what_the_eager_forward_gives(model, size):
    forwards = GraphForwards(model, model.new_cache(CACHED + size + 1))
    for buffer in (b for layer in forwards.cache.layers for b in layer):
        buffer[:, :, :CACHED].normal_()
    plain = model.new_cache(CACHED + size)
    for own, other in zip(plain.layers, forwards.cache.layers, strict=True):
        for mine, theirs in zip(own, other, strict=True):
            mine.copy_(theirs[:, :, : CACHED + size])
    rows = size if size < 4 else size - 1  # with a row that pads
    flat = batch(rows)
    for name, wanted in wishes(rows).items():
        turns = [np.array(forwards.start(flat, wanted)())[:, :rows] for _ in range(3)]
        assert np.array_equal(turns[1], turns[2]), name
        np.testing.assert_array_equal(turns[0], turns[1], err_msg=name)
        on = flat.on(model.device)
        plain.slots = on.slots
        with torch.inference_mode():
            plan = SpanPlan(on.plan.spans)
            logits = model.decode_rows(on.tokens, on.positions, plan, plain, on.read)
            eager = table_of(logits, wanted).cpu().numpy()
        exact = model.dtype == torch.float32
        same = (eager[0] == turns[0][0]).mean()
        assert same == 1 if exact else same > 0.9, (name, same)
        off = np.abs(eager[1:] - turns[0][1:])[:, eager[0] == turns[0][0]].max()
        assert off < (1e-3 if exact else 0.1), (name, off)
    assert all(one.graph is not None for one in forwards._forwards.values())
    assert len(forwards._forwards) == 4


WAYS = {
    "graphs and kernels": {},
    "kernels": {"D2F_GRAPHS": "0"},
    "plain": {"D2F_GRAPHS": "0", "D2F_KERNELS": "0"},
}


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("tiny-d2f", decode.D2F(max_new_tokens=48)),
        ("tiny-wedlm", decode.WeDLM(max_new_tokens=48)),
        ("tiny-ar", decode.Autoregressive(48)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_with_graphs_with_kernels_and_without(name, decoder, dtype, monkeypatch):
    """Equal in fp32, all of them; in bf16 each way runs."""
    model = d2f.load(name, dtype=dtype, device=DEVICE)
    prompts = [
        [{"role": "user", "content": problem.question}]
        for problem in make_problems("story", "heldout", 8)
    ]
    found = {}
    for way, variables in WAYS.items():
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            results = decode.generate(model, prompts, decoder, batch_size=8)
        found[way] = [result.raw_tokens for result in results]
    assert all(found["plain"])
    if dtype == "float32":
        assert found["graphs and kernels"] == found["plain"]
        assert found["kernels"] == found["plain"]


DECODER = decode.D2F(8, tau_conf=0.2, max_new_tokens=24)
PROMPTS = [[8 + (7 * i + j) % 200 for j in range(5 + 9 * i)] for i in range(4)]


@contextlib.contextmanager
def without_graphs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("D2F_GRAPHS", "0")
        yield


@pytest.fixture(scope="module")
def tokens(plain_model) -> list[list[int]]:
    """Of each prompt alone, eagerly."""
    with without_graphs():
        return [decode.generate(plain_model, [ids], DECODER)[0].raw_tokens for ids in PROMPTS]


def request(model, index, decoder=DECODER) -> Request:
    return Request(index, PROMPTS[index], decoder, model.contract, None)


def test_two_engines_that_are_advanced_in_turns(plain_model, tokens):
    requests = [request(plain_model, i) for i in range(4)]
    engines = [Engine(plain_model, batch_size=2, slots=200) for _ in range(2)]
    for i, one in enumerate(requests):
        engines[i % 2].submit(one)
    while any(engine.running or engine.waiting for engine in engines):
        for engine in engines:
            engine.advance()
    assert engines[0].cache is not engines[1].cache
    assert [one.result.raw_tokens for one in requests] == tokens


def test_a_second_engine_captures_nothing(plain_model, tokens, monkeypatch):
    first = decode.generate(plain_model, PROMPTS, DECODER, batch_size=4)
    captured = []
    real = GraphForward._capture
    monkeypatch.setattr(GraphForward, "_capture", lambda self: captured.append(self) or real(self))
    again = decode.generate(plain_model, PROMPTS, DECODER, batch_size=4)
    assert captured == []
    assert [r.raw_tokens for r in again] == [r.raw_tokens for r in first] == tokens


def test_a_model_that_changed_is_captured_anew(tokens):
    """Graphs replay the kernels and addresses that they were captured with."""
    model = wide_model(torch.float32)
    assert [r.raw_tokens for r in decode.generate(model, PROMPTS, DECODER)] == tokens
    for parameter in model.backbone.parameters():
        parameter.data = parameter.data * 1.5
    with without_graphs():
        want = [r.raw_tokens for r in decode.generate(model, PROMPTS, DECODER)]
    assert want != tokens
    assert [r.raw_tokens for r in decode.generate(model, PROMPTS, DECODER)] == want


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.8, "seed": 7}, {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "seed": 1}],
    ids=["drawn", "filtered"],
)
def test_a_seed_draws_the_same_tokens_captured_eager_plain_alone_and_on_the_cpu(
    plain_model, sampling, monkeypatch
):
    decoder = decode.D2F(8, tau_conf=0.2, max_new_tokens=16, **sampling)
    decoders = [decoder] * len(PROMPTS)

    def raw(model, batch_size=4):
        results = decode.generate(model, PROMPTS, decoders, batch_size=batch_size)
        return [result.raw_tokens for result in results]

    captured = raw(plain_model)
    assert raw(plain_model, batch_size=1) == captured
    with without_graphs():
        assert raw(plain_model) == captured
        monkeypatch.setenv("D2F_KERNELS", "0")
        assert raw(plain_model) == captured
    cpu = wide_model(torch.float32)
    cpu.backbone.to("cpu")
    assert raw(cpu) == captured


def test_the_kernel_draws_what_the_plain_computation_draws_of_a_large_vocabulary(monkeypatch):
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, 126_464, device=DEVICE)
    for name, wanted in wishes(64).items():
        found = []
        for told in ("1", "0"):
            monkeypatch.setenv("D2F_KERNELS", told)
            found.append(table_of(logits, wanted).cpu().numpy())
        assert np.array_equal(found[0][0], found[1][0]), name
        np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_capture_that_fails_leaves_all_as_it_was(plain_model, tokens, monkeypatch):
    before, real = torch.cuda.current_stream(), GraphForward._compute

    def waits(self):
        real(self)
        self.table.sum().item()  # which a graph cannot record

    with monkeypatch.context() as patch:
        patch.setattr(GraphForward, "_compute", waits)
        forwards = GraphForwards(plain_model, plain_model.new_cache(CACHED + 9))
        flat = batch(5)
        with pytest.warns(RuntimeWarning, match="no CUDA graph of the forward: .*captur"):
            first = np.array(forwards.start(flat, Wanted())())
    assert torch.cuda.current_stream() == before
    assert np.array_equal(forwards.start(flat, Wanted())(), first)
    assert [r.raw_tokens for r in decode.generate(plain_model, PROMPTS, DECODER)] == tokens


def test_nothing_is_left_on_the_gpu_once_the_model_is_gone():
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = wide_model(torch.bfloat16)
    decode.generate(model, PROMPTS, DECODER)
    assert torch.cuda.memory_allocated() > before
    del model
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_the_table_of_a_captured_forward_needs_nothing_of_the_host(plain_model):
    """What it computes is computed without waiting for the device."""
    size = 16
    lines = torch.from_numpy(wishes(size)["filtered with scores"].draws).to(DEVICE)
    from decode.engine.batch import draws_of

    # Made on the CPU: behind a capture that failed torch's generator of the GPU cannot draw.
    logits = torch.randn(size, 300).to(DEVICE)
    queried = torch.arange(size, device=DEVICE)
    prediction_table(logits, 1, queried, draws_of(lines, filtered=True))  # compiled, checked
    torch.cuda.set_sync_debug_mode("error")
    try:
        prediction_table(logits, 1, queried, draws_of(lines, filtered=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
