"""Models of every mask in double precision, so that forwards of other shapes agree in every bit of
fp32, decoders of every kind that run on each, and requests that come, fail and leave."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from block_tiny import drafting, sdar, student, wedlm
from hypothesis import strategies as st
from tiny import POISON, random_model

import decode
from d2f.model import DiffusionModel
from decode.decoders import Decoder
from decode.engine.engine import Engine
from decode.engine.request import Request

N = 9  # new tokens
D2F = (
    decode.D2F(4, tau_conf=0.3, max_new_tokens=N),
    decode.D2F(3, tau_add=0.0, tau_conf=0.2, max_new_tokens=N, temperature=1.0, seed=5),
    decode.D2F(4, tau_conf=0.2, max_new_tokens=N, revoke="commit", tau_revoke=0.3),
    decode.D2F(3, tau_conf=0.2, max_new_tokens=N, revoke="always", tau_revoke=0.5),
    decode.D2F(3, tau_conf=0.3, max_new_tokens=N, lossless=3),
    decode.D2F(4, tau_conf=0.2, max_new_tokens=N, temperature=0.4, top_p=0.7, seed=2**64 - 1),
    decode.D2F(4, tau_conf=0.2, max_new_tokens=N, temperature=1e300, top_k=3, seed=-(2**63)),
)
BLOCKWISE = (
    decode.Static(block_size=4, max_new_tokens=N, temperature=0.7, seed=3),
    decode.Static(block_size=3, max_new_tokens=N, cache="dual"),
    decode.Threshold(4, N, tau=0.4, cache="prefix"),
    decode.Factor(4, N),
    decode.EntropyBounded(4, N, gamma=0.5),
    decode.Wino(4, N, tau1=0.1, tau2=0.3),
    decode.FreeDave(4, N, drafts=3),
    decode.FreeDave(4, N, drafts=3, tau=0.3),
)
BLOCK = (decode.Block(tau=0.3, max_new_tokens=N), decode.Block(reveal="static", max_new_tokens=N))
CAUSAL = (
    decode.Autoregressive(N),
    decode.Autoregressive(N, temperature=1.0, seed=7),
    decode.Autoregressive(3, temperature=0.5, top_k=20),
    decode.Autoregressive(6, temperature=1e300, top_p=0.7, seed=2**64 - 1),
)
WINDOW = (
    decode.WeDLM(5, 0.6, max_new_tokens=N),
    decode.WeDLM(4, 0.6, max_new_tokens=N, refill="repository"),
    decode.WeDLM(5, 1.5, verify="ar", max_new_tokens=N),
    decode.WeDLM(5, 0.6, max_new_tokens=N, temperature=1.0),
)
DRAFTING = (
    decode.SelfDraft(rows=6, max_new_tokens=N),
    decode.SelfDraft(rows=9, placement="quadratic", max_new_tokens=N, temperature=1.0, seed=7),
)
KINDS = {
    "llada": (lambda: random_model("llada"), D2F + BLOCKWISE),
    "dream": (lambda: random_model("dream"), D2F + BLOCKWISE),
    "llada student": (lambda: student("llada", 4, 0), D2F + BLOCKWISE + BLOCK),
    "dream student": (lambda: student("dream", 4, 0), D2F + BLOCKWISE + BLOCK),
    "sdar": (lambda: sdar(4, 0), BLOCKWISE + BLOCK),
    "wedlm": (lambda: wedlm(True, 0), WINDOW + CAUSAL),
    "causal": (lambda: random_model("causal"), CAUSAL),
    "self-drafting": (drafting, DRAFTING + CAUSAL),
}


@cache
def exact_model(kind: str) -> DiffusionModel:
    """Rows are NaN where they see the token `POISON`, which is never chosen. Shared between tests,
    so never to be changed."""
    model = copy.deepcopy(KINDS[kind][0]())
    model.backbone.double()
    with torch.no_grad():
        embedding = model.backbone.get_input_embeddings()
        embedding.weight = torch.nn.Parameter(embedding.weight.clone())
        embedding.weight[POISON] = torch.nan

    def rule_out(module, inputs, logits):
        ruled = logits.clone()
        ruled[..., POISON] = -torch.inf
        return ruled

    model.backbone.lm_head.register_forward_hook(rule_out)
    return model


kinds = st.sampled_from(sorted(KINDS))
tokens = st.integers(8, 250)


def decoders(kind: str) -> st.SearchStrategy[Decoder]:
    return st.sampled_from(KINDS[kind][1])


@cache
def alone(kind: str, prompt: tuple[int, ...], decoder: Decoder) -> decode.Result:
    """What a request gives alone, its steps whole."""
    return decode.generate(exact_model(kind), [list(prompt)], decoder)[0]


WAYS = ("step", "accept", "blocks", "poison", "too large")


@dataclass(frozen=True)
class Visit:
    """A request that comes at one advance of the engine. leaves: the advance at which it is
    cancelled. way: how it fails, `when` steps after its first; "" where it does not."""

    prompt: list[int]
    decoder: Decoder
    comes: int = 0
    leaves: int | None = None
    way: str = ""
    when: int = 0


def visits(kind: str, prompts: st.SearchStrategy) -> st.SearchStrategy[list[Visit]]:
    leaves = st.none() | st.none() | st.integers(0, 12)
    ways = st.just("") | st.just("") | st.sampled_from(WAYS)
    one = st.builds(
        Visit, prompts, decoders(kind), st.integers(0, 6), leaves, ways, st.integers(0, 4)
    )
    return st.lists(one, min_size=1, max_size=5)


def spoil(request: Request, visit: Visit) -> None:
    """Make a request's session fail as planned."""
    session, seen = request.session, 0

    def later(*arguments):
        nonlocal seen
        seen += 1
        fails = seen == visit.when + 1
        if fails and visit.way != "poison":
            raise KeyError("boom")
        found = real(*arguments)
        if not fails or found is None:
            return found
        return replace(found, tokens=np.append(found.tokens[:-1], POISON))

    if visit.way == "too large":
        kind = type(session)
        session.__class__ = type("Large", (kind,), {"slots": property(lambda self: 10**6)})
    elif visit.way:
        name = "step" if visit.way == "poison" else visit.way
        real = getattr(session, name)
        setattr(session, name, later)


def play(engine: Engine, model: DiffusionModel, planned: list[Visit]) -> list[Request]:
    """Submit, spoil and cancel each request at its time; its events follow from its result."""
    requests = [
        Request(i, v.prompt, v.decoder, model.contract, None) for i, v in enumerate(planned)
    ]
    events: dict[int, list] = {i: [] for i in range(len(planned))}
    gone: set[int] = set()
    for request, visit in zip(requests, planned, strict=True):
        spoil(request, visit)
    for now in range(2000):
        for visit, request in zip(planned, requests, strict=True):
            if visit.comes == now:
                engine.submit(request)
            if visit.leaves is not None and now == max(visit.leaves, visit.comes):
                if engine.cancel(request):
                    gone.add(request.index)
                assert not engine.cancel(request)
        for event in engine.advance():
            assert event.request not in gone
            events[event.request].append(event)
        if not engine.busy and not any(visit.comes > now for visit in planned):
            break
    else:
        raise AssertionError("the engine does not come to an end")
    for request in requests:
        own, result = events[request.index], request.result
        assert (result is None) == (request.index in gone)
        assert all(event.result is None for event in own[:-1])
        settled: list[int] = []
        for event in own if result is None or result.error is None else own[:-1]:
            assert event.settled[: len(settled)] == settled, "shown text never changes"
            settled = event.settled
        if result is not None:
            assert own[-1].result is result
            assert len(result.calls) == result.forwards
            if result.error is None:
                assert [event.forward for event in own] == list(range(1, result.forwards + 1))
                assert [event.call for event in own] == result.calls
                assert settled[: len(result.tokens)] == result.tokens
    return requests
