"""A family is one file: a made-up one, on a class of transformers that no other family uses and
under weight names of its own, is loaded, saved, exported, built, adapted and decoded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import fresh_model, random_model, tokenizer
from transformers import MistralForCausalLM

import d2f
import d2f.families
import decode
from d2f import spans as sp
from d2f.adapters import attach, new_lora
from d2f.convert import convert
from d2f.families import FAMILIES, find_families
from d2f.saving import save_adapter, save_model, save_official

FILE = r"""
from transformers import MistralConfig, MistralForCausalLM

from d2f.families.family import Family

BLOCK = r"^net\.block\.(\d+)\."


def make_config(raw):
    return MistralConfig(
        vocab_size=raw["vocab_size"], hidden_size=raw["width"], intermediate_size=raw["inner"],
        num_hidden_layers=raw["depth"], num_attention_heads=raw["heads"],
        num_key_value_heads=raw["kv_heads"], max_position_embeddings=raw["length"],
        rope_parameters={"rope_type": "default", "rope_theta": raw["theta"]},
        sliding_window=None, rms_norm_eps=1e-6,
    )


def official_config(config):
    return {
        "model_type": "Drift", "architectures": ["DriftModel"], "vocab_size": config.vocab_size,
        "width": config.hidden_size, "inner": config.intermediate_size,
        "depth": config.num_hidden_layers, "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads, "length": config.max_position_embeddings,
        "theta": config.rope_parameters["rope_theta"], "eos_token_id": config.eos_token_id,
    }


FAMILY = Family(
    name="drift", model_types=("Drift",), architectures=("DriftModel",),
    classes=(MistralForCausalLM,),
    make_config=make_config,
    key_mapping={
        BLOCK + "norm_a": r"model.layers.\1.input_layernorm",
        BLOCK + "norm_b": r"model.layers.\1.post_attention_layernorm",
        BLOCK + "att_q": r"model.layers.\1.self_attn.q_proj",
        BLOCK + "att_k": r"model.layers.\1.self_attn.k_proj",
        BLOCK + "att_v": r"model.layers.\1.self_attn.v_proj",
        BLOCK + "att_out": r"model.layers.\1.self_attn.o_proj",
        BLOCK + "gate": r"model.layers.\1.mlp.gate_proj",
        BLOCK + "up": r"model.layers.\1.mlp.up_proj",
        BLOCK + "down": r"model.layers.\1.mlp.down_proj",
        r"^net\.embed": "model.embed_tokens",
        r"^net\.norm": "model.norm",
        "^head": "lm_head",
    },
    knows=("width", "inner", "depth", "heads", "kv_heads", "length", "theta", "vocab_size"),
    logit_shift=1, rope_fp32=True, prompt_rule="bidirectional", end_tokens=("<|user|>",),
    scratch=MistralForCausalLM, starts=("llama",), official_config=official_config,
)
"""
IDS = torch.tensor([[5, 9, 4, 31, 7, 2, 2, 18, 30, 6, 11]])
CAUSAL = sp.causal(IDS.shape[1])


@pytest.fixture(autouse=True)
def drift(tmp_path, monkeypatch):
    """The family of the file, as if it lay in d2f/families."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "drift.py").write_text(FILE)
    monkeypatch.setattr(d2f.families, "__path__", [*d2f.families.__path__, str(folder)])
    found = find_families()
    assert list(found) == ["llada", "dream", "drift", "sdar", "wedlm", "causal"]
    monkeypatch.setitem(FAMILIES, "drift", found["drift"])
    yield found["drift"]
    del sys.modules["d2f.families.drift"]


def logits(model, spans=CAUSAL):
    with torch.inference_mode():
        return model.forward(IDS, spans)


def official(model, folder: Path) -> Path:
    """The model as a stranger publishes it: without a contract."""
    save_official(model, folder, dtype=torch.float32)
    (folder / "d2f_contract.json").unlink()
    return folder


def test_one_file_is_all_that_loading_saving_and_building_need(tmp_path):
    model = fresh_model("drift")
    assert type(model.backbone) is MistralForCausalLM
    save_model(model, tmp_path / "native", dtype=torch.float32)
    values = json.loads((official(model, tmp_path / "official") / "config.json").read_text())
    assert values["width"] == 32 and "hidden_size" not in values
    names = load_file(tmp_path / "official" / "model.safetensors").keys()
    assert all(name.startswith(("net.", "head.")) for name in names)
    own = MistralForCausalLM.from_pretrained(tmp_path / "native").eval()
    with torch.inference_mode():
        theirs = own(IDS).logits
    assert (logits(model) - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    decoder = decode.Threshold(block_size=4, tau=0.3, max_new_tokens=12)
    (expected,) = decode.generate(model, [[5, 6, 7]], decoder)
    for place in ("native", "official"):
        again = d2f.load(tmp_path / place, device="cpu")
        assert type(again.backbone) is MistralForCausalLM
        assert torch.equal(logits(again), logits(model))
        assert torch.equal(logits(again, sp.bidirectional(11)), logits(model, sp.bidirectional(11)))
        assert (again.family, again.mask_id, again.logit_shift) == ("drift", model.mask_id, 1)
        assert again.contract.rope_fp32 and again.contract.prompt_rule == "bidirectional"
        (result,) = decode.generate(again, [[5, 6, 7]], decoder)
        assert result.raw_tokens == expected.raw_tokens
    user = tokenizer().convert_tokens_to_ids("<|user|>")
    assert again.end_ids == (tokenizer().eos_token_id, user), "the family's own end token"


def test_an_adapter_under_the_familys_names(tmp_path, drift):
    model = fresh_model("drift")
    save_model(model, tmp_path / "model", dtype=torch.float32)
    new_lora(model, r=2, alpha=4, dropout=0.0, targets=["q_proj", "o_proj", "down_proj"])
    with torch.no_grad():
        for name, weight in model.adapter.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    place = tmp_path / "adapter"
    save_adapter(model, place)
    (place / "d2f_contract.json").unlink()
    weights, head = load_file(place / "adapter_model.safetensors"), "base_model.model."
    theirs = {head + drift.official_name(k.removeprefix(head)): v for k, v in weights.items()}
    assert head + "net.block.0.att_out.lora_A.weight" in theirs
    save_file(theirs, place / "adapter_model.safetensors")
    settings = json.loads((place / "adapter_config.json").read_text())
    settings["target_modules"] = ["att_q", "att_out", "down"]
    (place / "adapter_config.json").write_text(json.dumps(settings))
    again = d2f.load(tmp_path / "model", device="cpu")
    attach(again, str(place))
    model.adapter.eval()
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(again), logits(d2f.load(tmp_path / "model", device="cpu")))


def test_another_familys_weights_as_a_start():
    source = random_model("causal")
    model = convert(source, "drift")
    assert type(model.backbone) is MistralForCausalLM
    assert (model.family, model.logit_shift, model.contract.rope_fp32) == ("drift", 1, True)
    assert torch.equal(logits(model), logits(source))
