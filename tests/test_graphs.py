"""Forwards of fixed sizes and CUDA graphs, played on the CPU: what pads touches no request, a
capture is made once, and caches with their graphs stay with their model."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POISON, fresh_model, poisoned_model, random_model

import decode
from d2f.adapters import new_lora
from d2f.attention import SpanPlan
from d2f.model import DiffusionModel
from decode.engine import cuda_graphs
from decode.engine import engine as engines
from decode.engine.batch import FlatRows, Wanted
from decode.engine.cuda_graphs import GraphForward, GraphForwards, Kind, free_graphs, lend_graphs
from decode.engine.engine import Engine
from decode.engine.request import Request
from triton_kernels.confidence import without

CPU = torch.device("cpu")
PIPELINE = decode.D2F(4, tau_conf=0.3, max_new_tokens=9)


def flat(count: int) -> FlatRows:
    places = np.arange(count)
    spans = np.array([[[0, count]]] * count)
    return FlatRows(places % 99, places, places, spans, places, [])


def logits_of(model: DiffusionModel, rows: FlatRows, slots: int) -> torch.Tensor:
    """Logits of the rows that are read, by the plain forward."""
    cache, on = model.new_cache(slots), rows.on(CPU)
    cache.slots = on.slots
    with torch.inference_mode():
        plan = SpanPlan(on.plan.spans)
        return model.decode_rows(on.tokens, on.positions, plan, cache, on.read)


@pytest.mark.parametrize(
    ("family", "decoder"),
    [
        ("dream", decode.D2F(4, tau_conf=0.15, max_new_tokens=12)),
        ("llada", decode.Static(5, 10)),
    ],
)
def test_rows_that_pad_touch_no_request_in_a_full_cache(family, decoder, monkeypatch):
    """One that wrote to any slot but the one that is no request's, or that a real row could see,
    would change what the request at that slot reads."""
    monkeypatch.setattr(cuda_graphs, "SIZES", (16, 40, 96))
    model, prompts = random_model(family), [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
    plain = decode.generate(model, prompts, decoder)
    requests = [Request(i, ids, decoder, model.contract, None) for i, ids in enumerate(prompts)]
    padded, real = [], GraphForward.start

    def counted(self, rows, wanted):
        padded.append(self.host.shape[1] - len(rows.tokens))
        return real(self, rows, wanted)

    monkeypatch.setattr(GraphForward, "start", counted)
    slots = sum(request.session.slots for request in requests)  # not one more
    engine = Engine(model, batch_size=3, slots=slots, static=True)
    for request in requests:
        engine.submit(request)
    list(engine.run())
    assert [request.result.raw_tokens for request in requests] == [r.raw_tokens for r in plain]
    assert len(padded) == engine.forwards, "every forward was a static one"
    assert any(padded), "and some had rows that pad"


@pytest.mark.parametrize("rows", [257, 700, 1024])
def test_forwards_of_many_rows_have_a_size_too(rows):
    """D2F with blocks of 32 feeds more than 256 rows in most forwards from 4 requests on."""
    model = random_model("llada")
    table = GraphForwards(model, model.new_cache(rows + 1)).start(flat(rows), Wanted())()
    assert table.shape[1] < 1.35 * rows
    want = without(logits_of(model, flat(rows), rows), model.mask_id).argmax(-1)
    assert table[0, :rows].tolist() == want.tolist()


@pytest.mark.parametrize(
    "device, variable, wanted",
    [("cpu", None, False), ("cuda", None, True), ("cuda", "1", True), ("cuda", "0", False)],
)
def test_graphs_are_for_a_gpu_and_can_be_turned_off(device, variable, wanted, monkeypatch):
    monkeypatch.delenv("D2F_GRAPHS", raising=False)
    if variable is not None:
        monkeypatch.setenv("D2F_GRAPHS", variable)
    assert cuda_graphs.graphs_wanted(torch.device(device)) is wanted


class Streams:
    """torch.cuda's current stream, and a capture that leaves its own behind where it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = "main"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: "side")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def graph(self, graph, *, stream, **options):
        self.now = stream
        try:
            yield
        except BaseException:
            raise RuntimeError("capture invalidated\n(and more)")  # noqa: B904, as torch has it
        self.now = "main"


@pytest.fixture
def forward() -> GraphForward:
    """One that is to be captured."""
    model = random_model("llada")
    forward = GraphForward(model, model.new_cache(9), Kind(4), None)
    forward.tried = False
    return forward


def test_after_a_capture_that_failed_all_goes_on_where_it_was_and_the_cause_is_shown(
    forward, monkeypatch
):
    streams, compute = Streams(monkeypatch), GraphForward._compute

    def once(self):
        if streams.now == "side":
            raise ValueError("no capture of this operation\n(and more)")
        compute(self)

    monkeypatch.setattr(GraphForward, "_compute", once)
    said = "no CUDA graph of the forward: no capture of this operation"
    with pytest.warns(RuntimeWarning, match=said):
        first = forward.start(flat(3), Wanted())().copy()
    assert streams.now == "main"
    assert forward.graph is None
    assert np.array_equal(forward.start(flat(3), Wanted())(), first), "eager from then on"


def test_a_capture_is_made_once_and_replayed(forward, monkeypatch):
    streams, replayed = Streams(monkeypatch), []
    replay = staticmethod(lambda: replayed.append(streams.now))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
    monkeypatch.setattr(GraphForward, "_compute", lambda self: replayed.append("computed"))
    for _ in range(3):
        forward.start(flat(2), Wanted())
    assert replayed == ["computed", "computed", "main", "main"], "computed, then recorded"


@pytest.mark.parametrize("early", [False, True])
def test_the_forwards_of_a_second_gpu_run_with_it_as_the_current_one(monkeypatch, early):
    """Triton starts its kernels on the current GPU, wherever their tensors are."""
    now, seen = [torch.device("cuda:0")], set()

    @contextlib.contextmanager
    def device(chosen):
        now.append(chosen)
        try:
            yield
        finally:
            now.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    model, real, on = random_model("llada"), DiffusionModel.decode_rows, FlatRows.on

    def keep(self, *arguments):
        seen.add(now[-1])
        return real(self, *arguments)

    monkeypatch.setattr(DiffusionModel, "decode_rows", keep)
    monkeypatch.setattr(FlatRows, "on", lambda rows, device: on(rows, CPU))
    engine = Engine(model, batch_size=1, slots=40)
    engine.device, engine.early = torch.device("cuda:1"), early
    engine.submit(Request(0, [5, 6, 7], PIPELINE, model.contract, None))
    for _ in engine.run():
        assert now == [torch.device("cuda:0")], "and the caller's is as it was"
    assert seen == {torch.device("cuda:1")}


@pytest.fixture
def made(monkeypatch) -> list[object]:
    """What is made from here on, by engines that pad and capture as on a GPU."""
    found = []
    for kind in (GraphForwards, GraphForward):

        def init(self, *arguments, real=kind.__init__):
            real(self, *arguments)
            found.append(type(self).__name__)

        monkeypatch.setattr(kind, "__init__", init)
    monkeypatch.setattr(engines, "graphs_wanted", lambda device: True)
    return found


def test_a_second_engine_of_a_model_makes_nothing_anew(made):
    """Also after one that was given up half way, which leaves nothing behind, and where weights
    have learned in their places."""
    model = fresh_model("llada")
    first = decode.generate(model, [[5, 6, 7], [8]], PIPELINE)
    assert made.count("GraphForwards") == 1 and "GraphForward" in made
    events = decode.stream(model, [[9, 10, 11]], PIPELINE)
    next(events)
    events.close()
    made.clear()
    again = decode.generate(model, [[5, 6, 7], [8]], PIPELINE)
    assert [r.raw_tokens for r in again] == [r.raw_tokens for r in first]
    with torch.no_grad():
        model.backbone.lm_head.weight.add_(1)
    decode.generate(model, [[5, 6, 7], [8]], decode.D2F(4, tau_conf=1.0, max_new_tokens=2))
    assert "GraphForwards" not in made


def test_the_last_cache_that_was_given_back_is_lent_first_and_emptied():
    """Its graphs are those that the engines before have captured. One that is too small goes."""
    model = fresh_model("llada")
    lend, free = partial(lend_graphs, model), free_graphs(model)
    a, b = lend(900), lend(300)
    assert [one[1].slots for one in (a, b)] == [960, 320]
    for buffer in a[1].cache.layers[1]:
        buffer += 1
    free.extend((a, b))
    assert lend(310)[1] is b[1]
    free.append(b)
    assert lend(500)[1] is a[1] and not free
    assert not any(buffer.any() for layer in a[1].cache.layers for buffer in layer)


@settings(max_examples=8)
@given(
    st.lists(st.lists(st.integers(8, 200), min_size=1, max_size=12), min_size=2, max_size=5),
    st.data(),
)
def test_engines_that_are_alive_at_once_do_not_meet(prompts, data):
    """Advanced in any order, one failing with NaN in its slots, closed and forgotten in between."""
    model = poisoned_model()
    want = [decode.generate(model, [ids], PIPELINE)[0].raw_tokens for ids in prompts]
    alive, tokens = [], {}
    waiting = list(enumerate(prompts))
    while waiting or alive:
        if waiting and (not alive or data.draw(st.booleans())):
            i, ids = waiting.pop(0)
            engine = Engine(model, batch_size=2, slots=60, static=True)
            poison = Request(-1, [POISON, 9], PIPELINE, model.contract, None)
            for request in (poison, Request(i, ids, PIPELINE, model.contract, None)):
                engine.submit(request)
            alive.append((i, engine, request))
        i, engine, request = data.draw(st.sampled_from(alive))
        engine.advance()
        assert len({id(other.cache) for _, other, _ in alive}) == len(alive)
        if request.done:
            tokens[i] = request.result.raw_tokens
            alive.remove((i, engine, request))
            if data.draw(st.booleans()):
                engine.close()
            del engine
    assert [tokens[i] for i in range(len(prompts))] == want
    assert len(free_graphs(model)) <= len(prompts)


def test_an_engine_that_is_closed_or_forgotten_gives_back_once_and_keeps_no_model(made):
    model = fresh_model("llada")
    engine = Engine(model, batch_size=1, slots=9)
    cache = weakref.ref(engine.cache)
    engine.close()
    engine.close()
    del engine
    gc.collect()
    assert len(free_graphs(model)) == 1
    assert Engine(model, batch_size=1, slots=9).cache is cache()  # and is forgotten at once
    gc.collect()
    assert Engine(model, batch_size=1, slots=9).cache is cache()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and cache() is None


def moved(model):
    weight = model.backbone.lm_head.weight
    weight.data = weight.data.clone()


def compiled(model):
    model.compiled_rows = type("Compiled", (), {})()


def with_other_kernels(model):
    os.environ["D2F_KERNELS"] = "1" if os.environ["D2F_KERNELS"] == "0" else "0"


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.merge_adapter(),
        lambda model: model.backbone.train(),
        lambda model: model.adapter.base_model.disable_adapter_layers(),
        moved,
        compiled,
        with_other_kernels,
    ],
)
def test_graphs_of_the_model_as_it_was_are_not_used(made, monkeypatch, change):
    monkeypatch.setenv("D2F_KERNELS", "0")
    model = fresh_model("llada")
    new_lora(model, r=2, alpha=2, dropout=0.0)
    model.backbone.eval()
    for _ in range(2):
        Engine(model, batch_size=1, slots=9)
    assert made == ["GraphForwards"]
    change(model)
    for _ in range(2):
        Engine(model, batch_size=1, slots=9)
    assert made == ["GraphForwards"] * 2
    assert len(free_graphs(model)) == 1, "the old one is gone"
