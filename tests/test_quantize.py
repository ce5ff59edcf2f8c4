"""A 4-bit base: what is trained on it has the gradient of the weights that it stands for."""

from __future__ import annotations

import json

import pytest
import torch
from test_train import settings
from tiny import random_model

import d2f
from d2f.saving import save_model
from distill.data.stream import fill_rows
from distill.export import prepare_model
from distill.objectives import OBJECTIVES
from distill.train import train

bitsandbytes = pytest.importorskip("bitsandbytes")


@pytest.fixture
def base(tmp_path):
    save_model(random_model("dream"), tmp_path / "base", dtype=torch.float32)
    return tmp_path / "base"


def dequantized(model) -> dict[str, torch.Tensor]:
    """The weights of 4-bit layers by the name of their module."""
    return {
        name: bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        for name, layer in model.backbone.named_modules()
        if isinstance(layer, bitsandbytes.nn.Linear4bit)
    }


def test_gradients_are_those_of_the_weights_that_4_bits_stand_for(tmp_path, base):
    """Also after forwards of the teacher and of an evaluation, which are not of training."""
    config = settings(tmp_path / "run", "d2f", init=str(base), lora={"r": 4, "dropout": 0.0})
    model = prepare_model(config.model_copy(update={"quantize": "4bit"}))
    plain = prepare_model(config)
    layers = dequantized(model)
    assert len(layers) == 7 * plain.backbone.config.num_hidden_layers
    with torch.no_grad():
        for name, weight in layers.items():
            layer = plain.backbone.get_submodule(name)
            getattr(layer, "base_layer", layer).weight.copy_(weight)
    found = []
    for one in (model, plain):
        network = one.adapter
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        made = OBJECTIVES["d2f"](one, config)
        network.eval()
        batch = made.batch(fill_rows(made.stream(), 0)[0], slice(0, config.data.rows))
        with torch.no_grad():
            made.read(batch, batch.spans)
        made.network.train()
        loss = made.forward(batch)
        loss.backward()
        found.append(
            {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
            | {"loss": loss.detach()}
        )
    four_bits, dense = found
    assert four_bits.keys() == dense.keys() and len(dense) > 8
    for name, gradient in dense.items():
        torch.testing.assert_close(four_bits[name], gradient, rtol=1e-3, atol=1e-5)


def test_a_run_on_4_bits_is_exported_on_the_base_as_it_was(tmp_path, base):
    config = settings(
        tmp_path / "run", "d2f", init=str(base), quantize="4bit", eval_every=3,
        evaluation={"problems": 1, "batch_size": 1},
    )  # fmt: skip
    train(config)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "log.jsonl").open()]
    assert len(losses) == config.steps and all(loss > 0 for loss in losses)
    whole = d2f.load(tmp_path / "run" / "model")
    adapted = d2f.load(base, adapter=tmp_path / "run" / "adapter")
    adapted.merge_adapter()
    for name, weight in whole.backbone.state_dict().items():
        torch.testing.assert_close(adapted.backbone.state_dict()[name], weight)
