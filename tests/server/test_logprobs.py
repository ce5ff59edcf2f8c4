"""Log-probabilities are those of the tokens that the response has, in OpenAI's formats."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from every_decoder import KINDS, exact_model
from tiny import random_model, tokenizer

import decode
from decode.server.text import (
    LEAST,
    ResponseText,
    TokenLogprob,
    chat_logprobs,
    completion_logprobs,
    token_bytes,
    token_name,
)
from decode.step import Event, Result, Revealed

REVOKING = [
    ("llada", decode.Wino(8, 16, tau1=0.05, tau2=0.9)),
    ("dream", decode.D2F(4, tau_conf=0.1, max_new_tokens=16, revoke="always", tau_revoke=0.9)),
]
CASES = [(kind, decoder) for kind, (_, decoders) in KINDS.items() for decoder in decoders]
CASES += REVOKING


def sent(events, model, stop=()):
    """The pieces of text, and of the tokens that go with each."""
    text = ResponseText(model.tokenizer, stop, model.end_ids, logprobs=True)
    pieces, tokens = [], []
    for event in events:
        pieces.append(text.take(event))
        tokens.append(text.new_logprobs())
    return pieces, tokens


@pytest.mark.parametrize("kind, decoder", CASES, ids=lambda value: getattr(value, "name", value))
def test_each_token_has_the_confidence_of_the_forward_that_decided_it_last(kind, decoder):
    """Whatever a decoder took back in between, and whatever a stop string cuts off."""
    model, again = exact_model(kind), 0
    for seed in range(3):
        prompt = np.random.default_rng(seed).integers(20, 250, 7).tolist()
        for stop in ((), ("e",)):
            events = list(decode.stream(model, [prompt], replace(decoder, stop=stop)))
            result = events[-1].result
            decided = {}
            for one in (one for event in events for one in event.revealed):
                again += one.position in decided
                decided[one.position] = one
            found = [one for piece in sent(events, model, stop)[1] for one in piece]
            assert [one.token for one in found] == result.tokens
            assert result.tokens == [decided[i].token for i in range(len(result.tokens))]
            assert [one.logprob for one in found] == [
                math.log(decided[i].confidence) for i in range(len(found))
            ]
    assert again or (kind, decoder) not in REVOKING, "nothing was decided twice: not tested"


def test_a_token_comes_with_its_text_and_not_where_a_stop_string_may_hide_it():
    """2, the halves of an emoji, E (a stop string may begin), N, x."""
    kind = tokenizer()
    ids = [
        i for part in ("2", b"\xf0\x9f", b"\x99\x82", "E", "N", "x") for i in letters(kind, part)
    ]
    revealed = [Revealed(i, token, 0.5) for i, token in enumerate(ids)]
    events = [Event(0, 1, [], revealed[: i + 1], None, ids[: i + 1]) for i in range(len(ids))]
    result = Result(ids, ids, kind.decode(ids), 1, [], 0.0, "length", 1)
    events.append(Event(0, 9, [], [], result, ids))
    model = random_model("llada")
    pieces, tokens = sent(events, model, ["END"])
    assert pieces == ["2", "", "", "", "🙂", "", "", "ENx", ""]
    assert [len(piece) for piece in tokens] == [1, 0, 0, 0, 4, 0, 0, 3, 0]
    found = [one for piece in tokens for one in piece]
    assert [one.offset for one in found] == [0, 1, 1, 1, 1, 2, 3, 4]
    names = ["2", r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x99", r"bytes:\x82", "E", "N", "x"]
    assert [token_name(kind, one.token) for one in found] == names
    assert b"".join(token_bytes(kind, one.token) for one in found).decode() == "2🙂ENx"


def letters(kind, part):
    raw = part.encode() if isinstance(part, str) else part
    names = {token_bytes(kind, i): i for i in range(len(kind)) if len(token_bytes(kind, i)) == 1}
    return [names[bytes([byte])] for byte in raw]


def test_the_formats_of_both_endpoints():
    kind = tokenizer()
    a, b = kind.convert_tokens_to_ids(["a", "b"])
    found = [
        TokenLogprob(a, None, 0),
        TokenLogprob(b, -0.5, 1),
        TokenLogprob(a, -2.0, 2, top=(b, -0.25)),
        TokenLogprob(b, -0.25, 3, top=(b, -0.25)),
    ]
    assert completion_logprobs(found, kind, top=True) == {
        "tokens": ["a", "b", "a", "b"],
        "token_logprobs": [None, -0.5, -2.0, -0.25],
        "top_logprobs": [None, {"b": -0.5}, {"a": -2.0, "b": -0.25}, {"b": -0.25}],
        "text_offset": [0, 1, 2, 3],
    }
    assert completion_logprobs(found, kind, top=False)["top_logprobs"] is None
    one = {"token": "b", "bytes": [98], "logprob": -0.5}
    for top, listed in ((True, [one]), (False, [])):
        content = chat_logprobs(found[1:2], kind, top=top)
        assert content == [one | {"top_logprobs": listed}]


def test_a_probability_that_rounds_to_0_is_no_infinity():
    text = ResponseText(tokenizer(), logprobs=True)
    text.take(Event(0, 1, [], [Revealed(0, 9, 0.0)], None, [9]))
    assert [one.logprob for one in text.new_logprobs()] == [LEAST]
