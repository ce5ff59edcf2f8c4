"""Whatever options, prompts and arguments decoding gets from Python, it decodes or refuses."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decode import Static, generate
from decode.decoders import DECODERS
from tests.fuzz.odd import NUMBERS, TEXT, VALUES
from tests.fuzz.outcome import attempt, budget
from tests.tiny import random_model

FAMILIES = ("llada", "dream", "sdar", "wedlm", "causal")
HUGE = 10**5000  # more digits than Python prints


class Odd:
    """Something that is neither a number nor text, and says so at every use."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    def __bool__(self) -> bool:
        raise TypeError("neither true nor false")

    __hash__ = object.__hash__


OBJECTS = st.sampled_from(
    [HUGE, -HUGE, np.float64(0.5), np.int64(4), np.array([0.1, 0.9]), np.array("x"), torch.ones(2),
     b"\xff", {1}, object(), Odd(), int, 1j, range(3), (), ("", "a"), ("a", 1), "a", iter([1])]
)  # fmt: skip
ODD = VALUES | OBJECTS
WORDS = st.sampled_from(
    ["static", "dynamic", "sequential", "absolute", "prompt", "none", "prefix", "dual", "tree",
     "batch", "entropy", "margin", "always", "commit", None, True, False]
)  # fmt: skip
USUAL = st.sampled_from([1, 2, 3, 4, 8, 12, 0.0, 0.1, 0.5, 0.9, 1.0, 1e-45, 1e-38, 1e30]) | WORDS


def decode_with(family: str, kind: str, options: dict[str, Any], prompts: Any = (3, 4, 5)) -> Any:
    """A response of at most 12 tokens, whatever length is asked for."""
    decoder = DECODERS[kind](**options)
    decoder = replace(decoder, max_new_tokens=min(decoder.length, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a decoder that the model was not trained for
        return generate(random_model(family), prompts, decoder)


@pytest.mark.parametrize("kind", DECODERS)
@budget()
@given(drawn=st.data())
def test_any_options(kind, drawn):
    names = [field.name for field in fields(DECODERS[kind])]
    given_names = drawn.draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    options = {"max_new_tokens": 12} | {n: drawn.draw(USUAL | ODD) for n in given_names}
    family = drawn.draw(st.sampled_from(FAMILIES))
    attempt(lambda: decode_with(family, kind, options))


IDS = st.lists(st.integers(0, 310) | NUMBERS | OBJECTS, max_size=6)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "system", "", "x"]) | ODD, "content": ODD}
    )
    | ODD,
    max_size=3,
)
PROMPTS = st.one_of(
    TEXT, IDS, MESSAGES, ODD, st.lists(TEXT | IDS | MESSAGES | ODD, max_size=3),
    st.sampled_from([np.array([3, 4]), np.array([[3, 4], [5, 6]]), np.array(3), np.array([0.5]),
                     torch.tensor([3, 4]), torch.tensor([[3]]), torch.tensor(1.5), b"abc",
                     "x" * 5000, [[[3]]], {"role": "user"}, {"content": "x"},
                     [[]], [True], [2**63], [-1]]),
)  # fmt: skip


@budget()
@given(prompts=PROMPTS, family=st.sampled_from(FAMILIES[:2]), raw=st.booleans())
def test_any_prompts(prompts, family, raw):
    decoder = Static(max_new_tokens=4)
    model = random_model(family)
    refusing = attempt(lambda: generate(model, prompts, decoder, raw=raw))
    results = attempt(lambda: generate(model, prompts, decoder, raw=raw, on_error="return"))
    if refusing is not None and not hasattr(prompts, "__next__"):
        assert results is not None
        assert [r.tokens for r in results] == [r.tokens for r in refusing]
