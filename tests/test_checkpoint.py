"""Loading a checkpoint: the official numbers, and every misfit an error.

To the last bit on a CPU that adds up as the one they were recorded on; elsewhere as close as the
rounding of fp32 lets two orders of the same sums come (`golden_facts.allowed`).
"""

import pytest
import torch
from golden_facts import allowed, difference, official, run
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

import d2f.attention
from d2f import spans as sp
from d2f.loading import load

FAMILIES = ["llada", "dream"]
MASKS = ["bidirectional", "block_causal_8"]


@pytest.mark.parametrize("family", FAMILIES)
def test_block_causal_spans_are_the_official_mask(golden, family):
    facts = load_file(golden / f"{family}-tiny/forward.safetensors")
    for prompt, seen in zip(
        facts["prompt_lengths"].tolist(), facts["block_causal_allowed"].tolist(), strict=True
    ):
        ends = sp.block_causal(40, prompt, 8)[:, 0, 1].tolist()
        assert [[key < end for key in range(40)] for end in ends] == seen


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_official_ones(golden, family, mask, request):
    model = request.getfixturevalue(family)
    off = difference(run(model, golden, family, mask), official(golden, family, mask))
    assert off <= allowed(model, golden, family, mask) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_kept_apart_then_merged(golden, family, request):
    """With the official LoRA the logits are the official ones; merged into the weights, within 1e-5
    of the largest logit; disabled, those of the base exactly."""
    folder = golden / f"{family}-tiny"
    model = load(folder, adapter=folder / "adapter", device="cpu")
    for mask in MASKS:
        want = official(golden, family, mask, adapter=True)
        off = difference(run(model, golden, family, mask), want)
        assert off <= allowed(model, golden, family, mask) < 1e-4
        base = run(request.getfixturevalue(family), golden, family, mask)
        assert difference(want, base) > 0.01, "the adapter must do something"
        with model.adapter_disabled():
            assert difference(run(model, golden, family, mask), base) == 0.0
    model.merge_adapter()
    assert model.adapter is None
    assert not [name for name, _ in model.backbone.named_parameters() if "lora" in name]
    for mask in MASKS:
        want = official(golden, family, mask, adapter=True)
        assert difference(run(model, golden, family, mask), want) <= 1e-5 * want.abs().max()


def test_what_a_loaded_model_knows_of_itself(llada, dream):
    for model, kind, shift in ((llada, LlamaForCausalLM, 0), (dream, Qwen2ForCausalLM, 1)):
        assert type(model.backbone) is kind
        assert model.logit_shift == model.contract.logit_shift == shift
        assert (model.mask_id, model.end_ids, model.tokenizer) == (3, (2,), None)
        assert (model.vocab_size, model.context_length) == (96, 512)
        assert (model.dtype, model.device.type) == (torch.float32, "cpu")
        assert model.is_diffusion
        assert model.adapter is None
        assert not model.backbone.training
    assert (llada.family, dream.family) == ("llada", "dream")
    assert (llada.contract.rope_fp32, dream.contract.rope_fp32) == (True, False)


def test_every_weight_has_the_dtype_asked_for(golden):
    model = load(golden / "dream-tiny", dtype="bf16", device="cpu")
    assert {p.dtype for p in model.backbone.parameters()} == {model.dtype} == {torch.bfloat16}


# RoPE: in fp32 for LLaDA whatever the dtype, in the model's dtype for the others.


def rotated(x, theta, dtype):
    """RoPE (rotate-half) of x [1, H, T, D] at positions 0..T-1, computed in `dtype`."""
    dim = x.shape[-1]
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(x.shape[2]).float(), frequency)
    cos, sin = (f(torch.cat((angle, angle), -1)).to(dtype) for f in (torch.cos, torch.sin))
    x = x.to(dtype)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), -1) * sin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "theta"), [("llada", 5e5), ("dream", 1e6)])
def test_precision_of_rope(golden, family, theta, dtype, monkeypatch):
    """What reaches attention, against RoPE by hand on the projections of the same layer."""
    model = load(golden / f"{family}-tiny", dtype=dtype, device="cpu")
    projected, attended = {}, []

    def attend(q, k, v, mask, *, scale=None):
        attended.append((q, k))
        return real(q, k, v, mask, scale=scale)

    real = d2f.attention.masked_attention
    monkeypatch.setattr(d2f.attention, "masked_attention", attend)
    layer = model.backbone.model.layers[0].self_attn
    for name in ("q_proj", "k_proj"):
        getattr(layer, name).register_forward_hook(
            lambda module, inputs, out, name=name: projected.__setitem__(name, out)
        )
    run(model, golden, family, "bidirectional")
    for name, came in zip(("q_proj", "k_proj"), attended[0], strict=True):
        x = projected[name][:1].unflatten(-1, (-1, 16)).transpose(1, 2)
        full, short = rotated(x, theta, torch.float32).to(dtype), rotated(x, theta, dtype)
        assert came.dtype == dtype
        assert not torch.equal(full, short), "the two must be told apart"
        assert torch.equal(came[:1], full if family == "llada" else short)
