"""Plain causal models, the families beside LLaDA and Dream, what is taken for what, and what this
project makes and converts."""

import json
import warnings
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
from d2f.errors import CheckpointError, SupposedWarning
from d2f.families import get_family, published_contract
from d2f.loading import describe, load
from d2f.saving import save_model
from distill import info

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
    """A copy of a model folder with config values changed, of no class by name."""
    target.mkdir()
    for path in source.iterdir():
        if path.name != "generation_config.json":
            (target / path.name).write_bytes(path.read_bytes())
    values = json.loads((target / "config.json").read_text()) | {"architectures": None} | changes
    (target / "config.json").write_text(json.dumps(values))
    return target


def logits(model):
    with torch.inference_mode():
        return model.forward(IDS, sp.causal(IDS.shape[1]))


def close(a, b):
    """Equal to fp32 rounding."""
    return (a - b).abs().max() <= 1e-5 * b.abs().max()


def transformers_own(folder):
    """transformers' forward with its own SDPA attention and causal mask."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_causal_model_gives_transformers_own_logits(plain, kind, tmp_path):
    """At once, a token at a time through the cache (Qwen3's head size is not hidden / heads), and
    saved by us for transformers."""
    model, own = load(plain(kind), device="cpu"), transformers_own(plain(kind))
    assert type(model.backbone) is KINDS[kind][0]
    assert (model.family, model.logit_shift, model.is_diffusion) == ("causal", 1, False)
    assert (model.mask_id, model.end_ids, model.tokenizer) == (None, (1,), None)
    assert (model.contract.prompt_rule, model.contract.objective) == ("causal", "next_token")
    assert close(logits(model), own)
    cache, rows = model.new_cache(20), []
    spans = sp.shift(sp.causal(IDS.shape[1]), 4)
    for i in range(IDS.shape[1]):
        at = torch.tensor([i])
        cache.slots = at + 4
        with torch.inference_mode():
            plan = SpanPlan(spans[i : i + 1])
            rows.append(model.decode_rows(IDS[0, at], at, plan, cache, torch.tensor([0])))
    assert close(torch.cat(rows), logits(model)[0])
    save_model(model, tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(load(tmp_path / "out", device="cpu")), logits(model))
    assert torch.equal(transformers_own(tmp_path / "out"), own)


@pytest.mark.parametrize(
    ("kind", "family", "changes", "cls"),
    [
        ("qwen3", "sdar", {"model_type": "sdar", "block_size": 8}, Qwen3ForCausalLM),
        ("qwen3", "wedlm", {"model_type": "wedlm", "qk_norm": True}, Qwen3ForCausalLM),
        ("qwen2", "wedlm", {"model_type": "wedlm", "qk_norm": False}, Qwen2ForCausalLM),
    ],
)
def test_families_of_qwen(plain, tmp_path, kind, family, changes, cls):
    """SDAR and WeDLM are Qwen under another model_type; several end ids are kept in order."""
    changes |= {"mask_token_id": 3, "eos_token_id": [7, 1]}
    model = load(relabelled(plain(kind), tmp_path / "model", **changes), device="cpu")
    assert type(model.backbone) is cls
    assert (model.family, model.logit_shift) == (family, 0)
    assert (model.mask_id, model.end_ids) == (3, (7, 1))
    assert model.contract.prompt_rule == {"sdar": "block_causal", "wedlm": "causal"}[family]
    assert model.contract.block_size == (8 if family == "sdar" else None)
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
    contract, supposed = published_contract(get_family(family), values, tokenizer)
    assert tokenizer.convert_ids_to_tokens(contract.end_ids) == ["<eos>", *tokens]
    assert not supposed


def test_another_family_by_name(golden, dream, plain, tmp_path):
    """A Llama that was trained as LLaDA and saved by someone else in transformers' format; golden's
    WeDLM traces run Dream's weights as a causal Qwen2 without shift."""
    folder = relabelled(plain("llama"), tmp_path / "model", mask_token_id=3)
    model = load(folder, family="llada", device="cpu")
    assert (model.family, model.logit_shift, model.mask_id) == ("llada", 0, 3)
    assert model.contract.rope_fp32
    assert close(logits(model), transformers_own(folder))
    with pytest.raises(CheckpointError, match="needs a mask id"):
        load(plain("llama"), family="llada", device="cpu")
    model = load(golden / "dream-tiny", family="wedlm", device="cpu")
    assert type(model.backbone) is Qwen2ForCausalLM
    assert (model.family, model.logit_shift, model.mask_id) == ("wedlm", 0, 3)
    assert model.contract.prompt_rule == "causal"
    assert torch.equal(logits(model), logits(dream))


# What a checkpoint is taken for.

OWN_CODE = {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
NOT_THERE = {
    "Stable-DiffCoder": ("llama", {"architectures": ["StableDiffcoderForCausalLM"]}, "Diffcoder"),
    "code of its own": ("qwen2", OWN_CODE, "modeling.Own"),
    "open-dcoder": ("qwen2", {"mask_token_id": 3}, "mask token"),
    "I-DLM": ("qwen3", {"model_type": "sdar", "use_regular_causal": True}, "use_regular_causal"),
    "DreamReasoner": (
        "qwen3",
        {"model_type": "Dream", "architectures": ["DreamForCausalLM"]},
        "DreamForCausalLM",
    ),
    "LLaDA-MoE": (
        "qwen2",
        {"model_type": "llada", "architectures": ["LLaDAMoEModelLM"], "num_experts": 8},
        "LLaDAMoEModelLM",
    ),
    "Fast-dLLM v2": (
        "qwen2",
        {"model_type": "Fast_dLLM_Qwen", "architectures": ["Fast_dLLM_QwenForCausalLM"]},
        "Fast_dLLM_QwenForCausalLM",
    ),
    "experts": ("qwen3", {"model_type": "sdar", "num_experts": 8}, "num_experts"),
    "a key mistyped": ("qwen3", {"model_type": "sdar", "blok_size": 8}, "did you mean block_size"),
    "a shift": ("qwen2", {"model_type": "wedlm", "logit_shift": 1}, "logit_shift"),
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_a_family_that_is_not_there_is_refused_by_its_own_name(plain, tmp_path, name):
    """It would load as another one without a word. Who names a family loads it all the same."""
    kind, changes, said = NOT_THERE[name]
    folder = relabelled(plain(kind), tmp_path / "model", **changes)
    with pytest.raises(CheckpointError, match=f"{said}.*name the family"):
        describe(folder)
    if changes.get("model_type") in (None, "sdar", "wedlm"):
        family = changes.get("model_type", "causal")
        assert describe(folder, family=family, mask_id=3).family == family


def test_what_is_supposed_is_said_and_overridden(plain, tmp_path):
    folder = tmp_path / "models--JetLM--SDAR-8B-Chat-b32" / "snapshots" / "0123"
    folder.parent.mkdir(parents=True)
    relabelled(plain("qwen3"), folder, model_type="sdar", vocab_size=151936)
    with pytest.warns(SupposedWarning) as caught:
        outline = describe(folder)
    assert (outline.mask_id, outline.contract.block_size) == (151669, 32)
    said = " ".join(str(warning.message) for warning in caught)
    assert "151669, that of published sdar models" in said and "32, from the name" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error", SupposedWarning)
        outline = describe(folder, mask_id=3, end_ids=[4, 5], block_size=8)
    assert (outline.mask_id, outline.end_ids, outline.contract.block_size) == (3, (4, 5), 8)
    model = load("tiny-d2f", mask_id=5, block_size=2, device="cpu")
    assert (model.mask_id, model.contract.block_size) == (5, 2)
    with pytest.raises(CheckpointError, match="mask_id must lie in the vocabulary"):
        load("tiny-d2f", mask_id=10**6)


def test_info_says_what_fits_and_why_not(golden, capsys):
    assert info.main([str(golden / "llada-tiny")]) == 0
    said = capsys.readouterr().out
    for part in (
        "family llada, by model_type llada, architectures ['LLaDAModelLM']",
        "mask 3; ends 2",
        "row p predicts position p; prompt rule bidirectional; block size not given",
        "154,048 parameters: float32 1 MB",
        "decoders: d2f, entropy,",
        "not autoregressive: the decoder autoregressive needs a causal model",
        "objectives: d2f, masked_diffusion",
        "not wedlm: objective wedlm trains the family wedlm, got llada",
    ):
        assert part in said
    assert "tasks" not in said
    assert info.main(["tiny-d2f-long"]) == 0
    assert "has most problems right: story, sudoku\n" in capsys.readouterr().out
    assert info.main(["tiny-d2"]) == 2
    assert "did you mean tiny-d2f" in capsys.readouterr().err


# What this project makes.


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


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2,
    "context_length": 64,
}  # fmt: skip


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
    changes = {"objective": "d2f", "block_size": 8, "noise": (0.2, 0.7), "prompt_rule": "block"}
    save_model(model, tmp_path / "out", dtype=torch.float32, **changes)
    again = load(tmp_path / "out", device="cpu")
    assert (again.contract.noise, again.contract.prompt_rule) == ((0.2, 0.7), "block")
    assert (again.family, again.mask_id, again.end_ids) == (family, model.mask_id, model.end_ids)
    assert again.tokenizer.get_vocab() == word_tokenizer.get_vocab()
    assert torch.equal(logits(again), logits(model))


@pytest.fixture
def with_words(plain, word_tokenizer, tmp_path):
    """with_words(kind): a plain model with a tokenizer."""

    def make(kind):
        folder = relabelled(plain(kind), tmp_path / "model")
        word_tokenizer.save_pretrained(folder)
        return load(folder, device="cpu")

    return make


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_converting_a_causal_model_keeps_its_function(with_words, tmp_path, family):
    """Under causal spans, to fp32 rounding: RoPE base and norm epsilon come along."""
    source = with_words("llama")
    model = convert(source, family)
    assert (model.family, model.mask_id) == (family, source.tokenizer.mask_token_id)
    assert model.logit_shift == (1 if family == "dream" else 0)
    assert close(logits(model), logits(source))
    save_model(model, tmp_path / "out", dtype=torch.float32)
    again = load(tmp_path / "out", device="cpu")
    assert (again.family, again.mask_id) == (family, model.mask_id)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama with biases"])
def test_converting_what_the_target_cannot_hold(llada, plain, with_words, word_tokenizer, kind):
    """Qwen's biases and norms have no place in LLaDA's Llama; biases may be left out."""
    source = with_words(kind)
    with pytest.raises(CheckpointError, match="does not convert to llada"):
        convert(source, "llada")
    if kind == "qwen2":
        weights = source.backbone.state_dict()
        kept = {k: v for k, v in weights.items() if not k.endswith("_proj.bias")}
        model = convert(source, "llada", drop_biases=True)
        made = model.backbone.state_dict()
        assert made.keys() == kept.keys() < weights.keys()
        assert all(torch.equal(made[name], kept[name]) for name in kept)
        with pytest.raises(CheckpointError, match="drop_biases: expected a model with biases"):
            convert(model, "llada", drop_biases=True)
    assert convert(llada, "llada") is llada
    with pytest.raises(CheckpointError, match="needs a tokenizer"):
        convert(load(plain("llama"), device="cpu"), "dream")
    with pytest.raises(CheckpointError, match=r"must be of .*'llada'.* got 'sdar'"):
        build("sdar", word_tokenizer, **SHAPE)
