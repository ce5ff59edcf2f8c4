"""Token and confidence of a row, by the kernels and by the plain computation."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_kernels.confidence import (
    confidence_head,
    confidence_of_logits,
    confidence_reference,
)
from triton_kernels.philox import uniform

NAMES = ("token", "probability", "entropy", "margin", "named", "named_log")


def same(got, want, *, tokens=True, rtol=1e-5, atol=2e-6):
    for name, a, b in zip(NAMES, astuple(got), astuple(want), strict=True):
        if name == "token":
            assert not tokens or a.tolist() == b.tolist()
        else:
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


@st.composite
def rows(draw, device):
    """hidden, head, and every option of a call."""
    n, width = draw(st.integers(1, 20)), draw(st.integers(1, 70))
    vocabulary = draw(st.integers(1, 150))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    hidden = torch.randn(n, width, generator=rng) / width**0.5
    head = torch.randn(vocabulary, width, generator=rng)
    options = {}
    if vocabulary > 1 and draw(st.booleans()):
        options["mask_id"] = draw(st.integers(0, vocabulary - 1))
    if draw(st.booleans()):
        options["named"] = torch.randint(vocabulary, (n,), generator=rng).to(device)
    if draw(st.booleans()):
        options["temperature"] = draw(st.sampled_from([0.3, 1.0]))
        seeds = torch.randint(2**40, (n,), generator=rng)
        options["seed"] = draw(st.sampled_from([7, seeds.to(device)]))
    return hidden.to(device), head.to(device), options


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_kernels_equal_the_reference(device, data):
    hidden, head, options = data.draw(rows(device))
    logits = hidden @ head.T
    want = confidence_reference(logits, **options)
    same(confidence_of_logits(logits, **options, kernel=True), want)
    same(confidence_head(hidden, head, **options, kernel=True), want)


def test_a_vocabulary_of_many_tiles(device):
    rng = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(5, 24, generator=rng) / 5, torch.randn(3001, 24, generator=rng)
    named = torch.tensor([0, 1023, 1024, 3000, 2048])
    hidden, head, named = hidden.to(device), head.to(device), named.to(device)
    options = {"mask_id": int((hidden @ head.T)[0].argmax()), "named": named}
    want = confidence_reference(hidden @ head.T, **options)
    assert want.token[0] != options["mask_id"]
    same(confidence_of_logits(hidden @ head.T, **options, kernel=True), want)
    same(confidence_head(hidden, head, **options, kernel=True), want)


def test_of_equal_logits_the_lowest_id_is_chosen_and_the_mask_id_never(device):
    logits = torch.zeros(2, 2500, device=device)
    logits[1, [5, 1100, 2400]] = 3.0
    for kernel in (False, True):
        got = confidence_of_logits(logits, mask_id=0, kernel=kernel)
        assert got.token.tolist() == [1, 5]
        assert got.margin.tolist() == [0.0, 0.0]
        got = confidence_of_logits(logits, mask_id=5, kernel=kernel)
        assert got.token.tolist() == [0, 1100]


def test_half_precision(device, dtype):
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(33, 70, generator=rng).to(device, dtype)
    head = (torch.randn(500, 70, generator=rng) / 4).to(device, dtype)
    logits = hidden @ head.T
    named = torch.arange(33, device=device)
    same(
        confidence_of_logits(logits, named=named, kernel=True),
        confidence_reference(logits, named=named),
    )
    exact = confidence_reference((hidden.double() @ head.double().T).float(), named=named)
    plain = confidence_reference(logits, named=named)
    got = confidence_head(hidden, head, named=named, kernel=True)
    for name in NAMES[1:]:
        a, b, truth = (getattr(x, name) for x in (got, plain, exact))
        margin = 4 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())
        assert (a - truth).abs().max() <= (b - truth).abs().max() + margin, name


def test_a_row_draws_the_same_whatever_else_is_in_the_batch(device):
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 300, generator=rng).to(device)
    seeds = torch.tensor([1, 2, 3, 4, 5, 2**33 + 1], device=device)
    for kernel in (False, True):
        options = {"temperature": 1.0, "kernel": kernel}
        whole = confidence_of_logits(logits, seed=seeds, **options).token
        alone = [
            confidence_of_logits(logits[i : i + 1], seed=seeds[i : i + 1], **options).token.item()
            for i in range(6)
        ]
        assert whole.tolist() == alone


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(4000, -1)
    got = confidence_of_logits(logits, temperature=0.5, seed=torch.arange(4000)).token
    share = torch.bincount(got, minlength=4) / 4000
    torch.testing.assert_close(share, (logits[0] / 0.5).softmax(-1), atol=0.03, rtol=0)


def test_philox_is_tritons(device):
    import triton
    import triton.language as tl

    @triton.jit
    def draw(out, seed, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        tl.store(out + at, tl.rand(seed, at))

    for seed in (0, 1, 12345, 2**31 - 1):
        out = torch.empty(256, device=device)
        draw[(1,)](out, seed, COUNT=256)
        assert torch.equal(out, uniform(torch.tensor([seed], device=device), 256)[0])


def test_nan_shows_in_the_probability(device):
    logits = torch.zeros(2, 1500, device=device)
    logits[1, 1200] = torch.nan
    for kernel in (False, True):
        assert confidence_of_logits(logits, kernel=kernel).probability.isnan().tolist() == [
            False,
            True,
        ]


def test_no_rows_and_fp64(device):
    head = torch.ones(7, 3, device=device)
    got = confidence_head(torch.zeros(0, 3, device=device), head, kernel=True)
    assert got.token.shape == got.entropy.shape == (0,)
    wide = confidence_head(torch.ones(1, 3).double(), torch.ones(7, 3).double(), kernel=True)
    assert wide.probability.item() == pytest.approx(1 / 7)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mask_id": 9}, r"mask_id must lie in \[0, 9\), got 9"),
        ({"named": torch.zeros(2)}, r"named must be int64 \[2\]"),
        ({"named": torch.zeros(3).long()}, r"named must be int64 \[2\].*\[3\]"),
        ({"temperature": 0.5}, "needs a seed"),
        ({"temperature": -1.0}, "temperature must be 0 or more, got -1.0"),
    ],
)
def test_a_misfit_is_refused_by_name(options, says):
    for kernel in (False, True):
        with pytest.raises(ValueError, match=says):
            confidence_of_logits(torch.zeros(2, 9), **options, kernel=kernel)
        with pytest.raises(ValueError, match=says):
            confidence_head(torch.zeros(2, 4), torch.zeros(9, 4), **options, kernel=kernel)
    with pytest.raises(ValueError, match=r"\[2, 4\] and \[9, 5\]"):
        confidence_head(torch.zeros(2, 4), torch.zeros(9, 5))
