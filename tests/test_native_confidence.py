"""Token and confidence in C++ are those of the plain computation, for any logits, and the same for
a row in any batch; where the code cannot be built nothing is lost."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model

import decode
from d2f.cpu import rows as native_confidence
from d2f.cpu.rows import scored
from decode.engine.sampling import (
    PredictionRequest,
    Sampler,
    prediction_table,
    table_of,
    wanted_of,
)
from decode.step import Sampling
from triton_kernels.confidence import confidence_reference

if shutil.which("g++") is None and shutil.which("clang++") is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)


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


@settings(max_examples=200)
@given(asked())
def test_the_table_is_the_plain_one(asked):
    logits, mask_id, named = asked
    got, truth = scored(logits, mask_id, named), reference(logits.double(), mask_id, named)
    plain = prediction_table(logits, mask_id, named, None)
    assert got[0].tolist() == plain[0].tolist()
    torch.testing.assert_close(got[1:], truth[1:], rtol=1e-5, atol=1e-6)
    assert scored(logits, mask_id, None).tolist() == got[:2].tolist()


def reference(logits, mask_id, named):
    """The same table in fp64."""
    found = confidence_reference(logits, mask_id=mask_id, named=named)
    columns = [found.token, found.probability, found.named, found.named_log]
    return torch.stack([c.double() for c in (*columns, found.entropy, found.margin)])


@settings(max_examples=50)
@given(asked())
def test_a_row_has_the_same_figures_alone(asked):
    logits, mask_id, named = asked
    together = scored(logits, mask_id, named)
    for row in range(len(logits)):
        part = slice(row, row + 1)
        assert scored(logits[part], mask_id, named[part])[:, 0].tolist() == (
            together[:, row].tolist()
        )


@settings(max_examples=50)
@given(asked(), st.integers(0, 999))
def test_drawn_rows_and_the_greedy_ones_beside_them_are_those_alone(asked, seed):
    logits, mask_id, _ = asked
    ways = [{}, {"temperature": 0.8, "seed": seed}, {"temperature": 1.0, "top_k": 3, "top_p": 0.7}]
    groups = [
        PredictionRequest(Sampler(Sampling(**ways[row % 3]), mask_id), 1)
        for row in range(len(logits))
    ]
    native, plain = (table_of(logits, wanted_of(groups), native=way) for way in (True, False))
    assert native[0].tolist() == plain[0].tolist()
    torch.testing.assert_close(native[1], plain[1], rtol=1e-5, atol=1e-6)
    for row, group in enumerate(groups):
        alone = table_of(logits[row : row + 1], wanted_of([group]), native=True)
        assert alone[:, 0].tolist() == native[:, row].tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 3, 8, 20])
def test_what_is_not_finite_is_seen(bad, place):
    logits = torch.zeros(3, 21)
    logits[1, place] = bad
    found = scored(logits, 3, torch.zeros(3, dtype=torch.int64))
    assert found[1].isnan().tolist() == [False, True, False]


def test_a_compiled_model_decodes_with_it_what_the_plain_one_does(monkeypatch):
    calls = []

    def count(logits, *more):
        calls.append(len(logits))
        return scored(logits, *more)

    monkeypatch.setattr("decode.engine.sampling.scored", count)
    model, prompts = fresh_model("llada"), [[5, 6, 7], [9]]
    options = [{}, {"forced_pick": "entropy"}, {"temperature": 1.0, "seed": 3}]
    decoders = [decode.D2F(4, max_new_tokens=8, **own) for own in options]
    want = [[r.tokens for r in decode.generate(model, prompts, d)] for d in decoders]
    assert not calls
    model.compile()
    assert [[r.tokens for r in decode.generate(model, prompts, d)] for d in decoders] == want
    assert calls


def test_where_it_cannot_be_built_the_plain_one_is_used(monkeypatch):
    def fail():
        raise RuntimeError("no compiler")

    native_confidence._is_sound.cache_clear()
    monkeypatch.setattr(native_confidence, "library", fail)
    with pytest.warns(RuntimeWarning, match="confidence in C.. does not work here.*no compiler"):
        assert not native_confidence.can_score()
    native_confidence._is_sound.cache_clear()


def test_it_can_be_left_out(monkeypatch):
    monkeypatch.setenv("D2F_KERNELS", "0")
    assert not native_confidence.can_score()
