"""`init_adapter` with `lora.targets`: an adapter that is trained on may be given more layers, and
loses nothing that it has learned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import settings
from tiny import random_model

import d2f
from d2f.errors import InputError
from d2f.saving import save_model
from distill.export import prepare_model
from distill.train import train

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, str]:
    """A base, and an adapter of two layers on it that does change its answers."""
    place = tmp_path_factory.mktemp("wider")
    save_model(random_model("dream"), place / "base", dtype=torch.float32)
    init = str(place / "base")
    lora = {"r": 3, "alpha": 3, "dropout": 0.0, "targets": ["q_proj", "up_proj"]}
    optimizer = {"lr": 0.05, "warmup": 0}
    config = settings(place / "first", "d2f", init=init, lora=lora, steps=2, optimizer=optimizer)
    return {"init": init, "init_adapter": str(train(config) / "adapter")}


def layers(folder: Path) -> list[str]:
    return json.loads((folder / "adapter_config.json").read_text())["target_modules"]


def test_what_was_learned_is_where_a_wider_adapter_begins(tmp_path, trained):
    config = settings(tmp_path / "run", "d2f", **trained, lora={"targets": ALL}, steps=2)
    ids = torch.arange(5, 17)[None]
    before = d2f.load(trained["init"], adapter=trained["init_adapter"])
    model = prepare_model(config)
    spans = d2f.spans.bidirectional(12)
    with torch.no_grad():
        assert torch.equal(model.forward(ids, spans), before.forward(ids, spans))
        assert not torch.equal(
            before.forward(ids, spans), d2f.load(trained["init"]).forward(ids, spans)
        )
    result = train(config) / "adapter"
    assert layers(result) == sorted(ALL)
    first = load_file(Path(trained["init_adapter"]) / "adapter_model.safetensors")
    weights = load_file(result / "adapter_model.safetensors")
    assert {len(value) for key, value in weights.items() if "lora_A" in key} == {3}
    assert first.keys() < weights.keys()
    moved = [key for key in weights.keys() - first.keys() if "lora_B" in key and weights[key].any()]
    # The five new layers have learned.
    assert len(moved) == 5 * before.backbone.config.num_hidden_layers
    assert d2f.load(trained["init"], adapter=result).contract == before.contract


def test_without_targets_an_adapter_keeps_its_own_layers(tmp_path, trained):
    assert layers(train(settings(tmp_path, "d2f", **trained, steps=1)) / "adapter") == [
        "q_proj", "up_proj",
    ]  # fmt: skip


def test_an_adapter_of_other_layers_is_refused(tmp_path, trained):
    config = settings(tmp_path, "d2f", **trained, lora={"targets": ["q_proj", "k_proj"]})
    message = (
        "expected an adapter of k_proj, q_proj, or of some of them, got one of q_proj, up_proj"
    )
    with pytest.raises(InputError, match=message):
        train(config)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_rank_beside_an_adapter_is_refused(tmp_path, trained):
    with pytest.raises(InputError, match=r"lora\.r: nothing reads it here"):
        settings(tmp_path, "d2f", **trained, lora={"targets": ALL, "r": 8})
