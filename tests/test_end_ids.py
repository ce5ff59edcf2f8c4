"""An end token whose id is 0, which a test for truth would take for none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import fresh_model, random_model

import decode
from d2f.model import DiffusionModel


def ending(model: DiffusionModel, *end_ids: int) -> DiffusionModel:
    contract = replace(model.contract, end_ids=end_ids)
    return DiffusionModel(model.backbone, contract, tokenizer=model.tokenizer)


def exchange(family: str, one: int, other: int) -> DiffusionModel:
    """The model with the rows of two ids exchanged, in its head and its embeddings."""
    model = fresh_model(family)
    order = list(range(model.vocab_size))
    order[one], order[other] = other, one
    for weight in (model.backbone.lm_head.weight, model.backbone.model.embed_tokens.weight):
        weight.data = weight.data[order].clone()
    return model


@pytest.mark.parametrize(
    ("family", "decoder"),
    [
        ("llada", decode.Static(block_size=4, max_new_tokens=16)),
        ("llada", decode.Threshold(block_size=4, tau=0.3, max_new_tokens=16)),
        ("dream", decode.D2F(4, tau_conf=0.2, max_new_tokens=16)),
        ("llada", decode.Wino(block_size=4, max_new_tokens=16)),
        ("llada", decode.FreeDave(block_size=4, max_new_tokens=16)),
        ("causal", decode.Autoregressive(max_new_tokens=16)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_response_ends_at_it_and_decoding_stops(family, decoder):
    """Token 0 takes the place of the first token that the model says: the same weights with the
    rows of the two ids exchanged decode the same text under exchanged names."""
    model, prompt = random_model(family), [[5, 6, 7]]
    free = decode.generate(ending(model), prompt, decoder)[0].raw_tokens
    place = next(i for i, token in enumerate(free) if i >= 2 and token not in free[:i])
    end = free[place]
    assert end not in prompt[0]
    expected = decode.generate(ending(model, end), prompt, decoder)[0]
    got = decode.generate(ending(exchange(family, 0, end), 0), prompt, decoder)[0]
    assert expected.finish_reason == got.finish_reason == "end"
    assert got.tokens == expected.tokens == free[:place]
    assert got.calls == expected.calls, "it stopped as early"
