"""Layers joined to one product: the same function, no second copy, and the model as before."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import fresh_model, random_model

import d2f
from d2f import spans as sp
from d2f.adapters import new_lora
from d2f.cpu.packed import JoinedModel, can_join

IDS = torch.arange(3, 23)[None]


def hidden(network, spans):
    """Of a joined model or a backbone's own decoder."""
    plan = d2f.attention.SpanPlan(spans)
    positions = torch.arange(IDS.shape[1])[None]
    with torch.inference_mode():
        return network(
            input_ids=IDS, position_ids=positions, spans=plan, use_cache=False
        ).last_hidden_state


def bytes_held(backbone):
    """Of all weights' storages, each once."""
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in backbone.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("family", ["llada", "dream"])  # without and with biases
def test_the_function_is_the_same_and_no_weight_is_held_twice(family):
    model, spans = fresh_model(family), sp.bidirectional(IDS.shape[1])
    want, before = hidden(model.backbone.model, spans), bytes_held(model.backbone)
    joined = JoinedModel(model.backbone)
    torch.testing.assert_close(hidden(joined.model, spans), want)
    assert len(joined.products) == 2 * model.backbone.config.num_hidden_layers
    held = {w.untyped_storage().data_ptr() for w in model.backbone.parameters()}
    for product in joined.products:
        assert product.weight.untyped_storage().data_ptr() in held
    assert bytes_held(model.backbone) == before
    assert torch.equal(hidden(model.backbone.model, spans), want), "the originals are whole"


def test_what_changes_an_original_changes_the_product(tmp_path):
    """An adapter that is merged later, new weights loaded into it, and saving."""
    model, spans = fresh_model("llada"), sp.causal(IDS.shape[1])
    joined = JoinedModel(model.backbone)
    new_lora(model, r=4, alpha=8, dropout=0.0)
    for name, weight in model.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.merge_adapter()
    want = hidden(model.backbone.model, spans)
    torch.testing.assert_close(hidden(joined.model, spans), want)
    model.save(tmp_path / "saved")
    assert torch.equal(hidden(d2f.load(tmp_path / "saved").backbone.model, spans), want)
    other = random_model("llada", seed=3).backbone
    model.backbone.load_state_dict(other.state_dict())
    torch.testing.assert_close(hidden(joined.model, spans), hidden(other.model, spans))


def test_quantised_weights_are_not_joined():
    model = fresh_model("llada")
    assert can_join(model.backbone)
    quantised = copy.copy(model.backbone)
    quantised.quantized = "int8-weight"
    assert not can_join(quantised)
