"""The rows of a forward lie in the order of their slots, whoever has come and gone before it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model

import decode
from decode.engine import engine
from decode.engine.engine import Engine
from decode.engine.request import Request

COMING = st.tuples(
    st.integers(0, 8),  # at which forward it comes
    st.integers(1, 20),  # tokens of its prompt
    st.integers(1, 9),  # of its response
    st.one_of(st.none(), st.integers(0, 12)),  # when it is cancelled
)


@settings(max_examples=40)
@given(st.lists(COMING, min_size=2, max_size=9), st.integers(1, 4), st.booleans())
def test_rows_are_fed_in_the_order_of_their_slots(coming, batch_size, early):
    model, bases = random_model("llada"), []
    runner = Engine(model, batch_size=batch_size, slots=70)
    runner.early = early
    requests = [
        Request(i, [9] * prompt, decode.D2F(4, max_new_tokens=new), model.contract, None)
        for i, (_, prompt, new, _) in enumerate(coming)
    ]
    real = engine.join

    def keep(fed):
        bases.append([request.base for request, _ in fed])
        return real(fed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "join", keep)
        for now in range(1000):
            for request, (comes, _, _, leaves) in zip(requests, coming, strict=True):
                if comes == now:
                    runner.submit(request)
                if leaves == now:
                    runner.cancel(request)
            runner.advance()
            if now > 8 and not (runner.running or runner.waiting):
                break
    assert bases
    assert all(own == sorted(own) for own in bases)
