"""Forwards padded to fixed sizes, in a cache that the requests fill to the last slot.

A padding row that wrote to any slot but the one that is no request's, or that a real row could see,
would change what the request at that slot reads.
"""

from __future__ import annotations

import pytest
import torch
from tiny import POISON, poisoned_model, random_model

import decode
from decode.engine import cuda_graphs
from decode.engine.engine import Engine
from decode.engine.request import Request

SIZES = (16, 40, 96)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    "decoder",
    [
        decode.D2F(4, tau_conf=0.15, max_new_tokens=12),
        decode.D2F(4, tau_conf=0.9, max_new_tokens=10),
        decode.Static(block_size=5, max_new_tokens=10),
    ],
    ids=["pipeline", "one at a time", "static"],
)
@pytest.mark.parametrize("together", [1, 3])
def test_rows_that_pad_touch_no_request_in_a_full_cache(family, decoder, together, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "SIZES", SIZES)
    model, prompts = random_model(family), [[5, 6, 7], [8], [9, 10, 11, 12, 13]][:together]
    plain = decode.generate(model, prompts, decoder)
    requests = [Request(i, ids, decoder, model.contract, None) for i, ids in enumerate(prompts)]
    padded = []
    real = cuda_graphs.GraphForward.start

    def counted(self, rows, wanted):
        padded.append(self.host.shape[1] - len(rows.tokens))
        return real(self, rows, wanted)

    monkeypatch.setattr(cuda_graphs.GraphForward, "start", counted)
    slots = sum(request.session.slots for request in requests)  # not one more
    engine = Engine(model, batch_size=together, slots=slots, static=True)
    for request in requests:
        engine.submit(request)
    list(engine.run())
    assert [request.result.raw_tokens for request in requests] == [r.raw_tokens for r in plain]
    assert len(padded) == engine.forwards, "every forward was a static one"
    assert any(padded), "and some had rows that pad"


@pytest.mark.parametrize(
    "device, variable, wanted",
    [("cpu", None, False), ("cuda", None, True), ("cuda", "1", True), ("cuda", "0", False)],
)
def test_graphs_are_for_a_gpu_and_can_be_turned_off(device, variable, wanted, monkeypatch):
    monkeypatch.delenv("D2F_GRAPHS", raising=False)
    if variable is not None:
        monkeypatch.setenv("D2F_GRAPHS", variable)
    assert cuda_graphs.graphs_wanted(torch.device(device)) is wanted


def test_the_slot_of_padding_rows_keeps_nothing_of_a_request_that_failed():
    """They meet what is not finite in its slots, and every later row would meet theirs."""
    model, decoder = poisoned_model(), decode.D2F(4, tau_conf=0.3, max_new_tokens=9)
    want = decode.generate(model, [[8]], decoder)[0].raw_tokens
    engine = Engine(model, batch_size=2, slots=60, static=True)
    requests = [
        Request(i, ids, decoder, model.contract, None) for i, ids in enumerate([[POISON, 9], [8]])
    ]
    for request in requests:
        engine.submit(request)
    list(engine.run())
    assert requests[0].result.error is not None
    assert requests[1].result.error is None
    assert requests[1].result.raw_tokens == want
