"""LLaDA's estimate of a likelihood: what it is the mean of, its error, and greedy decoding."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model

from d2f import spans
from decode import generate
from decode.decoders.unmask import Static
from decode.harness.monte_carlo import MonteCarlo, draw_masks, spread_counts

PROMPT = [20, 31, 42, 53]
TARGET = [61, 72, 83, 94, 105]
FAMILIES = ["llada", "dream"]  # Dream's rows are shifted


def log_probabilities(model, prompt, target, mask):
    """Of the target's tokens, each at a position of its own, one sequence through the model."""
    ids = prompt + [
        model.mask_id if hidden else token for token, hidden in zip(target, mask, strict=True)
    ]
    with torch.inference_mode():
        logits = model.forward(torch.tensor([ids]), spans.bidirectional(len(ids)))[0].double()
    rows = logits[torch.arange(len(prompt), len(ids)) - model.logit_shift].log_softmax(-1)
    return rows[torch.arange(len(target)), torch.tensor(target)].numpy()


def all_masks(length):
    for count in range(1, length + 1):
        for places in combinations(range(length), count):
            mask = np.zeros(length, dtype=bool)
            mask[list(places)] = True
            yield count, mask


def exact(model, prompt, target):
    """Equation 6 of the paper with its mean over l and over the masks of each l written out."""
    of_count: dict[int, list[float]] = {}
    for count, mask in all_masks(len(target)):
        each = log_probabilities(model, prompt, target, mask)[mask]
        of_count.setdefault(count, []).append(len(target) / count * each.sum())
    return np.mean([np.mean(values) for values in of_count.values()])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_values_of_all_masks_have_the_exact_sum_as_their_mean(family):
    model = random_model(family)
    masks = list(all_masks(len(TARGET)))
    values = MonteCarlo(1, batch_size=7).values(
        model, PROMPT, TARGET, np.array([mask for _, mask in masks])
    )
    counts = np.array([count for count, _ in masks])
    mean = np.mean([values[counts == count].mean() for count in range(1, len(TARGET) + 1)])
    assert mean == pytest.approx(exact(model, PROMPT, TARGET), rel=1e-5)


@given(st.integers(1, 40), st.integers(1, 40))
def test_each_number_of_masks_is_as_likely(length, size):
    """Over all starts of a group, which are drawn evenly, each comes as often as any other."""
    drawn = np.concatenate([spread_counts(start, size, length) for start in range(length)])
    assert (np.bincount(drawn, minlength=length + 1)[1:] == size).all()
    assert spread_counts(2, 4, 8).tolist() == [3, 5, 7, 1]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32))
def test_masks_have_as_many_positions_as_were_drawn(length, size, seed):
    masks = draw_masks(length, size, np.random.default_rng(seed))
    start = int(np.random.default_rng(seed).integers(length))
    assert masks.sum(1).tolist() == spread_counts(start, size, length).tolist()


def test_estimates_are_right_on_average_and_know_their_error():
    """Of groups of unequal size."""
    model, runs, draws = random_model("dream"), 300, 21
    found = [
        MonteCarlo(draws, batch_size=64, check_greedy=False).score(model, PROMPT, TARGET, seed)
        for seed in range(runs)
    ]
    values = np.array([score.loglikelihood for score in found])
    stated = np.sqrt(np.mean([score.standard_error**2 for score in found]))
    assert abs(values.mean() - exact(model, PROMPT, TARGET)) < 3 * stated / runs**0.5
    # Both are estimates of the same: of 300 runs a standard deviation is known to about 4 %.
    assert stated == pytest.approx(values.std(ddof=1), rel=0.15)


def test_a_score_depends_on_its_request_and_seed_alone():
    model = random_model("llada")
    scores = [
        MonteCarlo(24, batch_size=size).score(model, PROMPT, TARGET, seed=5) for size in (1, 7, 64)
    ]
    values = [score.loglikelihood for score in scores]
    assert values == pytest.approx([values[0]] * 3, rel=1e-5)  # rounding in another batch
    # The draws are as many whatever the batch, which says how many forwards they are in.
    greedy = scores[0].forwards - 24
    assert [score.forwards - greedy for score in scores] == [24, 4, 1]
    torch.manual_seed(1)
    again = MonteCarlo(24, batch_size=7).score(model, PROMPT, TARGET, seed=5)
    assert again == scores[1]
    other = MonteCarlo(24, batch_size=7).score(model, PROMPT, TARGET, seed=6)
    assert other.loglikelihood != again.loglikelihood


def test_one_group_cannot_tell_its_error():
    assert MonteCarlo(1, 1).score(random_model("llada"), PROMPT, TARGET, 0).standard_error is None
    one = MonteCarlo(2, 2).score(random_model("llada"), PROMPT, TARGET[:1], 0)
    assert one.standard_error == pytest.approx(0, abs=1e-6)  # one token has one mask


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_what_one_token_a_forward_decodes(family):
    model, length = random_model(family), 6
    decoder = Static(max_new_tokens=length, block_size=length, early_exit=False)
    (result,) = generate(model, [PROMPT], decoder)
    right = result.raw_tokens
    score = MonteCarlo(1, 1).score(model, PROMPT, right, 0)
    assert score.greedy and score.forwards == 1 + length
    for place in range(length):
        wrong = list(right)
        wrong[place] = (right[place] + 1) % 90
        assert not MonteCarlo(1, 1).score(model, PROMPT, wrong, 0).greedy
    unasked = MonteCarlo(1, 1, check_greedy=False).score(model, PROMPT, right, 0)
    assert not unasked.greedy and unasked.forwards == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_moves_away_from_what_is_likely_without_the_prompt(family):
    model, mask = random_model(family), np.array([True, False, True, True, False])

    def logits(prompt):
        ids = prompt + [model.mask_id if m else t for m, t in zip(mask, TARGET, strict=True)]
        with torch.inference_mode():
            rows = model.forward(torch.tensor([ids]), spans.bidirectional(len(ids)))[0]
        return rows[len(PROMPT) - model.logit_shift + np.flatnonzero(mask)]

    guided, without = logits(PROMPT), logits([model.mask_id] * len(PROMPT))
    guided = without + 1.5 * (guided - without)
    each = guided.log_softmax(-1)[torch.arange(3), torch.tensor(TARGET)[mask]]
    (value,) = MonteCarlo(1, 1, guidance=0.5).values(model, PROMPT, TARGET, mask[None])
    assert value == pytest.approx(float(each.sum()) * 5 / 3, rel=1e-5)
    assert MonteCarlo(4, 2, 0.5, False).score(model, PROMPT, TARGET, 0).forwards == 4
