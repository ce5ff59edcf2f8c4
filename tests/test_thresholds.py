"""Numbers that are compared with a threshold are computed as the official codes compute them: where
one lies exactly on it, the last bit decides."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from block_tiny import student
from hypothesis import given, settings
from hypothesis import strategies as st
from shadows import CONTRACT
from tiny import random_model

import decode
from decode.step import Predictions, Step
from tests.references.block import decode_block
from tests.references.d2f import decode_d2f
from tests.references.d2f_revoke import decode_d2f_revoking
from tests.references.wino import decode_wino


def confident(step: Step, first: int) -> Predictions:
    """The first so many predictions are above every threshold that these tests have."""
    confidence = np.where(np.arange(len(step.read)) < first, 0.9, 0.1).astype(np.float32)
    return Predictions(np.full(len(step.read), 9), confidence)


@pytest.mark.parametrize("size", range(1, 65))
def test_k_of_n_decoded_reach_a_threshold_of_k_nths(size):
    """Appending and activating, for every k; and one token fewer does not reach it."""
    for k in range(1, size):
        share = k / size
        decoder = decode.D2F(size, share, share, 0.5, max_new_tokens=2 * size)
        session = decoder.begin([5], CONTRACT)
        session.accept(confident(session.step(), k - 1))
        session.step()
        if k > 1:  # with none above the threshold one is forced
            assert [block.state for block in session.blocks()] == ["fully active"]
            session.accept(confident(session.step(), 1))
            session.step()
        assert [block.state for block in session.blocks()] == ["fully active", "fully active"]


def just_below(confidence: float) -> float:
    """A threshold that only fp32 cannot tell from a confidence."""
    return float(np.nextafter(confidence, 0))


def first_confidences(model, prompt, decoder) -> list[float]:
    """Of what the first forward reveals when everything is above its threshold."""
    event = next(iter(decode.stream(model, [prompt], decoder)))
    return [revealed.confidence for revealed in event.revealed]


@settings(max_examples=15)
@given(
    st.sampled_from(["llada", "dream"]),
    st.lists(st.integers(2, 200), min_size=1, max_size=8),
    st.integers(0, 5),
    st.sampled_from(["d2f", "d2f revoking", "block", "wino"]),
)
def test_a_confidence_on_the_threshold_is_decided_as_in_the_reference(family, prompt, rank, name):
    model = copy.deepcopy(student(family, 6, 0) if name == "block" else random_model(family))
    model.backbone.double()  # forwards of other shapes then agree in every bit of fp32
    make, reference = {
        "d2f": (lambda tau: decode.D2F(6, 0.1, 0.9, tau, 12), decode_d2f),
        "d2f revoking": (
            lambda tau: decode.D2F(6, 0.1, 0.9, tau, 12, revoke="commit", tau_revoke=0.2),
            decode_d2f_revoking,
        ),
        "block": (lambda tau: decode.Block(6, None, "dynamic", tau, 12), decode_block),
        "wino": (
            lambda tau: decode.Wino(6, 12, tau1=tau, tau2=0.0, caps=False),
            decode_wino,
        ),
    }[name]
    found = first_confidences(model, prompt, make(0.0))
    decoder = make(just_below(found[rank % len(found)]))
    result = decode.generate(model, [prompt], decoder)[0]
    raw = reference(model, prompt, decoder)
    raw = raw[0] if isinstance(raw, tuple) else raw
    assert result.raw_tokens == [token for token in raw if token is not None]


@given(
    st.lists(st.floats(0, 3, width=32), min_size=1, max_size=9),
    st.floats(0, 1),
    st.integers(0, 8),
    st.integers(1, 9),
)
def test_wedlm_adds_its_penalty_as_the_official_code_does(entropy, penalty, rank, stride):
    """fp32 throughout; the threshold is one of the sums itself, so rounding decides."""
    h, distance = torch.tensor(entropy), torch.arange(len(entropy)).float() * stride
    official = h + distance * penalty
    threshold = float(official[rank % len(entropy)])
    chosen = (official < threshold).nonzero().flatten().tolist() or [int(official.argmin())]
    decoder = decode.WeDLM(entropy_threshold=threshold, distance_penalty=penalty)
    session = decoder.begin([5], CONTRACT)
    masks = 7 + stride * np.arange(len(entropy))
    assert session.choose(masks, h.numpy()).tolist() == chosen
