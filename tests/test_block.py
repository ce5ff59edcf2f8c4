"""Block diffusion with an exact cache: what its rows see, what a block costs, which tokens a step
reveals; with blocks of one token, from left to right (against its reference:
test_decode_reference.py)."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from block_tiny import sdar
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode_reference import prompts, seeds

import d2f
import decode
from d2f.contract import Contract
from d2f.errors import CheckpointError
from decode.engine.sampling import Sampler
from decode.step import Predictions, Step
from tests.references.d2f import predict_positions


@settings(max_examples=15)
@given(seeds, prompts, st.sampled_from(["static", "dynamic", "sequential"]), st.integers(1, 12))
def test_blocks_of_one_token_are_decoded_from_left_to_right(seed, prompt, reveal, length):
    """One token a forward, each from a mask after all that is decoded, causally."""
    model = sdar(1, seed)
    decoder = decode.Block(reveal=reveal, max_new_tokens=length)
    events = list(decode.stream(model, [prompt], decoder))
    assert [[r.position for r in e.revealed] for e in events] == [[i] for i in range(len(events))]
    x, sampler = list(prompt), Sampler(decoder.sampling, model.mask_id)
    while len(x) < len(prompt) + length and not set(x[len(prompt) :]) & set(model.end_ids):
        causal = torch.ones(len(x) + 1, len(x) + 1).tril().bool()
        x.append(predict_positions(model, [*x, model.mask_id], causal, [len(x)], 0, sampler)[0][0])
    assert events[-1].result.raw_tokens == x[len(prompt) :]


def test_a_block_costs_its_steps_and_nothing_for_storing_it():
    """The official loop takes one forward more a block, and one for the prompt."""
    decoder = decode.Block(denoising_steps=2, reveal="static", max_new_tokens=12, early_exit=False)
    result = decode.generate(sdar(4, 0), [[5] * 8], decoder)[0]
    assert result.calls == [(12, 0), (4, 8), (8, 8), (4, 12), (8, 12), (4, 16)]


def contract(**values: object) -> Contract:
    return replace(sdar(4, 0).contract, mask_id=1, end_ids=(0,), **values)


def predictions(step: Step, confidence: list[float]) -> Predictions:
    assert len(step.read) == len(confidence)
    values = np.array(confidence, np.float32)
    return Predictions(np.arange(7, 7 + len(values)), values)


def tokens(session) -> list[tuple[int | None, ...]]:
    return [block.tokens for block in session.blocks()]


@pytest.mark.parametrize(
    ("reveal", "confidence", "expected"),
    [
        ("static", [0.2, 0.9, 0.9, 0.9, 0.1], (None, 8, 9, None, None)),  # ties to the first
        ("dynamic", [0.2, 0.9, 0.9, 0.9, 0.1], (None, 8, 9, 10, None)),
        ("dynamic", [0.6, 0.5, 0.9, 0.5, 0.1], (7, None, 9, None, None)),
        ("dynamic", [0.2, 0.5, 0.9, 0.5, 0.5], (None, 8, 9, None, None)),  # 0.5 is not above it
        ("sequential", [0.2, 0.1, 0.9, 0.9, 0.9], (7, 8, None, None, None)),
    ],
)
def test_what_a_step_reveals(reveal, confidence, expected):
    """Five tokens in three steps are 2, 2 and 1."""
    decoder = decode.Block(5, 3, reveal, 0.5, max_new_tokens=5, align="prompt")
    session = decoder.begin([5, 6], contract())
    session.accept(predictions(session.step(), confidence))
    assert tokens(session) == [expected]


@pytest.mark.parametrize(("size", "expected"), [(None, None), (8, 8)])
def test_the_block_size_of_an_sdar_folder_is_in_its_contract(tmp_path, size, expected):
    from d2f.saving import save_model

    save_model(sdar(3, 0), tmp_path, dtype=torch.float32)
    (tmp_path / "d2f_contract.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "sdar", "mask_token_id": 3} | ({"block_size": size} if size else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = d2f.load(tmp_path, device="cpu")
    assert (model.family, model.contract.block_size) == ("sdar", expected)
    assert decode.Block().size(model.contract) == (expected or 4)
    config["block_size"] = "big"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"block_size must be a whole number .* got 'big'"):
        d2f.load(tmp_path, device="cpu")
