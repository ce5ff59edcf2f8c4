"""Token and confidence of a row, by the kernels and by the plain computation."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triton_kernels.confidence import confidence_of_logits, confidence_reference
from triton_kernels.draws import Draws, uniform

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
    """Logits, every option of a call, and how its tokens are drawn."""
    n, vocabulary = draw(st.integers(1, 6)), draw(st.integers(1, 150))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(n, vocabulary, generator=rng)
    options = {}
    if vocabulary > 1 and draw(st.booleans()):
        options["mask_id"] = draw(st.integers(0, vocabulary - 1))
    if draw(st.booleans()):
        options["named"] = torch.randint(vocabulary, (n,), generator=rng).to(device)
    parts = [
        torch.randint(-(2**63), 2**63 - 1, (n,), generator=rng),
        torch.randint(2**32, (n,), generator=rng),
        torch.randint(3, (n,), generator=rng) / 2,  # a temperature of 0 among them
    ]
    if draw(st.booleans()):
        parts += [torch.randint(9, (n,), generator=rng), torch.rand(n, generator=rng) + 0.2]
    return logits.to(device), options, Draws(*(x.to(device) for x in parts))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_kernels_equal_the_reference(device, data):
    logits, options, draws = data.draw(rows(device))
    want = confidence_reference(logits, **options)
    same(confidence_of_logits(logits, **options, kernel=True), want)
    want = confidence_reference(logits, **options, draws=draws)
    same(confidence_of_logits(logits, **options, draws=draws, kernel=True), want)


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


def draws_of(seeds, temperature=1.0, top_k=0, top_p=1.0, device="cpu"):
    """Draws of rows that differ in their seed alone."""
    seeds = torch.as_tensor(seeds, device=device)
    ones = torch.ones(len(seeds), device=device)
    return Draws(seeds, 3 * seeds % 5, temperature * ones, (top_k * ones).long(), top_p * ones)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(device, kernel):
    rng = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 1300, generator=rng).to(device)
    draws = draws_of([1, 2, 3, 4, 5, 2**33 + 1], device=device)
    whole = confidence_of_logits(logits, draws=draws, kernel=kernel).token
    alone = [
        confidence_of_logits(
            logits[i : i + 1],
            draws=Draws(*(column[i : i + 1] for column in astuple(draws))),
            kernel=kernel,
        ).token.item()
        for i in range(6)
    ]
    assert whole.tolist() == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("by", ["seed", "row"])
def test_drawing_follows_the_probabilities(by):
    """Of many seeds, and of many rows of one."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, 0.5]]).expand(4000, -1)
    many, one = torch.arange(4000), torch.full((4000,), 11)
    seed, row = (many, one) if by == "seed" else (one, many)
    got = Draws(seed, row, torch.full((4000,), 0.5)).choose(logits)
    share = torch.bincount(got, minlength=5) / 4000
    torch.testing.assert_close(share, (logits[0] / 0.5).softmax(-1), atol=0.03, rtol=0)


def test_the_floor_is_that_of_top_k_and_of_top_p_within_it():
    """Probabilities 0.4, 0.3, 0.2 and 0.1 at the temperature 2, in another order."""
    z = 2 * torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    for top_k, top_p, allowed in [
        (0, 1.0, [0, 1, 2, 3]),
        (3, 1.0, [0, 1, 3]),
        (9, 1.0, [0, 1, 2, 3]),
        (0, 0.65, [1, 3]),
        (0, 0.75, [0, 1, 3]),
        (2, 0.5, [1]),  # 0.4 of 0.7 is more than the half
        (0, 1e-9, [1]),
    ]:
        floor = draws_of([0], 2.0, top_k, top_p).floor(z[None])
        assert (z >= floor).nonzero()[:, 0].tolist() == allowed, (top_k, top_p)


def test_equal_logits_stay_together_above_the_floor():
    assert draws_of([0], 1.0, 1, 0.1).floor(torch.zeros(1, 5)).tolist() == [0.0]


def test_philox_is_tritons(device):
    import triton
    import triton.language as tl

    @triton.jit
    def draw(out, seed, row, COUNT: tl.constexpr):
        at = tl.arange(0, COUNT)
        a, b, c, d = tl.rand4x(tl.load(seed), (tl.load(row) << 32) + at)
        tl.store(out + 4 * at, a)
        tl.store(out + 4 * at + 1, b)
        tl.store(out + 4 * at + 2, c)
        tl.store(out + 4 * at + 3, d)

    for seed, row in ((0, 0), (1, 2), (12345, 2**31 + 7), (-1, 2**32 - 1), (2**62 + 3, 5)):
        out = torch.empty(256, device=device)
        seeds, rows = (torch.tensor([x], device=device) for x in (seed, row))
        draw[(1,)](out, seeds, rows, COUNT=64)
        assert torch.equal(out, uniform(seeds, rows, 256)[0])
        assert torch.equal(out[:7], uniform(seeds, rows, 7)[0])


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
    ],
)
def test_a_misfit_is_refused_by_name(options, says):
    for kernel in (False, True):
        with pytest.raises(ValueError, match=says):
            confidence_of_logits(torch.zeros(2, 9), **options, kernel=kernel)
