"""Decoding block by block: where approximate caches are exact, what a block costs, which tokens a
step reveals, what a forward takes where drafts hold (against references: test_decode_reference.py).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from block_tiny import sdar, student
from hypothesis import given, settings
from hypothesis import strategies as st
from shadows import CONTRACT, SHIFTED, model_with
from test_decode_reference import block_models, blockwise, prompts, seeds
from tiny import random_model

import d2f
import decode
from d2f.errors import CheckpointError
from d2f.saving import save_model
from decode.decoders.session import visible_ends
from decode.step import Predictions, Revealed, Step

# Approximate caches.


def forwards(model, prompt, decoder) -> list[list[Revealed]]:
    """List what each forward reveals."""
    return [event.revealed for event in decode.stream(model, [prompt], decoder)]


def confidences(steps: list[list[Revealed]]) -> list[float]:
    return [r.confidence for part in steps for r in sorted(part, key=lambda r: r.position)]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize(("family", "block_size"), [("llada", 4), ("dream", 4), ("dream", 8)])
@settings(max_examples=6)
@given(data=st.data())
def test_a_cache_of_a_block_causal_model_is_exact(family, block_size, cache, data):
    """Fast-dLLM's caches have no error where no row sees a later block, and feed the same rows: in
    blocks that are made of whole blocks of the model."""
    model = student(family, block_size, data.draw(seeds))
    size = data.draw(st.sampled_from([block_size, 2 * block_size, None]))
    # The number of its steps is that of other blocks.
    fields = {"block_size": size, "cache": cache}
    decoder = data.draw(blockwise)
    if decoder.name == "static":
        fields["steps"] = None
    decoder, prompt = replace(decoder, **fields), data.draw(prompts)
    exact = replace(decoder, cache="none")
    ours, plain = (decode.generate(model, [prompt], d)[0] for d in (decoder, exact))
    assert (ours.raw_tokens, ours.calls) == (plain.raw_tokens, plain.calls)
    ours, plain = (confidences(forwards(model, prompt, d)) for d in (decoder, exact))
    assert ours == pytest.approx(plain, abs=1e-6)


def made_up(session, rng: np.random.Generator) -> Predictions:
    """Predictions for what the session wants, drawn at random."""
    count = len(session.wanted)
    values = rng.random((3, count)).astype(np.float32)
    tokens = rng.integers(2, 50, count)
    return Predictions(tokens, values[0], entropy=values[1], margin=values[2])


@given(block_models, prompts, blockwise, st.integers(0, 99))
def test_a_row_is_fed_until_it_cannot_change_and_then_no_more(model, prompt, decoder, seed):
    """On a block-causal model, aligned or not: once all that a row sees is decided it is fed once,
    with that, and never again but to be read; what counts as cached holds no mask."""
    decoder = replace(decoder, cache="none", early_exit=False)
    session, rng = decoder.begin(prompt, model.contract), np.random.default_rng(seed)
    ends = visible_ends(len(session.x), len(prompt), model.contract)
    own, scratch = len(session.x), session.slots - 1
    final: Counter[int] = Counter()
    while (step := session.step()) is not None:
        assert not session.masked[: step.cached].any()
        kept = step.slots < own
        assert step.slots[kept].tolist() == step.positions[kept].tolist()
        assert (~kept).sum() <= model.logit_shift  # only to be read again
        assert step.slots[~kept].tolist() == [scratch] * int((~kept).sum())
        fed = set(step.positions[kept].tolist())
        for row in fed:
            final[row] += not session.masked[: ends[row]].any()
        sees = set(range(int(step.spans.max())))
        assert all(final[row] == 1 for row in sees - fed)  # never fed again, and fed as it is now
        session.accept(made_up(session, rng))
    assert all(count == 1 for count in final.values() if count)


# Block diffusion.


def test_a_block_costs_its_steps_and_nothing_for_storing_it():
    """The official loop takes one forward more a block, and one for the prompt."""
    decoder = decode.Block(denoising_steps=2, reveal="static", max_new_tokens=12, early_exit=False)
    result = decode.generate(sdar(4, 0), [[5] * 8], decoder)[0]
    assert result.calls == [(12, 0), (4, 8), (8, 8), (4, 12), (8, 12), (4, 16)]


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
    session = decoder.begin([5, 6], replace(sdar(4, 0).contract, mask_id=1, end_ids=(0,)))
    assert len(session.step().read) == 5
    session.accept(Predictions(np.arange(7, 12), np.array(confidence, np.float32)))
    assert [block.tokens for block in session.blocks()] == [expected]


@pytest.mark.parametrize(("size", "expected"), [(None, None), (8, 8)])
def test_the_block_size_of_an_sdar_folder_is_in_its_contract(tmp_path, size, expected):
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
    with pytest.raises(CheckpointError, match=r"block_size: expected a whole number, got 'big'"):
        d2f.load(tmp_path, device="cpu")


# Drafts.


STUDENT = {"objective": "d2f", "block_size": 3}


class Scripted:
    """Predictions that do not depend on the state: every draft holds."""

    def __init__(self, length: int):
        generator = np.random.default_rng(0)
        self.confidence = generator.permutation(length).astype(np.float32) / length

    def __call__(self, session, step: Step) -> Predictions:
        positions = step.positions[step.read] + session.contract.logit_shift
        return Predictions(positions + 5, self.confidence[positions])


def taken_by(session, answer) -> list[int]:
    """Count the tokens that each forward reveals."""
    taken = []
    while (step := session.step()) is not None:
        session.accept(answer(session, step))
        taken.append(len(session.revealed))
    assert session.tokens == [p + 5 for p in range(session.prompt_length, len(session.x))]
    return taken


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_where_every_draft_holds_a_forward_reveals_d_tokens(contract, d):
    """A block costs its first forward, which has no drafts, and then a forward for d tokens; eager
    drafting pays that first forward once."""
    for over_the_border, expected in ((False, 4 * (1 + -(-5 // d))), (True, 1 + -(-23 // d))):
        decoder = decode.FreeDave(6, 24, early_exit=False, drafts=d, eager=over_the_border)
        session = decoder.begin([7, 8, 9], replace(contract, **STUDENT))
        assert len(taken_by(session, Scripted(len(session.x)))) == expected


@pytest.mark.parametrize("contract", [CONTRACT, SHIFTED])
@pytest.mark.parametrize("pick", ["confidence", "entropy", "margin"])
def test_where_every_draft_holds_a_forward_takes_d_steps_of_the_pipeline(contract, pick):
    """Blocks of 6, one forced token a step: the first forward has no drafts. The draft that
    completes a block opens the next one in its branch, whose predictions then draft further."""

    def never_sure(session, step: Step) -> Predictions:
        """Later positions have less confidence, but also less entropy."""
        positions = step.positions[step.read] + session.contract.logit_shift
        confidence = (0.5 - positions / 1000).astype(np.float32)
        return Predictions(positions + 5, confidence, entropy=confidence, margin=1 - confidence)

    decoder = decode.D2F(6, 1.0, 1.0, max_new_tokens=12, lossless=3, forced_pick=pick)
    session = decoder.begin([7, 8], contract)
    assert taken_by(session, never_sure) == [1, 3, 3, 3, 2]
    assert session.counts["drafted"] == session.counts["accepted"] == 7


@pytest.mark.parametrize(
    ("family", "mask", "over_the_border", "shares"),
    [
        ("llada", STUDENT, True, True),  # rows of a complete block, on their way into the cache
        ("dream", STUDENT, False, True),  # the row before the block
        ("llada", STUDENT, False, False),
        ("llada", {}, False, False),
        ("dream", {}, False, False),
    ],
)
def test_a_tree_feeds_fewer_rows_only_where_branches_share_some(
    family, mask, over_the_border, shares
):
    model, rows = model_with(random_model(family), **mask), []
    for drafting in ("tree", "batch"):
        options = {"drafting": drafting, "eager": over_the_border, "early_exit": False}
        decoder = decode.FreeDave(3, 12, **options)
        result = decode.generate(model, [list(range(5, 17))], decoder)[0]
        rows.append(sum(fed for fed, _ in result.calls))
    assert (rows[0] < rows[1]) if shares else (rows[0] == rows[1])
