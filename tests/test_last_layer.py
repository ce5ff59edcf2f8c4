"""The last layer of a training step computes the places that the loss reads, and no others."""

from __future__ import annotations

import pytest
import torch
from tiny import fresh_model

from d2f import spans as sp
from d2f.adapters import new_lora
from distill.objectives.base import TrainingPlan, read_rows_only

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
READ = torch.tensor([3, 4, 8, 11])  # of the 2 x 6 places
PLACES = torch.arange(6).expand(2, -1)
SPANS = torch.stack([sp.block_causal(6, 2, 2), sp.bidirectional(6)])


def model_with_lora(family, checkpointing):
    model = fresh_model(family)
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.0)
    torch.manual_seed(1)
    for parameter in model.adapter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    if checkpointing:
        model.backbone.gradient_checkpointing_enable({"use_reentrant": False})
        model.backbone.train()
    return model


def gradients(model, hidden):
    hidden.square().sum().backward()
    return {n: p.grad for n, p in model.backbone.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream", "wedlm"])
def test_it_gives_the_rows_that_are_read_and_their_gradients(family, checkpointing):
    whole, part = (model_with_lora(family, checkpointing) for _ in range(2))
    read_rows_only(part.backbone)
    fed = []
    part.backbone.model.layers[-1].mlp.register_forward_pre_hook(lambda _, x: fed.append(x[0]))
    want = whole.hidden(IDS, SPANS, PLACES).flatten(0, 1)[READ]
    got = part.hidden(IDS, TrainingPlan(SPANS, READ), PLACES)
    assert [x.shape for x in fed] == [(1, 4, 32)]
    assert got.shape == (1, 4, 32)
    torch.testing.assert_close(got[0], want)
    wanted, found = gradients(whole, want), gradients(part, got)
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_that_reads_nothing_has_gradients_of_zero():
    model = model_with_lora("llada", False)
    read_rows_only(model.backbone)
    hidden = model.hidden(IDS, TrainingPlan(SPANS, READ[:0]), PLACES)
    assert hidden.shape == (1, 0, 32)
    assert not any(g.any() for g in gradients(model, hidden).values())


def test_other_forwards_are_as_before_and_twice_is_as_once():
    model = fresh_model("llada")
    before = model.hidden(IDS, SPANS, PLACES)
    read_rows_only(model.backbone)
    kind = type(model.backbone.model.layers[-1])
    read_rows_only(model.backbone)
    assert type(model.backbone.model.layers[-1]) is kind
    assert torch.equal(model.hidden(IDS, SPANS, PLACES), before)
