"""Fields of saved files that other tools read, and this project does not."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import fresh_model, random_model

from d2f.adapters import new_lora
from d2f.saving import save_adapter, save_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_config_json_says_in_which_dtype_the_weights_lie(dtype, tmp_path):
    save_model(random_model("dream"), tmp_path / "model", dtype=dtype)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["dtype"] == str(dtype).removeprefix("torch.")
    assert values["architectures"] == ["Qwen2ForCausalLM"]


def test_an_adapter_is_saved_to_be_used_and_not_to_be_trained_on(tmp_path):
    from peft import LoraConfig

    model = fresh_model("dream")
    new_lora(model, r=2, alpha=4, dropout=0.1)
    save_adapter(model, tmp_path / "adapter")
    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    assert config.inference_mode is True
    assert (config.r, config.lora_alpha, config.bias, config.task_type) == (2, 4, "none", None)
