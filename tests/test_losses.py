"""The training losses against the official code's values, and the gradient of the KL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from d2f import spans
from distill.losses import entropy, weighted_cross_entropy, weighted_kl

GOLDEN = Path(__file__).parent / "golden" / "llada-tiny"


@pytest.fixture(scope="module")
def rows(llada):
    """(student logits, teacher logits, clean ids, weight) of the golden batch's masked rows."""
    data = load_file(GOLDEN / "forward.safetensors")
    ids, masked = data["input_ids"].long(), data["masked"].bool()
    length = ids.shape[1]
    block_causal = torch.stack(
        [spans.block_causal(length, int(p), 8) for p in data["prompt_lengths"]]
    )
    with torch.no_grad():
        student = llada.forward(ids, block_causal)[masked]
        teacher = llada.forward(ids, spans.bidirectional(length))[masked]
    weight = 1 / data["p_mask"][masked] / masked.sum()
    return student, teacher, data["clean_ids"].long()[masked], weight, data


def test_soft_loss_is_the_official_one(rows):
    """The official code minimises CE(student, softmax(teacher)) / p: our KL plus the teacher's
    entropy, which has no gradient."""
    student, teacher, _, weight, data = rows
    ours = weighted_kl(student, teacher, weight) + (entropy(teacher) * weight).sum()
    assert ours.item() == pytest.approx(data["loss_soft_ce_over_p"].item(), rel=1e-5)


def test_hard_loss_is_the_official_one(rows):
    student, _, clean, weight, data = rows
    ours = weighted_cross_entropy(student, clean, weight)
    assert ours.item() == pytest.approx(data["loss_hard_ce_over_p"].item(), rel=1e-5)


@given(st.integers(0, 5), st.integers(2, 9), st.integers(0, 99))
def test_kl_equals_torch_and_passes_gradcheck(count, vocabulary, seed):
    """N = 0 included."""
    torch.manual_seed(seed)
    student = torch.randn(count, vocabulary, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(count, vocabulary, dtype=torch.float64)
    weight = torch.rand(count, dtype=torch.float64)
    plain = torch.nn.functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(weighted_kl(student, teacher, weight), (plain * weight).sum())
    assert torch.autograd.gradcheck(lambda s: weighted_kl(s, teacher, weight), (student,))


@given(st.integers(1, 5), st.integers(2, 50), st.integers(0, 99))
def test_kl_of_equal_logits_has_exactly_zero_gradient(count, vocabulary, seed):
    torch.manual_seed(seed)
    student = (5 * torch.randn(count, vocabulary)).requires_grad_()
    loss = weighted_kl(student, student.detach().clone(), torch.rand(count))
    loss.backward()
    assert loss.item() == 0.0
    assert student.grad.abs().max().item() == 0.0
