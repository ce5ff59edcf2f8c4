"""What an adapter_config.json says and this project does not carry out is refused by name."""

import dataclasses
import json
import shutil

import pytest
from peft import LoraConfig

from d2f.adapters import _FREE, AdapterConfig, attach, read_adapter_config
from d2f.errors import CheckpointError
from d2f.loading import load


@pytest.fixture
def adapter(golden, tmp_path):
    """adapter(**changes): the golden adapter with a changed configuration."""

    def make(**changes):
        folder = shutil.copytree(golden / "llada-tiny/adapter", tmp_path / "adapter")
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return make


def refused(folder, *texts):
    with pytest.raises(CheckpointError) as caught:
        read_adapter_config(folder)
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_replication", [[0, 2], [1, 3]]),
        ("lora_bias", True),
        ("use_qalora", True),
        ("layers_to_transform", [0, 1]),
        ("layers_to_transform", 1),
        ("layers_to_transform", 0),
        ("trainable_token_indices", [5]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("exclude_modules", ["q_proj"]),
        ("exclude_modules", "lm_head"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("bias", "lora_only"),
        ("fan_in_fan_out", True),
        ("megatron_config", {"a": 1}),
        ("loftq_config", {"loftq_bits": 4}),
        ("corda_config", {"a": 1}),
        ("lora_ga_config", {"a": 1}),
        ("arrow_config", {"a": 1}),
        ("alora_invocation_tokens", [1, 2]),
        ("use_bdlora", {"a": 1}),
        ("kasa_config", {"a": 1}),
        ("something_of_a_later_peft", "on"),
    ],
)
def test_what_is_not_carried_out(adapter, name, value):
    refused(adapter(**{name: value}), f"{name} is not supported: expected it absent", repr(value))


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "mica", 1, 0]
)
def test_a_start_that_changes_the_base(adapter, start):
    refused(adapter(init_lora_weights=start), "init_lora_weights must be one of", repr(start))


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_a_start_that_does_not(adapter, start):
    assert read_adapter_config(adapter(init_lora_weights=start)).r == 4


def test_what_peft_writes_of_a_plain_adapter_is_read(tmp_path):
    """Every field of the installed PEFT's LoraConfig at its default; and each is either free or
    refused as soon as it says something."""
    LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).save_pretrained(tmp_path)
    assert read_adapter_config(tmp_path).targets == ("q_proj",)
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    fields = {f.name for f in dataclasses.fields(LoraConfig)}
    for name in sorted((fields | set(values)) - _FREE):
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps(values | {name: {"a": 1}}))
        refused(tmp_path, "DoRA" if name == "use_dora" else name)


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"r": 4.5}, ["r must be a whole number of at least 1, got 4.5"]),
        ({"r": True}, ["r must be", "True"]),
        ({"r": "4"}, ["r must be", "'4'"]),
        ({"r": 2**53}, ["r must be"]),  # a float could not tell it from the next
        ({"r": 10**400}, ["r must be"]),
        ({"lora_alpha": 0}, ["lora_alpha must be a positive number, got 0"]),
        ({"lora_alpha": 10**400}, ["lora_alpha must be"]),
        ({"lora_dropout": 2.0}, ["lora_dropout must be a number in [0, 1), got 2.0"]),
        ({"lora_dropout": 1}, ["lora_dropout must be"]),
        ({"lora_dropout": -0.1}, ["lora_dropout must be"]),
        ({"lora_dropout": "0.1"}, ["lora_dropout must be"]),
        ({"use_rslora": "yes"}, ["use_rslora must be true or false, got 'yes'"]),
        ({"target_modules": [["q_proj"]]}, ["expected a list of target_modules"]),
        ({"target_modules": ["q_proj", 3]}, ["expected a list of target_modules"]),
        ({"auto_mapping": [1]}, ["auto_mapping must be an object"]),
    ],
)
def test_values_that_are_none(adapter, changes, texts):
    refused(adapter(**changes), *texts)


def test_the_least_that_a_file_may_say(tmp_path):
    """What it leaves out is as PEFT has it: no dropout, no class of the base."""
    least = {"peft_type": "LORA", "r": 1, "lora_alpha": 0.5, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(least))
    expected = AdapterConfig(1, 0.5, 0.0, False, ("q_proj",), base=None, base_class="")
    assert read_adapter_config(tmp_path) == expected


def test_a_rank_that_is_whole_as_a_number_with_a_point(golden, adapter):
    """Some tools write 4.0."""
    model = load(golden / "llada-tiny", adapter=adapter(r=4.0), device="cpu")
    assert model.adapter.peft_config["default"].r == 4


@pytest.mark.parametrize("r", [10**6, 10**12])
def test_a_rank_that_the_file_does_not_have_is_not_allocated(golden, adapter, r, monkeypatch):
    def never(*arguments, **options):
        raise AssertionError("the adapter was built before its file was looked at")

    monkeypatch.setattr("peft.PeftModel.__init__", never)
    base = load(golden / "llada-tiny", device="cpu")
    with pytest.raises(CheckpointError, match=rf"expected shape \[{r}, 64\], got \[4, 64\]"):
        attach(base, str(adapter(r=r)))


@pytest.mark.parametrize(
    "target", ["", "0", "layers", "self_attn", "model", "embed_tokens", "norm", ".*", "rotary_emb"]
)
def test_targets_that_are_no_linear_layers(golden, adapter, target):
    base = load(golden / "llada-tiny", device="cpu")
    with pytest.raises(CheckpointError) as caught:
        attach(base, str(adapter(target_modules=["q_proj", target])))
    assert f"targets [{target!r}]" in str(caught.value) and "'o_proj'" in str(caught.value)
    assert base.adapter is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask_id": 95}, "the adapter's mask id is 95, this base's is 3"),
        ({"mask_id": 9600}, r"mask_id must lie in the vocabulary \[0, 96\), got 9600"),
        ({"end_ids": (9600,)}, "end_ids must lie in the vocabulary"),
        ({"logit_shift": 1}, "logit_shift must be 0 in the family llada"),
    ],
)
def test_a_contract_that_the_base_contradicts(golden, adapter, llada, changes, text):
    folder = adapter()
    dataclasses.replace(llada.contract, **changes).save(folder)
    with pytest.raises(CheckpointError, match=text):
        load(golden / "llada-tiny", adapter=folder, device="cpu")
