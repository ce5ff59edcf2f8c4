"""Plain causal models, the families beside LLaDA and Dream, and what this project saves."""

import json
from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from d2f import spans as sp
from d2f.attention import SpanPlan
from d2f.convert import build, convert
from d2f.errors import CheckpointError
from d2f.families import get_family, published_contract
from d2f.loading import load
from d2f.saving import save_model

IDS = torch.tensor([[5, 9, 4, 31, 7, 2, 2, 18, 30, 6, 11]])
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # logits that differ
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, **ROPE, rms_norm_eps=1e-5)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2 tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """plain(kind) -> folder of a random model that transformers saved."""
    folders = {}

    def make(kind):
        if kind not in folders:
            cls, config = KINDS[kind]
            torch.manual_seed(len(kind))
            model = cls(config)
            with torch.no_grad():  # biases and norms start at 0 and 1: give them work to do
                for p in model.parameters():
                    if p.dim() == 1:
                        p.add_(torch.randn_like(p) * 0.2)
            folders[kind] = tmp_path_factory.mktemp("plain") / "model"
            model.save_pretrained(folders[kind])
        return folders[kind]

    return make


def relabelled(source, target, **changes):
    """A copy of a model folder with config values changed."""
    target.mkdir()
    for path in source.iterdir():
        if path.name != "generation_config.json":
            (target / path.name).write_bytes(path.read_bytes())
    values = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(values))
    return target


def logits(model, spans=None):
    with torch.inference_mode():
        return model.forward(IDS, sp.causal(IDS.shape[1]) if spans is None else spans)


def close(a, b):
    """Equal to fp32 rounding."""
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


def transformers_own(folder):
    """transformers' forward with its own SDPA attention and causal mask."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_causal_model_gives_transformers_own_logits(plain, kind):
    model = load(plain(kind), device="cpu")
    assert type(model.backbone) is KINDS[kind][0]
    assert (model.family, model.logit_shift, model.is_diffusion) == ("causal", 1, False)
    assert (model.mask_id, model.end_ids, model.tokenizer) == (None, (1,), None)
    assert (model.contract.prompt_rule, model.contract.objective) == ("causal", "next_token")
    assert close(logits(model), transformers_own(plain(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_causal_model_through_the_cache(plain, kind):
    """One token at a time, as it decodes; Qwen3's head size is not hidden / heads."""
    model = load(plain(kind), device="cpu")
    cache, rows = model.new_cache(20), []
    spans = sp.shift(sp.causal(IDS.shape[1]), 4)
    for i in range(IDS.shape[1]):
        at = torch.tensor([i])
        cache.slots = at + 4
        with torch.inference_mode():
            plan = SpanPlan(spans[i : i + 1])
            rows.append(model.decode_rows(IDS[0, at], at, plan, cache, torch.tensor([0])))
    assert close(torch.cat(rows), logits(model)[0])


def test_tokenizer_of_the_folder(plain, word_tokenizer, tmp_path):
    """It comes along, and tells a diffusion family its mask id."""
    folder = relabelled(plain("qwen2"), tmp_path / "model", model_type="Dream")
    word_tokenizer.save_pretrained(folder)
    model = load(folder, device="cpu")
    assert model.family == "dream"
    assert model.tokenizer("w0 w5")["input_ids"] == word_tokenizer("w0 w5")["input_ids"]
    assert model.mask_id == word_tokenizer.mask_token_id == 2
    assert load(plain("qwen2"), device="cpu").tokenizer is None


@pytest.mark.parametrize(
    ("kind", "family", "changes", "cls"),
    [
        ("qwen3", "sdar", {"model_type": "sdar"}, Qwen3ForCausalLM),
        ("qwen3", "wedlm", {"model_type": "wedlm", "qk_norm": True}, Qwen3ForCausalLM),
        ("qwen2", "wedlm", {"model_type": "wedlm", "qk_norm": False}, Qwen2ForCausalLM),
    ],
)
def test_families_of_qwen(plain, tmp_path, kind, family, changes, cls):
    """SDAR and WeDLM are Qwen under another model_type; several end ids are kept in order."""
    changes |= {"mask_token_id": 3, "eos_token_id": [7, 1], "architectures": ["Some"]}
    model = load(relabelled(plain(kind), tmp_path / "model", **changes), device="cpu")
    assert type(model.backbone) is cls
    assert (model.family, model.logit_shift) == (family, 0)
    assert (model.mask_id, model.end_ids) == (3, (7, 1))
    assert model.contract.prompt_rule == {"sdar": "block_causal", "wedlm": "causal"}[family]
    assert close(logits(model), transformers_own(plain(kind)))


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("llada", ["<|eot_id|>"]),
        ("dream", ["<|im_end|>"]),
        ("sdar", ["<|im_end|>"]),
        ("wedlm", ["<|im_end|>"]),
        ("causal", ["<|eot_id|>", "<|im_end|>"]),
    ],
)
def test_the_token_that_ends_a_turn_of_chat_ends_a_response(word_tokenizer, family, tokens):
    """As the published chat templates write it; config.json names only the base model's end."""
    tokenizer = deepcopy(word_tokenizer)
    tokenizer.add_tokens(tokens)
    values = {"eos_token_id": 1, "mask_token_id": 2}
    ends = published_contract(get_family(family), values, tokenizer).end_ids
    assert tokenizer.convert_ids_to_tokens(ends) == ["<eos>", *tokens]


def test_wedlm_on_weights_that_say_dream(golden, dream):
    """golden's WeDLM traces run Dream's weights as a causal Qwen2 without shift."""
    model = load(golden / "dream-tiny", family="wedlm", device="cpu")
    assert type(model.backbone) is Qwen2ForCausalLM
    assert (model.family, model.logit_shift, model.mask_id) == ("wedlm", 0, 3)
    assert model.contract.prompt_rule == "causal"
    assert torch.equal(logits(model), logits(dream))


def test_family_override(plain, tmp_path):
    """A Llama that was trained as LLaDA and saved by someone else in transformers' format."""
    folder = relabelled(plain("llama"), tmp_path / "model", mask_token_id=3)
    model = load(folder, family="llada", device="cpu")
    assert (model.family, model.logit_shift, model.mask_id) == ("llada", 0, 3)
    assert model.contract.rope_fp32
    assert close(logits(model), transformers_own(folder))
    with pytest.raises(CheckpointError, match="needs a mask id"):
        load(plain("llama"), family="llada", device="cpu")


# What this project writes.


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_saved_model_loads_again_as_it_was(golden, family, tmp_path, request):
    """Same logits to the bit, the family it had, the contract with what was changed."""
    model = request.getfixturevalue(family)
    changes = {"objective": "d2f", "block_size": 8, "noise": (0.2, 0.7), "prompt_rule": "block"}
    save_model(model, tmp_path / "out", dtype=torch.float32, **changes)
    again = load(tmp_path / "out", device="cpu")
    assert again.family == family
    assert torch.equal(logits(again), logits(model))
    for name in ("family", "mask_id", "end_ids", "logit_shift", "rope_fp32"):
        assert getattr(again.contract, name) == getattr(model.contract, name)
    for name, value in changes.items():
        assert getattr(again.contract, name) == value
    assert again.context_length == model.context_length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_saved_short_is_the_rounded_model(llada, tmp_path, dtype):
    save_model(llada, tmp_path / "out", dtype=dtype)
    again = load(tmp_path / "out", device="cpu")
    assert again.dtype == torch.float32, "the dtype to run in is not the dtype of the file"
    for name, value in llada.backbone.state_dict().items():
        assert torch.equal(again.backbone.state_dict()[name], value.to(dtype).float())
    save_model(again, tmp_path / "twice", dtype=dtype)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "twice")]
    assert files[0] == files[1], "rounding twice is rounding once"


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_causal_model_is_one_for_transformers_too(plain, kind, tmp_path):
    model = load(plain(kind), device="cpu")
    save_model(model, tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(load(tmp_path / "out", device="cpu")), logits(model))
    assert torch.equal(transformers_own(tmp_path / "out"), transformers_own(plain(kind)))


def test_a_model_with_an_adapter_is_not_saved_as_if_it_had_none(golden, tmp_path):
    folder = golden / "llada-tiny"
    model = load(folder, adapter=folder / "adapter", device="cpu")
    save_model(model, tmp_path / "written", dtype=torch.float32)
    assert model.adapter is not None  # it was merged as it was written, and is as it was
    model.merge_adapter()
    save_model(model, tmp_path / "merged", dtype=torch.float32)
    written, merged = (tmp_path / name / "model.safetensors" for name in ("written", "merged"))
    assert written.read_bytes() == merged.read_bytes()
    assert torch.equal(logits(load(tmp_path / "written", device="cpu")), logits(model))


SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "context_length": 64,
}


@pytest.mark.parametrize("family", ["causal", "llada", "dream"])
def test_a_model_from_scratch(word_tokenizer, tmp_path, family):
    """Repeatable from torch's seed, of the family asked for, and it survives saving."""
    torch.manual_seed(3)
    model = build(family, word_tokenizer, **SHAPE)
    torch.manual_seed(3)
    assert torch.equal(logits(build(family, word_tokenizer, **SHAPE)), logits(model))
    assert (model.family, model.vocab_size, model.context_length) == (family, 32, 64)
    assert model.mask_id == (None if family == "causal" else word_tokenizer.mask_token_id)
    assert model.end_ids == (word_tokenizer.eos_token_id,)
    assert model.logit_shift == {"causal": 1, "llada": 0, "dream": 1}[family]
    save_model(model, tmp_path / "out", dtype=torch.float32)
    again = load(tmp_path / "out", device="cpu")
    assert again.contract == model.contract
    assert again.tokenizer.get_vocab() == word_tokenizer.get_vocab()
    assert torch.equal(logits(again), logits(model))


def test_a_family_that_cannot_be_built(word_tokenizer):
    with pytest.raises(CheckpointError, match=r"must be of .*'llada'.* got 'sdar'"):
        build("sdar", word_tokenizer, **SHAPE)


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_converting_a_causal_model_keeps_its_function(plain, word_tokenizer, tmp_path, family):
    """Under causal spans, to fp32 rounding: RoPE base and norm epsilon come along."""
    folder = relabelled(plain("llama"), tmp_path / "model")
    word_tokenizer.save_pretrained(folder)
    source = load(folder, device="cpu")
    model = convert(source, family)
    assert model.family == family
    assert model.mask_id == word_tokenizer.mask_token_id
    assert model.logit_shift == (1 if family == "dream" else 0)
    assert close(logits(model), logits(source))
    save_model(model, tmp_path / "out", dtype=torch.float32)
    again = load(tmp_path / "out", device="cpu")
    assert (again.family, again.mask_id) == (family, model.mask_id)
    assert torch.equal(logits(again), logits(model))


def test_converting_to_the_same_family_is_nothing(llada):
    assert convert(llada, "llada") is llada


def test_converting_what_has_no_tokenizer(plain):
    with pytest.raises(CheckpointError, match="needs a tokenizer"):
        convert(load(plain("llama"), device="cpu"), "dream")


def test_dropping_biases(plain, word_tokenizer, tmp_path):
    """What LLaDA has no place for goes, all else stays; what has none is told so."""
    folder = relabelled(plain("qwen2"), tmp_path / "model")
    word_tokenizer.save_pretrained(folder)
    source = load(folder, device="cpu")
    weights = {
        k: v for k, v in source.backbone.state_dict().items() if not k.endswith("_proj.bias")
    }
    assert len(weights) < len(source.backbone.state_dict())
    model = convert(source, "llada", drop_biases=True)
    assert (model.family, model.logit_shift) == ("llada", 0)
    made = model.backbone.state_dict()
    assert made.keys() == weights.keys()
    assert all(torch.equal(made[name], weights[name]) for name in weights)
    for family in ("llada", "wedlm"):
        with pytest.raises(CheckpointError, match="drop_biases: expected a model with biases"):
            convert(model, family, drop_biases=True)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama with biases"])
def test_converting_what_the_target_cannot_hold(plain, word_tokenizer, tmp_path, kind):
    """Qwen's biases and norms have no place in LLaDA's Llama."""
    folder = relabelled(plain(kind), tmp_path / "model")
    word_tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match="does not convert to llada"):
        convert(load(folder, device="cpu"), "llada")
