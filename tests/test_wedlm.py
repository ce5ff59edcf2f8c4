"""WeDLM's streaming decoding on made-up predictions, and what its reordering computes (against its
reference and the official code: test_decode_reference.py, test_decode_golden.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from block_tiny import wedlm
from hypothesis import given, settings
from test_decode_reference import prompts, streaming, verified
from test_decode_reference import wedlms as models

import decode
from d2f import spans as sp
from d2f.attention import SpanPlan
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.step import Predictions, Step


@settings(max_examples=25)
@given(models, prompts, streaming | verified)
def test_what_is_committed_are_the_keys_and_values_of_a_causal_pass(model, prompt, decoder):
    request = Request(0, prompt, decoder, model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    step = request.begin(request.session.share)
    engine.submit(request)
    while not request.done:
        assert not np.isin(model.mask_id, request.session.x[: step.cached])
        assert step.slots.tolist() == list(range(step.cached, step.cached + len(step.tokens)))
        engine.advance()
        step = request.step
    count = request.session.committed
    rows = torch.arange(count)
    plain = model.new_cache(count)
    plain.slots = rows
    with torch.inference_mode():
        tokens = torch.from_numpy(request.session.x[:count])
        model.decode_rows(tokens, rows, SpanPlan(sp.causal(count)), plain, rows[-1:])
    for ours, truth in zip(engine.cache.layers, plain.layers, strict=True):
        for mine, expected in zip(ours, truth, strict=True):
            torch.testing.assert_close(mine[:, :, :count], expected, atol=2e-5, rtol=1e-4)


def predictions(step: Step, tokens: list[int], entropy: list[float]) -> Predictions:
    assert len(step.read) == len(tokens) == len(entropy)
    values = np.array(entropy, np.float32)
    return Predictions(np.array(tokens), values, entropy=values)


CONTRACT = replace(wedlm(False, 0).contract, mask_id=1, end_ids=(0,))


def test_block_by_block_a_window_stands_until_it_is_filled_and_is_committed_whole():
    """Windows of 3; in brackets what each forward fills. Its rows see all of it where it is
    bidirectional, and are committed causally."""
    for attention in ("causal", "bidirectional"):
        decoder = decode.WeDLM(3, None, 0.0, 6, refill="block", window_attention=attention)
        session = decoder.begin([5], CONTRACT)
        fed, last_ends = [], []
        while (step := session.step()) is not None:
            fed.append(step.positions.tolist())
            last_ends.append((step.spans[:, 0, 1]).tolist())
            count = len(step.read)
            session.accept(predictions(step, [7] * count, [0.1] * count))
        assert fed[:4] == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4, 5, 6]]
        causal = [[1, 2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 3, 4, 5, 6, 7]]
        whole = [[1, 4, 4, 4], [4, 4, 4], [4, 4, 4], [2, 3, 4, 7, 7, 7]]
        assert last_ends[:4] == (causal if attention == "causal" else whole)
        assert session.counts["window_rows"] == 3 + 3 + 3 + 6 + 3 + 3


@pytest.mark.parametrize("refill", ["paper", "repository"])
@pytest.mark.parametrize("verify", [None, "ar"])
def test_the_blocks_shown_lie_where_their_tokens_do(refill, verify):
    """Positions of a block count from the response's start: committed, then the window."""
    model = wedlm(True, 0)
    decoder = decode.WeDLM(
        window=4, entropy_threshold=1.5, max_new_tokens=14, refill=refill, verify=verify
    )
    events = list(decode.stream(model, [[5, 6, 7, 8, 9]], decoder))
    response = events[-1].result.raw_tokens
    assert len(events) > 3
    for event in events:
        starts = [block.start for block in event.blocks]
        ends = [block.end for block in event.blocks]
        assert starts[0] == 0 and starts[1:] == ends[:-1], "one after the other from 0"
        assert [block.state for block in event.blocks] == ["cached", "fully active"][
            -len(event.blocks) :
        ]
        assert all(revealed.position < 14 for revealed in event.revealed)
        for block in event.blocks:
            assert len(block.tokens) == block.end - block.start > 0
            if block.state == "cached":  # never revised
                assert list(block.tokens) == response[block.start : block.end]
        shown = {
            block.start + i: token for block in event.blocks for i, token in enumerate(block.tokens)
        }
        new = {r.position: r.token for r in event.revealed}
        assert all(shown.get(position, token) == token for position, token in new.items())
