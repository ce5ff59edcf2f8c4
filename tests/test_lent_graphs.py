"""Caches and graphs stay with their model: made once for many engines, each the only one to have
its own while it lives, and never those of a model that has changed since."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POISON, fresh_model, poisoned_model, random_model

import decode
from d2f.adapters import new_lora
from decode.engine import engine as engines
from decode.engine.cuda_graphs import GraphForward, GraphForwards, LentGraphs, lent_graphs_of
from decode.engine.engine import Engine
from decode.engine.request import Request

DECODER = decode.D2F(4, tau_conf=0.3, max_new_tokens=9)


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


def test_a_second_generate_makes_nothing_anew(made):
    model = fresh_model("llada")
    first = decode.generate(model, [[5, 6, 7], [8]], DECODER)
    assert made.count("GraphForwards") == 1 and "GraphForward" in made
    made.clear()
    again = decode.generate(model, [[5, 6, 7], [8]], DECODER)
    assert made == []
    assert [r.raw_tokens for r in again] == [r.raw_tokens for r in first]


def test_one_that_is_given_up_half_way_is_used_again(made):
    """Its forwards, in the middle of a request, leave nothing behind."""
    model = fresh_model("llada")
    want = [r.raw_tokens for r in decode.generate(model, [[5, 6, 7]], DECODER)]
    made.clear()
    events = decode.stream(model, [[9, 10, 11]], DECODER)
    next(events)
    events.close()
    assert [r.raw_tokens for r in decode.generate(model, [[5, 6, 7]], DECODER)] == want
    assert "GraphForwards" not in made


def test_the_case_that_the_module_draws():
    model, lent = random_model("llada"), LentGraphs()
    a, b = lent.lend(model, 900), lent.lend(model, 300)
    assert [one[1].slots for one in (a, b)] == [960, 320]
    for buffer in a[1].cache.layers[1]:
        buffer += 1
    lent.take_back(a)
    lent.take_back(b)
    c = lent.lend(model, 500)
    assert c[1] is a[1]
    assert not any(buffer.any() for layer in c[1].cache.layers for buffer in layer)
    d = lent.lend(model, 400)
    assert d[1].slots == 416 and not lent._free


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(8, 200), min_size=1, max_size=12), min_size=2, max_size=5),
    st.data(),
)
def test_engines_that_are_alive_at_once_do_not_meet(prompts, data):
    """Advanced in any order, one failing with NaN in its slots, closed and forgotten in between."""
    model = poisoned_model()
    want = [decode.generate(model, [ids], DECODER)[0].raw_tokens for ids in prompts]
    alive, tokens = [], {}
    waiting = list(enumerate(prompts))
    while waiting or alive:
        if waiting and (not alive or data.draw(st.booleans())):
            i, ids = waiting.pop(0)
            engine = Engine(model, batch_size=2, slots=60, static=True)
            poison = Request(-1, [POISON, 9], DECODER, model.contract, None)
            for request in (poison, Request(i, ids, DECODER, model.contract, None)):
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
    assert len(lent_graphs_of(model)._free) <= len(prompts)


def test_a_closed_engine_gives_back_once(made):
    model = fresh_model("llada")
    engine = Engine(model, batch_size=1, slots=9)
    engine.close()
    engine.close()
    del engine
    gc.collect()
    assert len(lent_graphs_of(model)._free) == 1


def test_an_engine_that_is_forgotten_gives_back(made):
    model = fresh_model("llada")
    cache = weakref.ref(Engine(model, batch_size=1, slots=9).cache)
    gc.collect()
    assert Engine(model, batch_size=1, slots=9).cache is cache()


def test_neither_cache_nor_graphs_keep_the_model(made):
    model = fresh_model("llada")
    decode.generate(model, [[5, 6]], DECODER)
    gone = weakref.ref(model)
    cache = weakref.ref(lent_graphs_of(model)._free[0][1].cache)
    del model
    gc.collect()
    assert gone() is None and cache() is None


def merged(model):
    model.merge_adapter()


def moved(model):
    weight = model.backbone.lm_head.weight
    weight.data = weight.data.clone()


def in_training(model):
    model.backbone.train()


def compiled(model):
    model.compiled_rows = type("Compiled", (), {})()


def with_other_kernels(model):
    os.environ["D2F_KERNELS"] = "1" if os.environ["D2F_KERNELS"] == "0" else "0"


def without_adapter(model):
    model.adapter.base_model.disable_adapter_layers()


@pytest.mark.parametrize(
    "change", [merged, moved, in_training, compiled, with_other_kernels, without_adapter]
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
    assert len(lent_graphs_of(model)._free) == 1, "the old one is gone"


def test_weights_that_learn_where_they_are_keep_their_graphs(made):
    model = fresh_model("llada")
    decode.generate(model, [[5, 6]], DECODER)
    made.clear()
    with torch.no_grad():
        model.backbone.lm_head.weight.add_(1)
    decode.generate(model, [[5, 6]], DECODER)
    assert made == []
