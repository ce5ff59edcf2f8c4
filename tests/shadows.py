"""What the tests of WINO and of D2F with its check share: models and made-up predictions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st
from tiny import random_model, tokenizer

from d2f.contract import Contract
from d2f.convert import build
from d2f.model import DiffusionModel
from decode.decoders import Session
from decode.step import Predictions, Step

MASK, END = 1, 0
CONTRACT = Contract(
    family="llada",
    mask_id=MASK,
    end_ids=(END,),
    logit_shift=0,
    rope_fp32=True,
    prompt_rule="bidirectional",
)
SHIFTED = replace(CONTRACT, logit_shift=1)

MASKS = ({}, {"objective": "d2f", "block_size": 3}, {"prompt_rule": "block_causal"})
prompts = st.lists(st.integers(2, len(tokenizer()) - 1), min_size=1, max_size=12)
sampling = st.sampled_from([{}, {}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}])


def model_with(model: DiffusionModel, **contract: object) -> DiffusionModel:
    """The same weights read under another contract."""
    other = copy.copy(model)
    other.contract = replace(model.contract, **contract)
    return other


models = st.builds(
    lambda family, seed, contract: model_with(random_model(family, seed), **contract),
    st.sampled_from(["llada", "dream"]),
    st.integers(0, 3),
    st.sampled_from(MASKS),
)


def shallow_model(family: str) -> DiffusionModel:
    """One layer, so that a row depends on the tokens that it sees and on nothing else."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "heads": 4, "kv_heads": 2}
    model = build(family, tokenizer(), layers=1, context_length=128, **sizes)
    for parameter in model.backbone.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.backbone.eval()
    return model


def told(
    step: Step, confidence: list[float], queried: list[float] | None = None, token: int = 9
) -> Predictions:
    """Predictions: confidence of the masked rows, queried of the shadow's."""
    count = len(step.read)
    both = np.zeros(count, np.float32), np.zeros(count, np.float32)
    both[0][: len(confidence)] = confidence
    if queried is not None:
        assert len(confidence) + len(queried) == count
        both[1][len(confidence) :] = queried
    probability = None if step.queried_tokens is None else both[1]
    own = both[0]
    return Predictions(np.full(count, token), own, probability, entropy=1 - own, margin=own)


def random_answer(rng: np.random.Generator, tokens: int = 6) -> Callable[[Step], Predictions]:
    """Predictions drawn anew for each step: nothing is ever consistent."""

    def answer(step: Step) -> Predictions:
        count = len(step.read)
        token = rng.integers(END, tokens, count)
        token[token == MASK] = 2
        confidence, queried, entropy, margin = rng.random((4, count)).astype(np.float32)
        asked = None if step.queried_tokens is None else queried
        return Predictions(token, confidence, asked, entropy=entropy, margin=margin)

    return answer


def check_step(session: Session, step: Step) -> None:
    """What every step of a revoking decoder keeps: shadows stay in scratch slots, no row of the
    sequence sees one, spans do not overlap, and what is not fed can no longer change."""
    length = len(session.x)
    own = step.slots < length
    starts, ends = step.spans[..., 0], step.spans[..., 1]
    assert (step.spans[own] <= length).all()
    assert (step.slots < session.slots).all() and (ends <= session.slots).all()
    assert len(set(step.slots.tolist())) == len(step.slots)
    assert (step.slots[own] == step.positions[own]).all()
    for row in step.spans:
        kept = sorted((s, e) for s, e in row.tolist() if s < e)
        assert all(a[1] <= b[0] for a, b in pairwise(kept))
    assert (starts <= ends).all()
    assert not session.masked[: step.cached].any()
    assert step.cached <= session.settled_end


def spans_as_mask(spans: np.ndarray, slots: int) -> np.ndarray:
    """``[rows, slots]``, True where a row sees a slot."""
    slot = np.arange(slots)[None, None, :]
    return ((slot >= spans[..., :1]) & (slot < spans[..., 1:])).any(1)
