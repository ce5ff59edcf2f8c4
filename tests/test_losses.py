"""The training losses against the official code's values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d2f import spans
from distill.objectives.base import weighted_cross_entropy
from triton_kernels.masked_kl import masked_linear_kl

GOLDEN = Path(__file__).parent / "golden" / "llada-tiny"


@pytest.fixture(scope="module")
def rows(llada):
    """(student states, teacher states, clean ids, weight) of the golden batch's masked rows."""
    data = load_file(GOLDEN / "forward.safetensors")
    ids, masked = data["input_ids"].long(), data["masked"].bool()
    length = ids.shape[1]
    block_causal = torch.stack(
        [spans.block_causal(length, int(p), 8) for p in data["prompt_lengths"]]
    )
    with torch.no_grad():
        student = llada.hidden(ids, block_causal)[masked]
        teacher = llada.hidden(ids, spans.bidirectional(length))[masked]
    weight = 1 / data["p_mask"][masked] / masked.sum()
    return student, teacher, data["clean_ids"].long()[masked], weight, data


@pytest.mark.parametrize("columns", [None, 17])
def test_soft_loss_is_the_official_one(rows, llada, columns):
    """The official code minimises CE(student, softmax(teacher)) / p: our KL plus the teacher's
    entropy, which has no gradient."""
    student, teacher, _, weight, data = rows
    with torch.no_grad():
        log_p = llada.head(teacher).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    head = llada.backbone.lm_head.weight.detach()
    ours = masked_linear_kl(student, teacher, head, weight, columns=columns)
    total = ours + (entropy * weight).sum()
    assert total.item() == pytest.approx(data["loss_soft_ce_over_p"].item(), rel=1e-5)


def test_hard_loss_is_the_official_one(rows, llada):
    student, _, clean, weight, data = rows
    with torch.no_grad():
        ours = weighted_cross_entropy(llada.head(student), clean, weight)
    assert ours.item() == pytest.approx(data["loss_hard_ce_over_p"].item(), rel=1e-5)
