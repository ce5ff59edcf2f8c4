"""python -m distill.convert: an autoregressive checkpoint becomes what a dLLM's training begins
with."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import stock
import torch
from safetensors.torch import load_file
from test_train import settings
from tiny import random_model
from transformers import LlamaConfig, LlamaForCausalLM

import d2f
from d2f import spans
from d2f.convert import convert
from d2f.saving import save_official
from decode import pipeline
from distill import train as training
from distill.convert import main

FITTING = [
    ("llama", "llada"), ("llama", "dream"), ("qwen2", "dream"), ("qwen3", "sdar"),
    ("llama", "wedlm"), ("qwen2", "wedlm"), ("qwen3", "wedlm"),
]  # fmt: skip


def converted(model: Path, family: str, output: Path, *more: str) -> d2f.DiffusionModel:
    assert main(["--model", str(model), "--family", family, "--output", str(output), *more]) == 0
    return d2f.load(output, device="cpu")


def old_logits(model: d2f.DiffusionModel) -> torch.Tensor:
    ids = torch.randint(stock.TOKENS, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model.forward(ids, spans.causal(17))[..., : stock.TOKENS]


@pytest.mark.parametrize("tied, room", [(False, False), (True, True)])
@pytest.mark.parametrize("kind, family", FITTING)
def test_no_logit_of_an_old_token_changes(tmp_path, capsys, kind, family, room, tied):
    """To the bit, with a mask token that needs a new row and with one that has room."""
    rows = stock.TOKENS + 12 * room
    source = stock.checkpoint(tmp_path / "stock", kind, rows=rows, tied=tied)
    model = converted(source, family, tmp_path / "out", "--mask-token", "<|mask|>")
    assert torch.equal(old_logits(model), old_logits(d2f.load(source, device="cpu")))
    grown = -(-(stock.TOKENS + 1) // 64) * 64
    assert model.vocab_size == (rows if room else grown)
    out = capsys.readouterr().out
    assert ("none was added" if room else f"from {rows} to {grown} rows") in out
    contract = model.contract
    assert (contract.family, contract.mask_id) == (family, stock.TOKENS)
    assert contract.end_ids == (2, 0)
    assert contract.objective == "next_token", "nothing was trained bidirectionally"
    assert contract.logit_shift == (family == "dream")
    assert contract.rope_fp32 == (family == "llada")
    rules = {"sdar": "block_causal", "wedlm": "causal"}
    assert contract.prompt_rule == rules.get(family, "bidirectional")
    assert model.tokenizer.mask_token == "<|mask|>"
    assert model.tokenizer("a<|mask|>b").input_ids[1] == model.mask_id
    assert model.tokenizer.chat_template == stock.TEMPLATE
    tensors = model.backbone.get_input_embeddings(), model.backbone.get_output_embeddings()
    assert (tensors[0].weight is tensors[1].weight) == tied


def test_bf16_weights_stay_bf16_and_are_the_same_each_time(tmp_path):
    source = stock.checkpoint(tmp_path / "stock", "llama", dtype=torch.bfloat16)
    for name in ("again", "out"):
        torch.manual_seed(ord(name[0]))
        converted(source, "dream", tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("again", "out")]
    assert files[0] == files[1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    old, new = (d2f.load(p, dtype="bf16", device="cpu") for p in (source, tmp_path / "out"))
    assert torch.equal(old_logits(new), old_logits(old))
    assert len(files[0]) < 2.2 * sum(p.numel() for p in new.backbone.parameters())


@pytest.mark.parametrize("changed", [{"hidden_act": "gelu"}, {"rms_norm_eps": 0.1}])
def test_what_decides_a_forward_comes_along(tmp_path, changed):
    source = stock.checkpoint(tmp_path / "stock", "llama")
    config = json.loads((source / "config.json").read_text())
    plain = old_logits(d2f.load(source, device="cpu"))
    (source / "config.json").write_text(json.dumps(config | changed))
    model = converted(source, "llada", tmp_path / "out")
    assert torch.equal(old_logits(model), old_logits(d2f.load(source, device="cpu")))
    assert not torch.allclose(old_logits(model), plain)


def test_a_conversion_in_memory_keeps_ties_and_says_what_was_trained(tmp_path):
    """As a training does it whose configuration names another family than its init has."""
    source = stock.checkpoint(tmp_path / "stock", "llama", tied=True, mask_token="<|reserved|>")
    model = convert(d2f.load(source, dtype="bf16", device="cpu"), "dream")
    assert model.backbone.lm_head.weight is model.backbone.model.embed_tokens.weight
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    assert (model.contract.objective, model.end_ids) == ("next_token", (2, 0))


def test_a_mask_token_that_is_there_is_taken(tmp_path, capsys):
    own = stock.checkpoint(tmp_path / "own", "qwen2", mask_token="<|reserved|>")
    assert converted(own, "dream", tmp_path / "a").mask_id == 3
    assert "the tokenizer has already" in capsys.readouterr().out
    special = stock.checkpoint(tmp_path / "special", "qwen2")
    # One that is reserved, and neither begins nor ends anything, before a new one.
    assert converted(special, "dream", tmp_path / "d").mask_id == 3
    model = converted(special, "dream", tmp_path / "b", "--mask-token", "<|reserved|>")
    assert (model.mask_id, model.vocab_size) == (3, stock.TOKENS)
    model = converted(special, "dream", tmp_path / "c", "--mask-token", "[M]")
    assert model.tokenizer.convert_ids_to_tokens(model.mask_id) == "[M]"


@pytest.mark.parametrize(
    "kind, given, said",
    [
        ("qwen2", ["--family", "llada"], "llada starts from llama, got qwen2, from which dream"),
        ("qwen3", ["--family", "dream"], "dream starts from qwen2 or llama, got qwen3"),
        ("llama", ["--family", "sdar"], "sdar starts from qwen3, got llama"),
        ("llama", ["--family", "causal"], "must be of a diffusion model, got causal"),
        ("llama", ["--family", "bert"], "--family: got 'bert'; expected one of causal"),
        ("llama", ["--family", "dream", "--mask-token", "<|im_end|>"], "a token of its own"),
        ("llama", ["--family", "dream", "--mask-token", "<|endoftext|>"], "a token of its own"),
        ("llama", ["--family", "dream", "--mask-token", "a"], "ordinary token of the tokenizer"),
    ],
)
def test_what_does_not_fit_is_said_before_weights_are_read(tmp_path, capsys, kind, given, said):
    source = stock.checkpoint(tmp_path / "stock", kind)
    (source / "model.safetensors").write_bytes(b"no weights")
    capsys.readouterr()
    assert main(["--model", str(source), "--output", str(tmp_path / "out"), *given]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert re.search(said, line)
    assert [p.name for p in tmp_path.iterdir()] == ["stock"]


def test_a_diffusion_model_or_no_tokenizer_or_end_token_is_refused(golden, tmp_path, capsys):
    def refused(source: Path, said: str) -> None:
        assert main(["--model", str(source), *given]) == 2
        assert said in capsys.readouterr().err

    given = ["--family", "dream", "--output", str(tmp_path / "out")]
    refused(golden / "llada-tiny", "got a diffusion model of the family llada")
    source = stock.checkpoint(tmp_path / "stock", "llama")
    for file, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        values = json.loads((source / file).read_text())
        (source / file).write_text(json.dumps(values | {key: None}))
    tokenizer = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<|ends|>"))
    refused(source, "expected a token that ends a response")
    for path in source.glob("tokenizer*"):
        path.unlink()
    refused(source, "expected a tokenizer beside the model")


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_output_that_is_there_stays_and_a_failure_leaves_nothing(tmp_path, capsys):
    source = stock.checkpoint(tmp_path / "stock", "llama")
    taken = tmp_path / "taken"
    taken.mkdir()
    given = ["--model", str(source), "--family", "dream", "--output"]
    converted(source, "dream", taken)  # an empty folder is as good as none
    before = {path.name: path.read_bytes() for path in taken.iterdir()}
    assert main([*given, str(taken)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in taken.iterdir()} == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(d2f.Contract, "save", full)  # what is written last
        assert main([*given, str(tmp_path / "new")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert main([*given, str(tmp_path / "new")]) == 2
    assert "damaged or cut short" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stock", "taken"]


def test_a_stock_checkpoint_becomes_a_decoding_student(tmp_path, monkeypatch):
    """By the commands alone: convert, masked diffusion, D2F, decode."""
    source = stock.checkpoint(tmp_path / "stock", "qwen2", tied=True, dtype=torch.bfloat16)
    rows = [{"prompt": f"Say {i}.", "response": f"{i} is said."} for i in range(24)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    init = tmp_path / "start"
    converted(source, "dream", init)
    for objective in ("masked_diffusion", "d2f"):
        config = tmp_path / f"{objective}.yaml"
        values = {
            "objective": objective,
            "init": str(init),
            "output": str(tmp_path / objective),
            "data": {"file": str(data), "row_length": 96, "rows": 2},
            **({"block_size": 4} if objective == "d2f" else {}),
            "steps": 3,
            "tracker": "none",
        }
        config.write_text(json.dumps(values))
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(config)])
        training.main()
        init = tmp_path / objective / "model"
        made = d2f.load(init, device="cpu")
        assert (made.contract.objective, made.mask_id) == (objective, 3)
        assert made.end_ids == (2, 0)
    given = ["--model", str(init), "--prompt", "Say 7.", "--max-new-tokens", "12"]
    assert pipeline.main([*given, "--output", str(tmp_path / "out.jsonl")]) == 0
    header, result = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert '"d2f"' in json.dumps(header)
    assert result["forwards"] > 0


@pytest.mark.parametrize("objective", ["masked_diffusion", "d2f"])
def test_a_finished_run_is_exported_without_training_again(tmp_path, monkeypatch, objective):
    """Merged, in LLaDA's own format, and put on the hub; a run that has not ended has no result."""
    base = tmp_path / "base"
    save_official(random_model("llada"), base, dtype=torch.float32)
    values = json.loads((base / "config.json").read_text())
    auto_map = {"AutoModel": "modeling_llada.LLaDAModelLM"}
    (base / "config.json").write_text(json.dumps(values | {"auto_map": auto_map}))
    (base / "modeling_llada.py").write_text("# its own code")
    run, uploaded = tmp_path / "run", []
    config = settings(run, objective, init=str(base), export_official=True)
    training.train(config, stop_after=1)
    given = ["--model", str(run), "--output"]
    assert main([*given, str(tmp_path / "early")]) == 2
    training.train(config)
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda *_, **how: None)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.upload_folder", lambda _, **how: uploaded.append(how)
    )
    assert main([*given, str(tmp_path / "merged"), "--upload", "me/mine"]) == 0
    assert uploaded == [{"repo_id": "me/mine", "folder_path": tmp_path / "merged"}]
    assert main([*given, str(tmp_path / "official"), "--official"]) == 0
    assert (tmp_path / "official" / "modeling_llada.py").is_file()
    for made, wanted in (("merged", "model"), ("official", "official")):
        ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / made, run / wanted))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        for name in ("config.json", "d2f_contract.json", "README.md"):
            assert (tmp_path / made / name).read_bytes() == (run / wanted / name).read_bytes()
    assert main(["--model", str(run), "--mask-token", "x", "--output", str(tmp_path / "no")]) == 2


def gguf_file(path: Path, architecture: str = "llama") -> LlamaForCausalLM:
    """Write a small Llama with a tokenizer of some words as llama.cpp's files have them."""
    import gguf

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    file = gguf.GGUFWriter(path, architecture)
    file.add_context_length(128)
    file.add_embedding_length(32)
    file.add_block_count(1)
    file.add_feed_forward_length(48)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(64)
    words = [*"abcdefgh", "<|end|>", "ab", *(f"w{i}" for i in range(54))]
    file.add_tokenizer_model("gpt2")
    file.add_token_list(words)
    file.add_token_types([3 if word == "<|end|>" else 1 for word in words])
    file.add_token_merges(["a b"])
    file.add_eos_token_id(8)
    file.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
    }  # fmt: skip
    for name, value in model.state_dict().items():
        for theirs, ours in names.items():
            if theirs in ("model.norm", "lm_head") and not name.startswith(theirs):
                continue
            name = name.replace(theirs, ours)
        for heads, part in ((4, "attn_q."), (2, "attn_k.")):  # llama.cpp turns neighbours
            if part in name:
                value = value.view(heads, 2, 4, 32).transpose(1, 2).reshape(value.shape)
        file.add_tensor(name, value.numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


def test_a_gguf_file_becomes_the_model_that_it_was(tmp_path, capsys):
    want = gguf_file(tmp_path / "small.gguf")
    out = tmp_path / "made"
    assert main(["--model", str(tmp_path / "small.gguf"), "--output", str(out)]) == 0
    assert "family causal, weights in float32" in capsys.readouterr().out
    made = d2f.load(out, device="cpu")
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        torch.testing.assert_close(made.forward(ids, spans.causal(9)), want(ids).logits)
    assert made.end_ids == (8,) and made.tokenizer.chat_template


def test_what_a_gguf_file_cannot_be_is_said(tmp_path, capsys):
    file = tmp_path / "small.gguf"
    assert main(["--model", str(file), "--output", str(tmp_path / "a")]) == 2
    assert "no such file" in capsys.readouterr().err
    gguf_file(file, "nonsuch")
    assert main(["--model", str(file), "--output", str(tmp_path / "a")]) == 2
    assert "nonsuch" in capsys.readouterr().err and not (tmp_path / "a").exists()
    assert main(["--model", str(file), "--output", str(tmp_path / "a"), "--family", "llada"]) == 2
    assert "converted by itself" in capsys.readouterr().err
