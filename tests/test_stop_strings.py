"""Stop strings that begin in one token and end in another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import random_model, tokenizer

import d2f
import decode

DECODERS = [
    decode.D2F(4, tau_conf=0.2, max_new_tokens=16),
    decode.Static(block_size=4, max_new_tokens=16),
    decode.Static(block_size=4, max_new_tokens=16, steps=4),
]


def texts(tokens: list[int]) -> list[str]:
    """The text of the first 0, 1, 2, ... tokens."""
    return [
        tokenizer().decode(tokens[:n], skip_special_tokens=True) for n in range(len(tokens) + 1)
    ]


@pytest.mark.parametrize("decoder", DECODERS, ids=["pipeline", "one a forward", "four a forward"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_stop_string_over_two_tokens_cuts_inside_the_first(family, decoder):
    """The text ends where the string begins, in the middle of a token; that token, which is partly
    hidden, is not counted."""
    model, cases = random_model(family), 0
    for prompt in ([token, 5, 6] for token in range(7, 40, 2)):
        free = decode.generate(model, [prompt], decoder)[0]
        upto = texts(free.tokens)
        for n in range(1, len(free.tokens)):
            first, second = upto[n][len(upto[n - 1]) :], upto[n + 1][len(upto[n]) :]
            if len(first) < 2 or not second or "\ufffd" in first + second:
                continue
            stop = first[1:] + second[0]
            place = upto[-1].find(stop)
            if place != len(upto[n - 1]) + 1:
                continue  # it stands earlier, too
            cases += 1
            result = decode.generate(model, [prompt], replace(decoder, stop=(stop,)))[0]
            assert result.finish_reason == "stop"
            assert result.text == upto[-1][:place]
            assert result.tokens == free.tokens[: n - 1]
    assert cases, "no token of two characters was followed by another: nothing was tested"


def test_the_earliest_of_several_stop_strings_counts():
    model, decoder = random_model("llada"), DECODERS[0]
    free = decode.generate(model, [[5, 6, 7, 8]], decoder)[0]
    late, early = free.text[6:8], free.text[3:5]
    assert free.text.find(early) < free.text.find(late)
    result = decode.generate(model, [[5, 6, 7, 8]], replace(decoder, stop=(late, early)))[0]
    assert result.text == free.text[: free.text.find(early)]


@pytest.mark.parametrize(
    ("stop", "text"), [(("8", "18+"), "1"), (("+", "8+7="), "18"), (("7=", "+7=2"), "18+")]
)
def test_a_stop_string_within_another_cuts_the_same_at_any_width(stop, text):
    """The inner one ends first: a forward that settles one token ends there, and one that settles
    the outer one's end with it must not prefer the outer one, which begins first."""
    model = d2f.load("tiny-wedlm", device="cpu")
    question = "Raj has 18 stamps. He buys 7 more. How many stamps does Raj have now?"
    plain = decode.Autoregressive(64, stop=stop)
    wide = decode.WeDLM(window=16, verify="ar", max_new_tokens=64, stop=stop)
    one, many = (decode.generate(model, question, way)[0] for way in (plain, wide))
    assert len(many.raw_tokens) > len(one.raw_tokens)  # it settled what follows, too
    assert one.text == many.text == text
    assert one.tokens == many.tokens
