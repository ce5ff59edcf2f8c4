"""Models of every mask in double precision, so that forwards of other shapes agree in every bit of
fp32, and decoders of every kind that run on each."""

from __future__ import annotations

import copy
from functools import cache

from block_tiny import sdar, student, wedlm
from hypothesis import strategies as st
from tiny import random_model

import decode
from d2f.model import DiffusionModel
from decode.decoders import Decoder

N = 9  # new tokens
D2F = (
    decode.D2F(4, tau_conf=0.3, max_new_tokens=N),
    decode.D2F(3, tau_add=0.0, tau_conf=0.2, max_new_tokens=N, temperature=1.0, seed=5),
    decode.D2F(4, tau_conf=0.2, max_new_tokens=N, revoke="commit", tau_revoke=0.3),
    decode.D2F(3, tau_conf=0.3, max_new_tokens=N, lossless=3),
)
BLOCKWISE = (
    decode.Static(block_size=4, max_new_tokens=N, temperature=0.7, seed=3),
    decode.Static(block_size=3, max_new_tokens=N, cache="dual"),
    decode.Threshold(4, N, tau=0.4, cache="prefix"),
    decode.Factor(4, N),
    decode.EntropyBounded(4, N, gamma=0.5),
    decode.Wino(4, N, tau1=0.1, tau2=0.3),
    decode.FreeDave(4, N, drafts=3),
)
BLOCK = (decode.Block(tau=0.3, max_new_tokens=N), decode.Block(reveal="static", max_new_tokens=N))
CAUSAL = (
    decode.Autoregressive(N),
    decode.Autoregressive(N, temperature=1.0, seed=7),
    decode.Autoregressive(3, temperature=0.5, top_k=20),
)
WINDOW = (
    decode.WeDLM(5, 0.6, max_new_tokens=N),
    decode.WeDLM(4, 0.6, max_new_tokens=N, refill="repository"),
    decode.WeDLM(5, verify="ar", max_new_tokens=N),
    decode.WeDLM(5, 0.6, max_new_tokens=N, temperature=1.0),
)
KINDS = {
    "llada": (lambda: random_model("llada"), D2F + BLOCKWISE),
    "dream": (lambda: random_model("dream"), D2F + BLOCKWISE),
    "llada student": (lambda: student("llada", 4, 0), D2F + BLOCKWISE + BLOCK),
    "dream student": (lambda: student("dream", 4, 0), D2F + BLOCKWISE + BLOCK),
    "sdar": (lambda: sdar(4, 0), BLOCKWISE + BLOCK),
    "wedlm": (lambda: wedlm(True, 0), WINDOW + CAUSAL),
    "causal": (lambda: random_model("causal"), CAUSAL),
}


@cache
def exact_model(kind: str) -> DiffusionModel:
    """Shared between tests, so never to be changed."""
    model = copy.deepcopy(KINDS[kind][0]())
    model.backbone.double()
    return model


kinds = st.sampled_from(sorted(KINDS))


def decoders(kind: str) -> st.SearchStrategy[Decoder]:
    return st.sampled_from(KINDS[kind][1])


@cache
def alone(kind: str, prompt: tuple[int, ...], decoder: Decoder) -> decode.Result:
    """What a request gives alone, its steps whole."""
    return decode.generate(exact_model(kind), [list(prompt)], decoder)[0]
