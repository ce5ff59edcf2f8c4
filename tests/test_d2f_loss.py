"""D2F's loss in each direction and weighting, against the formula written out sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_train import batch_of, settings
from tiny import fresh_model

import d2f
from d2f.adapters import new_lora
from distill.objectives import base as logit_parts


def trained(family: str) -> d2f.DiffusionModel:
    """A model with an adapter that has an effect: student and teacher differ."""
    model = fresh_model(family)
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.0)
    torch.manual_seed(0)
    for name, weight in model.backbone.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.3)
            assert "lora" in name
    return model


def written_out(made, rows, target: str, weighting: str) -> torch.Tensor:
    """Mean over the step's masked tokens of weight x sum over v of ``p log(p / q)``: (p, q) is
    (student, teacher) in the paper, (teacher, student) in the official code; weight 1 in the
    paper, 1 / p_b in the code."""
    model, total, count = made.model, torch.zeros(()), 0.0
    for sample in (placed.sample for row in rows for placed in row):
        masked, _ = made.draw(sample)
        ratios, _ = made.state(sample)
        importance = made.importance(sample)
        start = len(sample.prompt)
        ids = torch.tensor([sample.prompt + sample.response])
        places = start + torch.from_numpy(np.flatnonzero(masked))
        ids[0, places] = model.mask_id
        size = made.block_size(sample)
        student = model.forward(ids, d2f.spans.block_causal(len(sample), start, size))[0]
        with torch.no_grad(), model.adapter_disabled():
            teacher = model.forward(ids, d2f.spans.bidirectional(len(sample)))[0]
        for place in places.tolist():
            s, t = (z[place - model.logit_shift].softmax(-1) for z in (student, teacher))
            p, q = (s, t) if target == "reverse" else (t, s)
            weight = float(importance[place - start])
            count += weight
            if weighting == "inverse_ratio":
                weight /= ratios[place - start]
            total = total + weight * (p * (p.log() - q.log())).sum()
    return total / count


def gradient(loss: torch.Tensor, made) -> torch.Tensor:
    parameters = [p for p in made.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("target", ["soft", "reverse"])
@pytest.mark.parametrize("weighting", ["inverse_ratio", "equal"])
def test_the_loss_and_its_gradient_are_the_formula(
    tmp_path, monkeypatch, family, target, weighting
):
    """Packed, and where logits are made in parts in parts of three rows."""
    model = trained(family)
    monkeypatch.setattr(logit_parts, "LOGITS_BYTES", 2 * 3 * 4 * model.vocab_size)
    config = settings(
        tmp_path, "d2f", init="unused", distill_target=target, weighting=weighting, block_size=4
    )
    made, rows = batch_of("d2f", model, config)
    loss = made(made.batch(rows, slice(0, len(rows))))
    expected = written_out(made, rows, target, weighting)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    ours, theirs = gradient(loss, made), gradient(expected, made)
    assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()


def test_dropout_is_the_students_alone(tmp_path):
    """Reading the teacher leaves a training student as it was."""
    model = fresh_model("llada")
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.5)
    torch.manual_seed(0)
    for weight in (p for p in model.backbone.parameters() if p.requires_grad):
        torch.nn.init.normal_(weight, std=0.3)
    made, rows = batch_of("d2f", model, settings(tmp_path, "d2f", init="unused"))
    made.train()
    batch = made.batch(rows, slice(0, 2))
    assert torch.equal(made.read_teacher(batch), made.read_teacher(batch))
    assert made(batch).item() != made(batch).item()


def test_the_reverse_loss_of_no_rows_is_zero():
    hidden, head = torch.zeros(0, 8), torch.zeros(30, 8)
    assert logit_parts.linear_reverse_kl(hidden, hidden, head, torch.zeros(0)).item() == 0.0
