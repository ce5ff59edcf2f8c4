"""A model saved by `DiffusionModel.save` decodes the same tokens when it is loaded again."""

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
from d2f.models import HERE
from d2f.saving import save_adapter, save_model
from decode import D2F, generate

PROMPT = [5, 9, 4, 31, 7]
D2F_OPTIONS = D2F(block_size=4, max_new_tokens=12)


def tokens(model):
    return generate(model, [PROMPT], D2F_OPTIONS)[0].tokens


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_whole_model(tmp_path, family, dtype):
    random_model(family).save(tmp_path / "start")
    model = d2f.load(tmp_path / "start", dtype=dtype, device="cpu")
    model.contract = dataclasses.replace(model.contract, objective="d2f", block_size=4)
    model.save(tmp_path / "a" / "model")
    assert listing(tmp_path / "a") == ["model"]
    again = d2f.load(tmp_path / "a" / "model", dtype=dtype, device="cpu")
    assert again.contract == model.contract
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    state = again.backbone.state_dict()
    assert all(torch.equal(state[k], v) for k, v in model.backbone.state_dict().items())
    assert tokens(again) == tokens(model)


def adapted(path):
    model = d2f.load(path, device="cpu")
    new_lora(model, r=4, alpha=8, dropout=0.0)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.adapter.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5)
    model.adapter.eval()
    return model


def test_an_adapter_names_its_base_and_loads_on_it_alone(tmp_path):
    random_model("llada").save(tmp_path / "base")
    model = adapted(tmp_path / "base")
    model.save(tmp_path / "adapter")
    assert listing(tmp_path / "adapter") == [
        "adapter_config.json", "adapter_model.safetensors", "d2f_contract.json",
    ]  # fmt: skip
    again = d2f.load(tmp_path / "adapter", device="cpu")
    assert again.adapter is not None
    assert tokens(again) == tokens(model) != tokens(random_model("llada"))


def test_an_official_adapter_gets_the_hash_of_its_base(golden, tmp_path):
    folder = golden / "llada-tiny"
    model = d2f.load(folder, adapter=folder / "adapter", device="cpu")
    model.save(tmp_path / "adapter")
    again = d2f.load(tmp_path / "adapter", device="cpu")
    assert again.contract.base_hash is not None
    assert tokens(again) == tokens(model)


def test_a_merged_model_needs_no_base(tmp_path):
    random_model("dream").save(tmp_path / "base")
    model = adapted(tmp_path / "base")
    model.save(tmp_path / "adapter")
    model = d2f.load(tmp_path / "adapter", device="cpu")
    model.merge_adapter()
    model.save(tmp_path / "merged")
    shutil.rmtree(tmp_path / "base")
    again = d2f.load(tmp_path / "merged", device="cpu")
    assert (again.contract.base, again.contract.base_hash) == (None, None)
    assert tokens(again) == tokens(model)


def test_an_earlier_save_is_replaced(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    random_model("llada").save(place)
    other = fresh_model("llada", seed=7)
    other.save(place)
    assert listing(tmp_path) == ["model"]
    assert tokens(d2f.load(place, device="cpu")) == tokens(other)


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "evaluation.json"])
def test_what_is_not_of_a_save_is_not_removed(tmp_path, name):
    place = tmp_path / "model"
    random_model("llada").save(place)
    (place / name).write_text("mine")
    before = listing(place)
    with pytest.raises(InputError, match=f"holds {name}, which a saved model does not have"):
        fresh_model("llada", seed=7).save(place)
    assert (listing(place), listing(tmp_path)) == (before, ["model"])
    assert tokens(d2f.load(place, device="cpu")) == tokens(random_model("llada"))


def test_a_folder_of_something_else_and_a_file_are_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_text("a")
    with pytest.raises(InputError, match=r"holds a\.png: expected an empty folder"):
        random_model("llada").save(tmp_path / "photos")
    with pytest.raises(InputError, match="expected a folder to save to"):
        random_model("llada").save(tmp_path / "photos" / "a.png")
    shutil.copytree(HERE / "tiny-teacher", tmp_path / "shipped")
    with pytest.raises(InputError, match=r"README\.md, evaluation\.json, which a saved model does"):
        random_model("llada").save(tmp_path / "shipped")
    shutil.rmtree(tmp_path / "shipped")
    assert (listing(tmp_path), listing(tmp_path / "photos")) == (["photos"], ["a.png"])


def test_a_model_takes_the_place_of_one_with_a_tokenizers_code(tmp_path):
    """The file that a model of Qwen2's type has, and others have not, is no stranger's."""
    random_model("dream").save(tmp_path / "model")
    with_code = set(listing(tmp_path / "model"))
    random_model("llada").save(tmp_path / "model")
    assert with_code - set(listing(tmp_path / "model")) == {"tokenization_d2f.py"}


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    place = tmp_path / "model"
    random_model("llada").save(place)

    def full(*args, **options):
        raise error("I/O error: No space left on device")

    monkeypatch.setattr(d2f.saving, "save_model", full)
    with pytest.raises(InputError, match="No space left on device"):
        fresh_model("llada", seed=7).save(place)
    assert listing(tmp_path) == ["model"]
    assert tokens(d2f.load(place, device="cpu")) == tokens(random_model("llada"))


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="meta device has no weights"):
        d2f.load("tiny-teacher", device="meta").save(tmp_path / "a")
    model = fresh_model("llada")
    new_lora(model, r=4, alpha=8, dropout=0.0)
    with pytest.raises(InputError, match="base is in no folder"):
        model.save(tmp_path / "a")
    model = fresh_model("llada")
    model.backbone.quantized = "nf4"
    with pytest.raises(InputError, match="nf4 weights cannot be saved"):
        model.save(tmp_path / "a")
    assert not listing(tmp_path)


def test_repr_says_what_it_is():
    text = repr(d2f.load("tiny-wino-plus-d2f", device="cpu"))
    contract = json.loads((HERE / "tiny-wino-plus-d2f/d2f_contract.json").read_text())
    facts = ["dream in Qwen2ForCausalLM", "float32 on cpu", "objective=d2f", "block_size=4"]
    facts += [f"mask_id={contract['mask_id']}", "adapter", "tiny-teacher", "parameters"]
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
    assert tokens(d2f.load(tmp_path / "parts", device="cpu")) == tokens(model)
    for size in ("much", -1):
        with pytest.raises(InputError, match="max_shard_size must be a number of bytes, or as 5GB"):
            model.save(tmp_path / "none", max_shard_size=size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_config_json_says_in_which_dtype_the_weights_lie(dtype, tmp_path):
    """Other tools read it."""
    save_model(random_model("dream"), tmp_path / "model", dtype=dtype)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["dtype"] == str(dtype).removeprefix("torch.")
    assert values["architectures"] == ["Qwen2ForCausalLM"]


def test_an_adapter_is_saved_to_be_used_and_not_to_be_trained_on(tmp_path):
    model = fresh_model("dream")
    new_lora(model, r=2, alpha=4, dropout=0.1)
    save_adapter(model, tmp_path / "adapter")
    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    assert config.inference_mode is True
    assert (config.r, config.lora_alpha, config.bias, config.task_type) == (2, 4, "none", None)


@pytest.mark.parametrize(("value", "dtype"), [(torch.nan, "float32"), (1e20, "float16")])
def test_weights_that_are_not_finite_as_written_are_refused(tmp_path, value, dtype):
    """What fp32 holds may be infinity in fp16."""
    model = fresh_model("llada")
    with torch.no_grad():
        model.backbone.model.norm.weight[3] = value
    with pytest.raises(CheckpointError, match=f"1 of .* in {dtype}, first model.norm.weight"):
        save_model(model, tmp_path / "model", dtype=getattr(torch, dtype))
    assert not (tmp_path / "model" / "model.safetensors").exists()
