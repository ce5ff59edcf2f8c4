"""Graphs on a GPU that is not there: torch's part of a capture is played, on the CPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import random_model

import decode
from d2f.attention import SpanPlan
from d2f.model import DiffusionModel
from decode.engine.batch import FlatRows
from decode.engine.cuda_graphs import GraphForward, GraphForwards, Kind
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.engine.sampling import Wanted
from triton_kernels.confidence import without


def flat(count: int) -> FlatRows:
    places = np.arange(count)
    spans = np.array([[[0, count]]] * count)
    return FlatRows(places % 99, places, places, spans, places, [])


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
def forward(monkeypatch) -> GraphForward:
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
    wanted = Wanted()
    with pytest.warns(
        RuntimeWarning,
        match="no CUDA graph of the forward: capture invalidated, after: no capture of this oper",
    ):
        first = forward.start(flat(3), wanted)().copy()
    assert streams.now == "main"
    assert forward.graph is None
    assert np.array_equal(forward.start(flat(3), wanted)(), first), "eager from then on"


def test_a_capture_is_made_once_and_replayed(forward, monkeypatch):
    streams, replayed = Streams(monkeypatch), []
    replay = staticmethod(lambda: replayed.append(streams.now))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
    monkeypatch.setattr(GraphForward, "_compute", lambda self: replayed.append("computed"))
    for _ in range(3):
        forward.start(flat(2), Wanted())
    # computed, then recorded
    assert replayed == ["computed", "computed", "main", "main"]


@pytest.mark.parametrize("rows", [257, 700, 1024])
def test_forwards_of_many_rows_have_a_size_too(rows):
    """D2F with blocks of 32 feeds more than 256 rows in most forwards from 4 requests on."""
    model = random_model("llada")
    forwards = GraphForwards(model, model.new_cache(rows + 1))
    table = forwards.start(flat(rows), Wanted())()
    assert table.shape[1] < 1.35 * rows
    plain, on = model.new_cache(rows), flat(rows).on(torch.device("cpu"))
    plain.slots = on.slots
    with torch.inference_mode():
        plan = SpanPlan(on.plan.spans)
        logits = model.decode_rows(on.tokens, on.positions, plan, plain, on.read)
    want = without(logits, model.mask_id).argmax(-1)
    assert table[0, :rows].tolist() == want.tolist()


def test_the_spans_of_a_forward_lie_as_the_kernel_reads_them(monkeypatch):
    """Else every layer's attention copies them."""
    model, plans = random_model("llada"), []
    real = DiffusionModel.decode_rows

    def keep(self, tokens, positions, plan, cache, read):
        plans.append((plan, cache.layers[0][0].shape[2]))
        return real(self, tokens, positions, plan, cache, read)

    monkeypatch.setattr(DiffusionModel, "decode_rows", keep)
    for static in (True, False):
        engine = Engine(model, batch_size=1, slots=40, static=static)
        decoder = decode.D2F(4, max_new_tokens=9)
        engine.submit(Request(0, [5, 6, 7], decoder, model.contract, None))
        list(engine.run())
    assert len(plans) > 4
    for plan, slots in plans:
        assert plan.spans.is_contiguous()
        assert plan._flat_spans(1, slots).is_contiguous()
    turned = SpanPlan(torch.zeros(6, 5, dtype=torch.int32).T.reshape(-1, 3, 2))
    assert turned._flat_spans(1, 9).is_contiguous(), "whoever made them"


class Devices:
    """torch.cuda.device on a machine with two GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = torch.device("cuda:0")
        monkeypatch.setattr(torch.cuda, "device", self.device)

    @contextlib.contextmanager
    def device(self, device):
        before, self.now = self.now, device
        try:
            yield
        finally:
            self.now = before


@pytest.mark.parametrize("early", [False, True])
def test_the_forwards_of_a_second_gpu_run_with_it_as_the_current_one(monkeypatch, early):
    """Triton starts its kernels on the current GPU, wherever their tensors are."""
    devices, model, seen = Devices(monkeypatch), random_model("llada"), set()
    real, cpu = DiffusionModel.decode_rows, torch.device("cpu")
    on = FlatRows.on

    def keep(self, *arguments):
        seen.add(devices.now)
        return real(self, *arguments)

    monkeypatch.setattr(DiffusionModel, "decode_rows", keep)
    monkeypatch.setattr(FlatRows, "on", lambda rows, device: on(rows, cpu))
    engine = Engine(model, batch_size=1, slots=40)
    engine.device, engine.early = torch.device("cuda:1"), early
    decoder = decode.D2F(4, max_new_tokens=9)
    engine.submit(Request(0, [5, 6, 7], decoder, model.contract, None))
    for _ in engine.run():
        assert devices.now == torch.device("cuda:0"), "and the caller's is as it was"
    assert seen == {torch.device("cuda:1")}


def test_so_does_a_forward_without_a_cache(monkeypatch):
    devices, model, seen = Devices(monkeypatch), random_model("llada"), []
    ids = torch.tensor([[5, 6]])
    spans = torch.tensor([[[0, 2]]] * 2, dtype=torch.int32)
    monkeypatch.setattr(DiffusionModel, "device", torch.device("cuda:1"))
    hook = model.backbone.model.register_forward_pre_hook(lambda *_: seen.append(devices.now))
    try:
        model.hidden(ids, SpanPlan(spans))
    finally:
        hook.remove()
    assert seen == [torch.device("cuda:1")]
