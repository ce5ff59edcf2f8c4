"""Block diffusion with an exact cache: as its plain reference, as D2F without its pipeline, and,
with blocks of one token, from left to right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_tiny import sdar, student, wedlm
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_model, tokenizer

import d2f
import decode
from d2f.contract import Contract
from d2f.errors import CheckpointError, InputError
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.engine.sampling import Sampler
from decode.step import Predictions, Step
from tests.references.block import decode_block
from tests.references.d2f import predict_positions
from triton_kernels.span_attention import span_mask

sizes = st.sampled_from([1, 3, 4, 7])
seeds = st.integers(0, 2)
students = st.builds(student, st.sampled_from(["llada", "dream"]), sizes, seeds)
models = st.one_of(st.builds(sdar, sizes, seeds), students)
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=12)
sampling = st.sampled_from([{}, {"temperature": 0.7}, {"temperature": 2.0, "top_k": 5}])
options = {
    "tau": st.sampled_from([0.0, 0.1, 0.3, 0.85, 1.0]),
    "max_new_tokens": st.integers(1, 20),
    "early_exit": st.booleans(),
    "seed": st.integers(0, 9),
}


@st.composite
def decoders(draw) -> decode.Block:
    size = draw(st.one_of(st.sampled_from([None, 1, 2, 5]), st.integers(1, 64)))
    return decode.Block(
        block_size=size,
        denoising_steps=draw(st.sampled_from([None, *range(1, 1 + min(size or 1, 3))])),
        reveal=draw(st.sampled_from(["static", "dynamic", "sequential"])),
        align=draw(st.sampled_from([None, "absolute", "prompt"])),
        **draw(sampling),
        **{name: draw(values) for name, values in options.items()},
    )


def visible(model, raw: list[int | None]) -> list[int | None]:
    ends = [i for i, token in enumerate(raw) if token is None or token in model.end_ids]
    return raw[: ends[0]] if ends else raw


@settings(max_examples=40)
@given(models, st.lists(st.tuples(prompts, decoders()), min_size=1, max_size=4), st.integers(1, 4))
def test_the_engine_equals_the_reference(model, requests, batch_size):
    """Cached as recomputed, batched as one by one; with no forward for storing alone."""
    results = decode.generate(
        model, [p for p, _ in requests], [d for _, d in requests], batch_size=batch_size
    )
    for (prompt, decoder), result in zip(requests, results, strict=True):
        raw, forwards = decode_block(model, prompt, decoder)
        assert result.raw_tokens == [token for token in raw if token is not None]
        assert result.tokens == visible(model, raw)
        assert result.forwards == forwards


@settings(max_examples=25)
@given(students, prompts, sampling, st.builds(dict, **options), st.sampled_from([0.0, 0.5, 1.0]))
def test_it_is_the_pipeline_that_appends_a_block_when_the_last_is_decoded(
    model, prompt, chosen, values, tau_act
):
    values["early_exit"] = True  # without it D2F appends nothing after an end id, Block goes on
    tau = values.pop("tau")
    pipeline = decode.D2F(tau_add=1.0, tau_act=tau_act, tau_conf=tau, **values, **chosen)
    block = decode.Block(reveal="dynamic", tau=tau, **values, **chosen)
    ours, theirs = (decode.generate(model, [prompt], d)[0] for d in (block, pipeline))
    assert ours.raw_tokens == theirs.raw_tokens
    assert ours.calls == theirs.calls


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_it_is_the_official_pipeline_where_that_is_serial(family):
    """Recorded runs whose tau_add lets no block be appended before the last is decoded; the
    contract of official weights does not name the blocks."""
    folder = Path(__file__).parent / "golden" / f"{family}-tiny"
    model = d2f.load(folder, device="cpu")
    cases = json.loads((folder / "d2f.json").read_text())["cases"]
    serial = [case for case in cases if case["tau_add"] > 1 - 1 / case["block_size"]]
    assert len(serial) >= 3
    for case in serial:
        decoder = decode.Block(
            block_size=case["block_size"],
            tau=case["tau_conf"],
            align="prompt",
            max_new_tokens=case["max_new_tokens"],
        )
        result = decode.generate(model, [case["prompt"]], decoder)[0]
        output = case["output"]
        assert result.tokens == (output[: output.index(2)] if 2 in output else output)


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


@settings(max_examples=25)
@given(models, prompts, decoders())
def test_rows_see_their_block_and_all_before_it_and_no_mask_is_cached(model, prompt, decoder):
    session = Request(0, prompt, decoder, model.contract, None).session
    size, absolute = decoder.size(model.contract), decoder.is_absolute(model.contract)
    origin = 0 if absolute else len(prompt)
    block_of = np.array([max((p - origin) // size, -1) for p in range(len(session.x))])
    request = Request(0, prompt, decoder, model.contract, None)
    engine = Engine(model, batch_size=1, slots=request.session.slots)
    engine.submit(request)
    while not request.done:
        step = request.next_step
        assert not request.session.masked[: step.cached].any()
        assert step.slots.tolist() == step.positions.tolist()
        spans = torch.from_numpy(step.spans).to(torch.int32)[None]
        seen = span_mask(spans, len(block_of))[0].numpy()  # [T, slots]
        assert (seen == (block_of[step.positions][:, None] >= block_of[None, :])).all()
        engine.advance()


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


def test_the_prompts_tail_is_part_of_the_first_block():
    session = decode.Block(max_new_tokens=4).begin([5, 6, 7, 8, 9, 9], contract())
    step = session.step()
    assert step.spans[:, 0, 1].tolist() == [4] * 4 + [8] * 4
    assert step.read.tolist() == [6, 7]
    assert tokens(session) == [(None, None), (None, None)]
    session.accept(predictions(step, [0.9, 0.9]))
    step = session.step()
    assert (step.cached, step.positions.tolist()) == (4, [4, 5, 6, 7, 8, 9])
    assert [block.state for block in session.blocks()] == ["cached", "fully active"]
    session.accept(predictions(step, [0.9, 0.9]))
    assert session.step() is None


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


BAD = [
    ({"block_size": 0}, "block_size must be a whole number"),
    ({"denoising_steps": 0}, "denoising_steps must be a whole number"),
    ({"block_size": 4, "denoising_steps": 5}, "at most the block size 4, got 5"),
    ({"reveal": "all"}, "reveal must be one of static, dynamic, sequential, got 'all'"),
    ({"tau": 1.5}, "tau must lie in"),
    ({"align": "left"}, "align must be one of absolute, prompt, got 'left'"),
    ({"early_exit": 1}, "early_exit must be true or false, got 1"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(values, message):
    with pytest.raises(InputError, match=message):
        decode.Block(**values)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (random_model("llada"), "llada is bidirectional: take static"),
        (wedlm(False, 0), "wedlm is causal: take wedlm"),
        (random_model("causal"), "block needs a model with a mask id"),
    ],
)
def test_a_model_without_blocks_is_refused_with_the_alternative(model, message):
    with pytest.raises(InputError, match=message):
        decode.generate(model, [[5]], decode.Block())


def test_more_steps_than_the_models_blocks_have_tokens_are_refused():
    with pytest.raises(InputError, match="at most the block size 4, got 5"):
        decode.generate(sdar(4, 0), [[5]], decode.Block(denoising_steps=5))
