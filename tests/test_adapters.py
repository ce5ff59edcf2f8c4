"""Adapters: new, saved, loaded again, and refused where they do not belong."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from d2f import spans as sp
from d2f.adapters import ATTENTION, attach, fingerprint, new_lora, save_adapter
from d2f.errors import CheckpointError
from d2f.loading import load

IDS = torch.arange(4, 20)[None]
SPANS = sp.block_causal(16, 5, 4)


def logits(model):
    with torch.inference_mode():
        return model.forward(IDS, SPANS)


def trained(model, seed=0):
    """Give a fresh LoRA an effect."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.adapter.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)


@pytest.fixture
def base(golden):
    return load(golden / "llada-tiny", device="cpu")


def test_a_new_lora_changes_nothing_and_trains_only_itself(base):
    before = logits(base)
    new_lora(base, r=4, alpha=8, dropout=0.5)
    base.adapter.eval()
    assert torch.equal(logits(base), before)
    learning = [name for name, p in base.adapter.named_parameters() if p.requires_grad]
    assert len(learning) == 3 * len(ATTENTION) * 2
    assert all(".lora_" in name for name in learning)


def test_a_saved_adapter_loads_with_the_same_logits_and_contract(base, golden, tmp_path):
    """To the bit; with the base's fingerprint, on the base in any dtype."""
    new_lora(base, r=4, alpha=6, dropout=0.1, targets=["q_proj", "down_proj"])
    trained(base)
    base.adapter.eval()
    base.contract = dataclasses.replace(
        base.contract,
        objective="d2f",
        block_size=8,
        noise=(0.2, 0.7),
        prompt_rule="block",
        base="llada-tiny",
        base_hash=fingerprint(base.path),
    )
    save_adapter(base, tmp_path / "adapter")
    again = load(golden / "llada-tiny", adapter=tmp_path / "adapter", device="cpu")
    assert torch.equal(logits(again), logits(base))
    assert again.contract == base.contract
    assert not any(p.requires_grad for p in again.adapter.parameters())
    short = load(golden / "llada-tiny", adapter=tmp_path / "adapter", dtype="bf16", device="cpu")
    assert short.contract == base.contract


def test_an_adapter_alone_names_its_base_where_that_is_not_at_hand(base, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    new_lora(base, r=4, alpha=6, dropout=0.0)
    base.contract = dataclasses.replace(base.contract, base="LLaDA-8B-Instruct")
    save_adapter(base, tmp_path)
    with pytest.raises(CheckpointError, match=r"an adapter of LLaDA-8B-Instruct, which is not at"):
        load(tmp_path)


def test_an_adapter_alone_is_loaded_on_the_base_that_it_names(base, golden, tmp_path):
    new_lora(base, r=4, alpha=6, dropout=0.0)
    trained(base)
    base.adapter.eval()
    place = tmp_path / "adapter"
    base.contract = dataclasses.replace(
        base.contract, base=str(golden / "llada-tiny"), base_hash=fingerprint(base.path)
    )
    save_adapter(base, place)
    again = load(place, device="cpu")
    assert torch.equal(logits(again), logits(base))
    assert again.contract == base.contract
    with pytest.raises(CheckpointError, match="is an adapter: expected a model for"):
        load(place, adapter=place)


@pytest.mark.parametrize("name", [None, "", 3])
def test_an_adapter_alone_that_names_no_base_is_refused(base, tmp_path, name):
    new_lora(base, r=4, alpha=6, dropout=0.0)
    save_adapter(base, tmp_path)
    path = tmp_path / "adapter_config.json"
    values = json.loads(path.read_text()) | {"base_model_name_or_path": name}
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="names no base: give the base as model"):
        load(tmp_path)


def test_an_rslora_adapter_keeps_its_scale_when_saved_again(base, golden, tmp_path):
    """alpha / sqrt(r), not alpha / r."""
    folder = official_copy(golden, tmp_path / "rs", use_rslora=True)
    attach(base, str(folder))
    save_adapter(base, tmp_path / "again")
    again = load(golden / "llada-tiny", adapter=tmp_path / "again", device="cpu")
    plain = load(golden / "llada-tiny", adapter=golden / "llada-tiny/adapter", device="cpu")
    assert torch.equal(logits(again), logits(base))
    assert not torch.equal(logits(again), logits(plain))


@pytest.mark.parametrize("kind", ["plain", "peft's .default. names"])
def test_names_of_the_official_file(base, golden, tmp_path, kind):
    folder = official_copy(golden, tmp_path / "adapter")
    if kind != "plain":
        weights = load_file(folder / "adapter_model.safetensors")
        renamed = {k.replace(".weight", ".default.weight"): v for k, v in weights.items()}
        save_file(renamed, folder / "adapter_model.safetensors")
    attach(base, str(folder))
    want = load(golden / "llada-tiny", adapter=golden / "llada-tiny/adapter", device="cpu")
    assert torch.equal(logits(base), logits(want))


def official_copy(golden, folder, family="llada", **changes):
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(golden / f"{family}-tiny/adapter" / name, folder / name)
    values = json.loads((folder / "adapter_config.json").read_text()) | changes
    values = {name: value for name, value in values.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def refused(model, folder, *patterns):
    """The error says what came, and the base is left as it was."""
    before = logits(model)
    with pytest.raises(CheckpointError) as caught:
        attach(model, str(folder))
    for pattern in patterns:
        assert pattern in str(caught.value)
    assert model.adapter is None
    assert torch.equal(logits(model), before)
    assert not [name for name, _ in model.backbone.named_parameters() if "lora" in name]


def edit(folder, change):
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")


KEY = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"


def test_another_shape(base, golden, tmp_path):
    folder = official_copy(golden, tmp_path / "adapter")
    edit(folder, lambda weights: weights.__setitem__(KEY, torch.zeros(4, 48)))
    refused(base, folder, "q_proj.lora_A", "expected shape [4, 64], got [4, 48]")


def test_another_rank_than_its_config_says(base, golden, tmp_path):
    folder = official_copy(golden, tmp_path / "adapter", r=8)
    refused(base, folder, "expected shape [8, 64], got [4, 64]")


def test_a_weight_missing(base, golden, tmp_path):
    folder = official_copy(golden, tmp_path / "adapter")
    edit(folder, lambda weights: weights.pop(KEY))
    refused(base, folder, "1 missing", "layers.0.self_attn.q_proj.lora_A.weight")


def test_a_weight_too_many(base, golden, tmp_path):
    folder = official_copy(golden, tmp_path / "adapter")
    key = KEY.replace("blocks.0", "blocks.3")
    edit(folder, lambda weights: weights.__setitem__(key, torch.zeros(4, 64)))
    refused(base, folder, "1 unexpected", "layers.3")


def test_other_target_modules(base, golden, tmp_path):
    folder = official_copy(golden, tmp_path / "adapter", target_modules=["c_attn", "q_proj"])
    refused(base, folder, "targets ['c_attn']", "expected some of", "o_proj")


@pytest.mark.parametrize(
    ("targets", "problem"),
    [
        (["q_proj"], "unexpected"),
        (["q_proj", "k_proj", "v_proj", "attn_out", "up_proj"], "missing"),
    ],
)
def test_targets_that_its_weights_do_not_match(base, golden, tmp_path, targets, problem):
    """Fewer or more modules than the file has weights for."""
    folder = official_copy(golden, tmp_path / "adapter", target_modules=targets)
    refused(base, folder, problem)


def test_the_ambiguous_name_ff_out_does_not_reach_the_head(base, golden, tmp_path):
    """LLaDA calls both the down projection and the head ff_out."""
    folder = official_copy(golden, tmp_path / "adapter", target_modules=["ff_out"])
    refused(base, folder, "targets ['ff_out'], which this base does not have")


@pytest.mark.parametrize("value", [..., None, [], "all-linear", {"a": 1}])
def test_target_modules_not_a_list(base, golden, tmp_path, value):
    folder = official_copy(golden, tmp_path / "adapter", target_modules=value)
    refused(base, folder, "expected a list of target_modules")


def test_an_adapter_of_another_family(base, golden):
    """Dream's adapter on LLaDA: same module names, so only the family tells."""
    refused(base, golden / "dream-tiny/adapter", "made for the family dream", "this base is llada")


def test_an_adapter_whose_contract_is_of_another_family(base, dream, golden, tmp_path):
    folder = official_copy(golden, tmp_path / "adapter", auto_mapping=None)
    dream.contract.save(folder)
    refused(base, folder, "made for the family dream", "this base is llada")


def test_an_adapter_of_other_weights_of_the_same_shape(base, golden, tmp_path):
    """The wrong base that users of the reference code loaded without a word."""
    other = tmp_path / "other"
    shutil.copytree(golden / "llada-tiny", other)
    weights = load_file(other / "model.safetensors")
    weights["model.transformer.ln_f.weight"][0] += 1.0
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    folder = official_copy(golden, tmp_path / "adapter")
    hash_ = fingerprint(base.path)
    dataclasses.replace(base.contract, base="llada-tiny", base_hash=hash_).save(folder)

    attach(base, str(folder))
    refused(
        load(other, device="cpu"),
        folder,
        "belongs to the base llada-tiny",
        hash_[:12],
        fingerprint(str(other))[:12],
    )


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_a_weight_file_cut_short(base, golden, tmp_path, keep):
    folder = official_copy(golden, tmp_path / "adapter")
    content = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(content[: int(keep * len(content))])
    refused(base, folder, "adapter_model.safetensors is damaged or cut short")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_missing(base, golden, tmp_path, name):
    folder = official_copy(golden, tmp_path / "adapter")
    (folder / name).unlink()
    refused(base, folder, f"expected an adapter with a {name}")


@pytest.mark.parametrize("text", ["{", "[]", "null", '"LORA"'])
def test_a_config_that_is_not_a_json_object(base, golden, tmp_path, text):
    folder = official_copy(golden, tmp_path / "adapter")
    (folder / "adapter_config.json").write_text(text)
    refused(base, folder, "adapter_config.json")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"peft_type": "IA3"}, "expected a LORA adapter, got 'IA3'"),
        ({"use_dora": True}, "got 'DoRA'"),
        ({"r": ...}, "r must be"),
        ({"r": 0}, "r must be"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ],
)
def test_a_kind_of_adapter_that_would_load_as_something_else(
    base, golden, tmp_path, changes, problem
):
    """What this loader does not carry out is refused, not ignored."""
    refused(base, official_copy(golden, tmp_path / "adapter", **changes), problem)


def test_a_second_adapter_is_refused(base, golden):
    """Two LoRAs, one inside the other, would be neither."""
    attach(base, str(golden / "llada-tiny/adapter"))
    before = logits(base)
    with pytest.raises(CheckpointError, match="already has an adapter"):
        attach(base, str(golden / "llada-tiny/adapter"))
    assert torch.equal(logits(base), before)


def test_a_name_that_exists_nowhere(base):
    refused(base, "nobody/no-such-adapter", "nobody/no-such-adapter: no such folder or hub name")


def test_load_says_the_same(golden):
    with pytest.raises(CheckpointError, match="made for the family dream"):
        load(golden / "llada-tiny", adapter=golden / "dream-tiny/adapter", device="cpu")
