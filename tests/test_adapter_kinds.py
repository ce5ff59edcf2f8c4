"""Whatever PEFT loads onto a base loads here, with PEFT's own logits and merged weights."""

import peft
import pytest
import stock
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from d2f import spans as sp
from d2f.loading import load
from d2f.saving import save, save_model

IDS = torch.arange(4, 24)[None]
SPANS = sp.causal(20)
ATTENTION = ["q_proj", "v_proj"]
KINDS = {
    "all linear": {"target_modules": "all-linear"},
    "DoRA": {"use_dora": True},
    "DoRA on embeddings": {"use_dora": True, "target_modules": ["embed_tokens", "o_proj"]},
    "rank-stabilised": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 5}},
    "alpha pattern": {"alpha_pattern": {"q_proj": 32}},
    "one layer": {"layers_to_transform": [1]},
    "layers of a pattern": {"layers_to_transform": 0, "layers_pattern": "layers"},
    "targets by pattern": {"target_modules": r".*layers\.0\..*(up|down)_proj"},
    "excluded": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": r".*0.*q_proj"},
    "saved head": {"modules_to_save": ["lm_head"]},
    "saved embeddings": {"modules_to_save": ["embed_tokens"]},
    "saved norms": {"modules_to_save": ["norm", "input_layernorm"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "biases": {"bias": "lora_only"},
    "trained tokens": {"trainable_token_indices": [5, 7]},
}  # fmt: skip
OTHERS = {
    "LoHa": peft.LoHaConfig(r=4, target_modules=ATTENTION),
    "LoKr": peft.LoKrConfig(r=4, target_modules=ATTENTION),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "OFT": peft.OFTConfig(oft_block_size=8, target_modules=ATTENTION),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj"]),
}  # fmt: skip
BASES = {"llama": ("llama", False), "qwen2 tied": ("qwen2", True)}


@pytest.fixture(scope="module", params=BASES)
def base(request, tmp_path_factory):
    kind, tied = BASES[request.param]
    return stock.checkpoint(tmp_path_factory.mktemp("base") / "model", kind, tied=tied)


def made(base, folder, config):
    """An adapter of PEFT's with random weights."""
    torch.manual_seed(0)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(folder)
    return folder


def lora(**changes):
    return LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": ATTENTION} | changes))


def logits(model):
    with torch.inference_mode():
        return model.forward(IDS, SPANS)


def check(base, folder, config):
    adapter = made(base, folder / "adapter", config)
    ours = load(base, adapter=adapter, device="cpu")
    plain = load(base, device="cpu")
    before = logits(plain)
    plain.adapter = PeftModel.from_pretrained(plain.backbone, adapter)
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
        want = PeftModel.from_pretrained(theirs, adapter).eval()(input_ids=IDS).logits
    got = logits(ours)
    assert torch.equal(got, logits(plain)), "PEFT's own loading, in our attention"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, before, atol=1e-3)

    save_model(ours, folder / "merged", dtype=torch.float32)
    save(ours, folder / "alone")
    assert torch.equal(got, logits(ours)), "saving changes nothing"
    assert torch.equal(logits(load(folder / "alone", device="cpu")), got)
    ours.merge_adapter()
    torch.testing.assert_close(logits(ours), want, rtol=1e-4, atol=1e-4)
    again = load(folder / "merged", device="cpu")
    assert torch.equal(logits(again), logits(ours)), "merged as PEFT merges"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_lora(base, tmp_path, kind):
    check(base, tmp_path, lora(**KINDS[kind]))


@pytest.mark.filterwarnings("ignore")
def test_a_bias_of_b_where_the_base_has_one(tmp_path):
    base = stock.checkpoint(tmp_path / "model", "qwen2")
    check(base, tmp_path, lora(lora_bias=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind(base, tmp_path, kind):
    check(base, tmp_path, OTHERS[kind])
