"""What an event promises to those who send it on: text that never changes, rows that were fed."""

from __future__ import annotations

import numpy as np
import pytest
from every_decoder import KINDS, exact_model

import decode

CASES = [(kind, decoder) for kind, (_, decoders) in KINDS.items() for decoder in decoders]


@pytest.mark.parametrize("kind, decoder", CASES, ids=lambda value: getattr(value, "name", value))
def test_what_is_settled_grows_and_is_the_answer(kind, decoder):
    """Whatever a decoder takes back, or verifies later."""
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(20, 250, 7).tolist()
        events = list(decode.stream(exact_model(kind), [prompt], decoder))
        sent: list[int] = []
        for event in events:
            assert event.settled[: len(sent)] == sent
            sent = event.settled
        result = events[-1].result
        assert sent[: len(result.tokens)] == result.tokens
        assert [event.call for event in events] == result.calls
