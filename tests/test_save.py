"""A saved model decodes the same tokens when it is loaded again; in the family's own format it is
what the published checkpoints look like, read back to the last bit."""

import dataclasses
import json
import shutil

import pytest
import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import fresh_model, random_model

import d2f
import d2f.saving
from d2f.adapters import new_lora
from d2f.errors import CheckpointError, InputError
from d2f.families import get_family
from d2f.models import HERE
from d2f.saving import save_model, save_official
from d2f.spans import bidirectional
from decode import D2F, generate
from distill.config import parse_config
from distill.export import curve
from distill.train import train

PROMPT = [5, 9, 4, 31, 7]
D2F_OPTIONS = D2F(block_size=4, max_new_tokens=12)


def tokens(model):
    return generate(model, [PROMPT], D2F_OPTIONS)[0].tokens


def logits(model):
    ids = torch.tensor([[5, 9, 4, 31, 7, 2, 2, 18, 30, 6, 11]])
    with torch.inference_mode():
        return model.forward(ids, bidirectional(ids.shape[1]))


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def raw(folder):
    return json.loads((folder / "config.json").read_text())


def read(folder):
    return d2f.load(folder, device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_model(tmp_path, dtype):
    random_model("dream").save(tmp_path / "start")
    model = d2f.load(tmp_path / "start", dtype=dtype, device="cpu")
    model.contract = dataclasses.replace(model.contract, objective="d2f", block_size=4)
    model.save(tmp_path / "a" / "model")
    assert listing(tmp_path / "a") == ["model"]
    values = raw(tmp_path / "a/model")  # other tools read it
    assert (values["dtype"], values["architectures"]) == (dtype, ["Qwen2ForCausalLM"])
    again = d2f.load(tmp_path / "a" / "model", dtype=dtype, device="cpu")
    assert again.contract == model.contract
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    state = again.backbone.state_dict()
    assert all(torch.equal(state[k], v) for k, v in model.backbone.state_dict().items())
    assert tokens(again) == tokens(model)


def test_an_adapter_names_its_base_and_loads_on_it_alone_until_it_is_merged(tmp_path):
    random_model("llada").save(tmp_path / "base")
    model = read(tmp_path / "base")
    new_lora(model, r=4, alpha=8, dropout=0.1)
    torch.manual_seed(1)
    for name, parameter in model.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.adapter.eval()
    model.save(tmp_path / "adapter")
    assert listing(tmp_path / "adapter") == [
        "adapter_config.json", "adapter_model.safetensors", "d2f_contract.json",
    ]  # fmt: skip
    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    assert config.inference_mode is True, "to be used and not to be trained on"
    assert (config.r, config.lora_alpha, config.bias, config.task_type) == (4, 8, "none", None)
    again = read(tmp_path / "adapter")
    assert again.adapter is not None
    assert tokens(again) == tokens(model) != tokens(random_model("llada"))
    again.merge_adapter()
    again.save(tmp_path / "merged")
    shutil.rmtree(tmp_path / "base")
    alone = read(tmp_path / "merged")
    assert (alone.contract.base, alone.contract.base_hash) == (None, None)
    assert tokens(alone) == tokens(again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_adapter_is_merged_as_it_is_written(golden, tmp_path, dtype):
    folder = golden / "llada-tiny"
    model = d2f.load(folder, adapter=folder / "adapter", device="cpu")
    for name in ("written", "merged"):
        save_model(model, tmp_path / name, dtype=dtype)
        save_official(model, tmp_path / f"{name} officially", dtype=dtype)
        assert (model.adapter is None) == (name == "merged")
        model.merge_adapter()
    for kind in ("", " officially"):
        one, other = (tmp_path / f"{name}{kind}" for name in ("written", "merged"))
        assert listing(one) == listing(other)
        assert all((other / f.name).read_bytes() == f.read_bytes() for f in one.iterdir())


def test_only_an_earlier_save_is_replaced(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    random_model("dream").save(place)  # with a file of code, which llada's has not
    random_model("llada").save(place)
    assert listing(tmp_path) == ["model"]
    assert tokens(read(place)) == tokens(random_model("llada"))
    (place / "notes.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_text("a")
    shutil.copytree(HERE / "tiny-teacher", tmp_path / "shipped")
    before = [listing(folder) for folder in tmp_path.iterdir()]
    for name, said in (
        ("model", "notes.txt, which a saved model does not have"),
        ("photos", "a.png, which a saved model does not have"),
        ("photos/a.png", "expected a folder to save to"),
        ("shipped", "README.md, evaluation.json, which a saved model does"),
    ):
        with pytest.raises(InputError, match=said):
            fresh_model("llada", seed=7).save(tmp_path / name)
    assert [listing(folder) for folder in tmp_path.iterdir()] == before


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    place = tmp_path / "model"
    random_model("llada").save(place)

    def full(*args, **options):
        raise error("I/O error: No space left on device")

    monkeypatch.setattr(d2f.saving, "save_file", full)
    with pytest.raises(InputError, match="No space left on device"):
        fresh_model("llada", seed=7).save(place)
    assert listing(tmp_path) == ["model"]
    assert tokens(read(place)) == tokens(random_model("llada"))


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="meta device has no weights"):
        d2f.load("tiny-teacher", device="meta").save(tmp_path / "a")
    model = fresh_model("llada")
    new_lora(model, r=4, alpha=8, dropout=0.0)
    with pytest.raises(InputError, match="base is in no folder"):
        model.save(tmp_path / "a")
    model = fresh_model("llada")
    for size in ("much", -1):
        with pytest.raises(InputError, match="max_shard_size must be a number of bytes, or as 5GB"):
            model.save(tmp_path / "a", max_shard_size=size)
    model.backbone.quantized = "nf4"
    with pytest.raises(InputError, match="nf4 weights cannot be saved"):
        model.save(tmp_path / "a")
    assert not listing(tmp_path)


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, "float32"), (1e20, "float16")])
def test_weights_that_are_not_finite_as_written_are_refused(tmp_path, value, dtype):
    """What fp32 holds may be infinity in fp16."""
    model = fresh_model("llada")
    with torch.no_grad():
        model.backbone.model.norm.weight[3] = value
    with pytest.raises(CheckpointError, match=f"1 of .* in {dtype}, first model.norm.weight"):
        save_model(model, tmp_path / "model", dtype=getattr(torch, dtype))
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_repr_says_what_it_is():
    text = repr(d2f.load("tiny-wino-plus-d2f", device="cpu"))
    facts = ["dream in Qwen2ForCausalLM", "float32 on cpu", "objective=d2f", "block_size=4"]
    facts += ["mask_id=1", "adapter", "tiny-teacher", "parameters"]
    assert all(fact in text for fact in facts), text
    assert "in memory" in repr(random_model("llada"))


def test_a_model_in_several_files_is_the_same_model(tmp_path):
    model = random_model("llada")
    model.save(tmp_path / "whole")
    model.save(tmp_path / "parts", max_shard_size="20KB")
    names = sorted(path.name for path in (tmp_path / "parts").glob("model*.safetensors"))
    assert len(names) > 3 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    held = {}
    for name in names:
        tensors = load_file(tmp_path / "parts" / name)
        # A tensor larger than that has a file of its own.
        assert (tmp_path / "parts" / name).stat().st_size < 25_000 or len(tensors) == 1
        held |= tensors
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], value) for name, value in expected.items())
    assert tokens(read(tmp_path / "parts")) == tokens(model)


# The family's own format.


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_an_official_checkpoint_is_written_as_it_was(golden, family, tmp_path, request):
    """Every weight under its own name, every field of the configuration."""
    model, out = request.getfixturevalue(family), tmp_path / "out"
    save_official(model, out, dtype=torch.float32)
    source = golden / f"{family}-tiny"
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert raw(out) == raw(source)
    (out / "d2f_contract.json").unlink()  # as an official checkpoint has none
    assert torch.equal(logits(read(out)), logits(model))


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_this_project_is_written_in_the_official_format(golden, family, dtype, tmp_path):
    """From transformers' format: the fields that the published configuration has, and the logits
    of the same weights to the bit."""
    model, out = random_model(family), tmp_path / "out"
    save_model(model, tmp_path / "native", dtype=dtype, objective="d2f", block_size=4)
    native = read(tmp_path / "native")
    save_official(native, out, dtype=dtype)
    assert torch.equal(logits(read(out)), logits(native))
    assert read(out).contract == native.contract
    published, made = raw(golden / f"{family}-tiny"), raw(out)
    unsaid = {k for k, v in published.items() if v is None} | {"transformers_version"}
    assert published.keys() - unsaid <= made.keys() | {
        "alibi_bias_max", "attention_layer_norm_with_affine", "mlp_ratio",
    }  # fmt: skip
    # What the published fields say, but for the sizes of this model and how it is loaded.
    sizes = {k for k, v in published.items() if type(v) is int and k != "block_group_size"}
    loaded = {"rope_theta", "rms_norm_eps", "torch_dtype", "mask_token_id"}
    same = published.keys() & made.keys() - sizes - loaded
    assert {k: made[k] for k in same} == {k: published[k] for k in same}
    assert made["mask_token_id"] == model.mask_id
    (out / "d2f_contract.json").unlink()
    assert read(out).family == family


def test_the_bases_own_code_comes_along(golden, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(golden / "llada-tiny", base)
    values = raw(base) | {"auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"}}
    (base / "config.json").write_text(json.dumps(values))
    model = read(base)
    save_official(model, tmp_path / "without", dtype=torch.float32)
    assert "auto_map" not in raw(tmp_path / "without"), "it would name files that are not there"
    (base / "configuration_llada.py").write_text("# the family's\n")
    save_official(model, tmp_path / "with", dtype=torch.float32)
    assert raw(tmp_path / "with")["auto_map"] == values["auto_map"]
    assert (tmp_path / "with" / "configuration_llada.py").read_text() == "# the family's\n"


def test_what_the_format_cannot_say_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="has no name for this weight"):
        get_family("llada").official_name("model.layers.0.self_attn.q_norm.weight")
    scaling = {"rope_type": "linear", "factor": 2.0}
    models = {family: fresh_model(family) for family in ("llada", "dream")}
    for model in models.values():
        model.backbone.config.rope_parameters = scaling | {"rope_theta": 10000.0}
    with pytest.raises(CheckpointError, match=r"cannot say .* rope_parameters"):
        save_official(models["llada"], tmp_path / "a", dtype=torch.float32)
    with pytest.raises(CheckpointError, match="known for dream and llada, got the family wedlm"):
        save_official(random_model("wedlm"), tmp_path / "b", dtype=torch.float32)
    assert not list(tmp_path.iterdir())
    save_official(models["dream"], tmp_path, dtype=torch.float32)
    assert (raw(tmp_path)["rope_scaling"], raw(tmp_path)["rope_theta"]) == (scaling, 10000.0)


# What a training run exports.


def settings(output, **changes):
    values = {
        "objective": "d2f",
        "output": str(output),
        "block_size": 8,
        "data": {"tasks": {"countdown": 1.0}, "row_length": 80, "rows": 2},
        "optimizer": {"lr": 0.01, "warmup": 0},
        "steps": 3,
        "log_every": 1,
        "tracker": "none",
        "export_official": True,
    }
    return parse_config(values | changes, "test")


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_run_exports_the_merged_model_officially_and_a_card(tmp_path, family):
    base, run = tmp_path / "base", tmp_path / "run"
    save_model(random_model(family), base, dtype=torch.float32)
    train(settings(run, init=str(base)))
    merged, official = read(run / "model"), read(run / "official")
    assert raw(run / "official")["model_type"] in ("llada", "Dream")
    assert torch.equal(logits(official), logits(merged))
    assert official.contract == merged.contract
    assert not torch.equal(logits(official), logits(read(base)))
    lines = [json.loads(line) for line in (run / "log.jsonl").open()]
    (card,) = {(run / name / "README.md").read_text() for name in ("model", "adapter", "official")}
    points = [f"| {line['step']} | {line['loss']:.4f} |" for line in lines]
    assert "\n".join(["| step | loss |", "|---|---|", *points]) in card
    assert "`d2f train --config config.yaml`" in card
    assert (run / "config.yaml").read_text().strip() in card


def test_an_official_export_of_another_family_is_refused_before_training(tmp_path):
    base = tmp_path / "base"
    save_model(random_model("causal"), base, dtype=torch.float32)
    changes = {"objective": "next_token", "init": str(base), "block_size": 16}
    with pytest.raises(CheckpointError, match="known for dream and llada, got the family causal"):
        train(settings(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_curve_has_every_logged_step_and_evaluation():
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 101)]
    lines[41] |= {"evaluation/accuracy": 0.5, "evaluation/tokens_per_forward": 2.25}
    table = curve(lines)
    assert table[:2] == ["| step | loss | accuracy | tokens per forward |", "|---|---|---|---|"]
    assert table[2] == "| 1 | 1.0000 |  |  |" and table[-1] == "| 100 | 0.0100 |  |  |"
    assert "| 42 | 0.0238 | 0.500 | 2.250 |" in table and len(table) == 2 + 100
