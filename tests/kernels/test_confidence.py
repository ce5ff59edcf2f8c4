"""Token and confidence of a row, by the kernels and by the plain computation."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_kernels.confidence import confidence_of_logits, confidence_reference
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
    """Logits, and every option of a call."""
    n, vocabulary = draw(st.integers(1, 20)), draw(st.integers(1, 150))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(n, vocabulary, generator=rng)
    options = {}
    if vocabulary > 1 and draw(st.booleans()):
        options["mask_id"] = draw(st.integers(0, vocabulary - 1))
    if draw(st.booleans()):
        options["named"] = torch.randint(vocabulary, (n,), generator=rng).to(device)
    if draw(st.booleans()):
        options["temperature"] = draw(st.sampled_from([0.3, 1.0]))
        seeds = torch.randint(2**40, (n,), generator=rng)
        options["seed"] = draw(st.sampled_from([7, seeds.to(device)]))
    return logits.to(device), options


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_kernels_equal_the_reference(device, data):
    logits, options = data.draw(rows(device))
    want = confidence_reference(logits, **options)
    same(confidence_of_logits(logits, **options, kernel=True), want)


def test_a_vocabulary_of_many_tiles(device):
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3001, generator=rng).to(device)
    named = torch.tensor([0, 1023, 1024, 3000, 2048], device=device)
    options = {"mask_id": int(logits[0].argmax()), "named": named}
    want = confidence_reference(logits, **options)
    assert want.token[0] != options["mask_id"]
    same(confidence_of_logits(logits, **options, kernel=True), want)


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
    logits = torch.randn(33, 500, generator=rng).to(device, dtype)
    named = torch.arange(33, device=device)
    same(
        confidence_of_logits(logits, named=named, kernel=True),
        confidence_reference(logits, named=named),
    )


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
    got = confidence_of_logits(torch.zeros(0, 7, device=device), kernel=True)
    assert got.token.shape == got.entropy.shape == (0,)
    wide = confidence_of_logits(torch.ones(1, 7).double(), kernel=True)
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
