"""Adapters: new, saved, loaded again, and refused where they do not belong."""

import dataclasses
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from d2f import spans as sp
from d2f.adapters import ATTENTION, attach, new_lora
from d2f.checkpoint import base_name, fingerprint
from d2f.errors import CheckpointError, UnverifiedBaseWarning
from d2f.loading import load
from d2f.models import HERE
from d2f.saving import save_adapter

IDS = torch.arange(4, 20)[None]
SPANS = sp.block_causal(16, 5, 4)
INSTRUCT = "GSAI-ML/LLaDA-8B-Instruct"
WEIGHTS = "adapter_model.safetensors"


def logits(model):
    with torch.inference_mode():
        return model.forward(IDS, SPANS)


@pytest.fixture
def base(golden):
    return load(golden / "llada-tiny", device="cpu")


@pytest.fixture
def adapted(base):
    """The base with a LoRA that has an effect."""
    new_lora(base, r=4, alpha=6, dropout=0.1, targets=["q_proj", "down_proj"])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in base.adapter.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    base.adapter.eval()
    return base


@pytest.fixture
def official(golden, tmp_path):
    """official(**changes): the golden LLaDA adapter with a changed configuration."""

    def make(**changes):
        folder = shutil.copytree(golden / "llada-tiny/adapter", tmp_path / "adapter")
        path = folder / "adapter_config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
        return folder

    return make


def edit(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def test_a_new_lora_changes_nothing_and_trains_only_itself(base):
    before = logits(base)
    new_lora(base, r=4, alpha=8, dropout=0.5)
    base.adapter.eval()
    assert torch.equal(logits(base), before)
    learning = [name for name, p in base.adapter.named_parameters() if p.requires_grad]
    assert len(learning) == 3 * len(ATTENTION) * 2
    assert all(".lora_" in name for name in learning)


def test_a_saved_adapter_loads_with_the_same_logits_and_contract(adapted, golden, tmp_path):
    """To the bit; with the base's fingerprint, on the base in any dtype, named or alone."""
    adapted.contract = dataclasses.replace(
        adapted.contract,
        objective="d2f",
        block_size=8,
        noise=(0.2, 0.7),
        prompt_rule="block",
        base=str(golden / "llada-tiny"),
        base_hash=fingerprint(adapted.path),
    )
    place = tmp_path / "adapter"
    save_adapter(adapted, place)
    for again in (load(golden / "llada-tiny", adapter=place, device="cpu"), load(place)):
        assert torch.equal(logits(again), logits(adapted))
        assert again.contract == adapted.contract
        assert not any(p.requires_grad for p in again.adapter.parameters())
    short = load(golden / "llada-tiny", adapter=place, dtype="bf16", device="cpu")
    assert short.contract == adapted.contract
    with pytest.raises(CheckpointError, match="is an adapter: expected a model for"):
        load(place, adapter=place)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("LLaDA-8B-Instruct", "an adapter of LLaDA-8B-Instruct, which is not at hand"),
        (None, "names no base: give the base as model"),
    ],
)
def test_an_adapter_alone_whose_base_is_not_there(adapted, tmp_path, monkeypatch, name, problem):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    adapted.contract = dataclasses.replace(adapted.contract, base=name)
    save_adapter(adapted, tmp_path)
    with pytest.raises(CheckpointError, match=problem):
        load(tmp_path)


def test_names_of_the_official_file(base, golden, official):
    """PEFT's name of the adapter in memory is in some files."""
    folder = official()
    weights = load_file(folder / WEIGHTS)
    save_file({k.replace(".weight", ".default.weight"): v for k, v in weights.items()},
              folder / WEIGHTS)  # fmt: skip
    attach(base, str(folder))
    want = load(golden / "llada-tiny", adapter=golden / "llada-tiny/adapter", device="cpu")
    assert torch.equal(logits(base), logits(want))


def test_settings_in_the_names_of_the_official_code(base, official):
    """LLaDA calls o_proj attn_out, and both the down projection and the head ff_out."""
    folder = official(
        r=4, lora_alpha=8, target_modules=r".*\.blocks\.[12]\.(attn_out|ff_out)",
        rank_pattern={"ff_out": 2}, alpha_pattern={"blocks.2.ff_out": 6},
        modules_to_save=["wte"], exclude_modules=["blocks.1.attn_out"],
    )  # fmt: skip
    scales = {"1.mlp.down_proj": 4, "2.mlp.down_proj": 3, "2.self_attn.o_proj": 2}
    torch.manual_seed(0)
    weights, want = {}, {}
    for name, scale in scales.items():
        layer = base.backbone.model.layers.get_submodule(name).weight.detach()
        rank = 4 if "o_proj" in name else 2
        a, b = torch.randn(rank, layer.shape[1]), torch.randn(layer.shape[0], rank)
        part = "attn_out" if "o_proj" in name else "ff_out"
        key = f"base_model.model.model.transformer.blocks.{name[0]}.{part}.lora_"
        weights |= {f"{key}A.weight": a, f"{key}B.weight": b}
        want[f"model.layers.{name}.weight"] = layer + scale * (b @ a)
    embeddings = torch.randn(base.vocab_size, 64)
    weights["base_model.model.model.transformer.wte.weight"] = embeddings
    save_file(weights, folder / WEIGHTS)
    before = {k: v.clone() for k, v in base.backbone.state_dict().items()}
    attach(base, str(folder))
    base.merge_adapter()
    want["model.embed_tokens.weight"] = embeddings
    for name, value in base.backbone.state_dict().items():
        torch.testing.assert_close(value, want.get(name, before[name]), rtol=1e-5, atol=1e-5)


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


KEY = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"
DAMAGES = {
    "shape": (
        lambda weights: weights.update({KEY: torch.zeros(4, 48)}),
        ["layers.0.self_attn.q_proj.lora_A.weight: expected shape [4, 64], got [4, 48]"],
    ),
    "missing": (
        lambda weights: weights.pop(KEY),
        ["1 missing", "layers.0.self_attn.q_proj.lora_A.weight"],
    ),
    "unexpected": (
        lambda weights: weights.update({KEY.replace("blocks.0", "blocks.3"): torch.zeros(4, 64)}),
        ["1 unexpected", "layers.3.self_attn.q_proj.lora_A.weight"],
    ),
    "integers": (
        lambda weights: weights.update({KEY: torch.zeros(4, 64, dtype=torch.int8)}),
        [KEY, "expected weights in F64, F32, F16, BF16, got I8"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit(base, official, damage):
    folder = official()
    change, said = DAMAGES[damage]
    edit(folder, change)
    refused(base, folder, *said)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"r": 8}, "expected shape [8, 64], got [4, 64]"),
        ({"r": 10**12}, "expected shape [1000000000000, 64], got [4, 64]"),
        ({"r": 0}, "ValueError"),
        ({"r": "four"}, "TypeError"),
        ({"target_modules": ["q_proj"]}, "unexpected"),
        ({"target_modules": ["q_proj", "k_proj", "v_proj", "attn_out", "up_proj"]}, "missing"),
        ({"target_modules": ["c_attn"]}, "Target modules {'c_attn'} not found in the base"),
        ({"target_modules": "all-linear"}, "missing"),
        ({"use_dora": True}, "missing, such as"),
        ({"modules_to_save": ["wte"]}, "1 missing, such as base_model.model.model.embed_tokens"),
        ({"rank_pattern": {"q_proj": 8}}, "expected shape [8, 64], got [4, 64]"),
        ({"layers_to_transform": [0, 1]}, "unexpected"),
        ({"init_lora_weights": "corda"}, "corda"),
        ({"init_lora_weights": "mystery"}, "mystery"),
        ({"peft_type": "PROMPT_TUNING"}, "that changes weights, got PROMPT_TUNING"),
        ({"peft_type": "LARA"}, "that changes weights, got LARA"),
        ({"target_module": ["q"]}, "no target_module in a LORA adapter (got ['q']); did you mean"),
        ({"of_a_later_peft": 1}, "of_a_later_peft"),
        ({"base_model_name_or_path": 3}, "base_model_name_or_path must be text"),
    ],
)
def test_a_configuration_that_its_weights_contradict(base, official, changes, problem):
    refused(base, official(**changes), problem)


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.999])
def test_a_weight_file_cut_short(base, official, keep):
    folder = official()
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(keep * len(content))])
    refused(base, folder, f"{WEIGHTS} is damaged or cut short")


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_a_file_missing_and_a_pickle_in_its_place(base, official, name):
    folder = official()
    torch.save({}, folder / "adapter_model.bin")
    (folder / name).unlink()
    refused(base, folder, f"expected an adapter with a {name}")


def test_a_second_adapter_and_a_name_that_exists_nowhere(base, golden):
    refused(base, "nobody/no-such-adapter", "nobody/no-such-adapter: no such folder")
    attach(base, str(golden / "llada-tiny/adapter"))
    with pytest.raises(CheckpointError, match="already has an adapter"):
        attach(base, str(golden / "llada-tiny/adapter"))


# The base that it belongs to: wrong ones are refused where that is known, and never silent.


def test_an_adapter_of_another_family(base, dream, golden, official):
    """Dream's adapter on LLaDA: same module names, so only the family tells."""
    refused(base, golden / "dream-tiny/adapter", "made for the family dream", "this base is llada")
    folder = official(auto_mapping=None)
    dream.contract.save(folder)
    refused(base, folder, "made for the family dream", "this base is llada")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mask_id": 95}, "the adapter's mask id is 95, this base's is 3"),
        ({"mask_id": 9600}, "mask_id must lie in the vocabulary [0, 96), got 9600"),
        ({"logit_shift": 1}, "logit_shift must be 0 in the family llada"),
    ],
)
def test_a_contract_that_the_base_contradicts(base, official, changes, text):
    folder = official()
    dataclasses.replace(base.contract, **changes).save(folder)
    refused(base, folder, text)


def folder_of_base(golden, place, nudge=0.0):
    """The golden base in a folder of its own, its weights moved by `nudge`."""
    place.mkdir(parents=True)
    shutil.copy(golden / "llada-tiny/config.json", place)
    weights = load_file(golden / "llada-tiny/model.safetensors")
    save_file({k: v + nudge for k, v in weights.items()}, place / "model.safetensors")
    return place


def snapshot(golden, root, name):
    """The golden base as the hub's cache keeps it: links into blobs beside the snapshot."""
    repository = root / ("models--" + name.replace("/", "--"))
    place = repository / "snapshots" / "0123abc"
    place.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(golden / "llada-tiny" / file, repository / "blobs" / file)
        (place / file).symlink_to(f"../../blobs/{file}")
    return place


def silent(place, adapter):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnverifiedBaseWarning)
        assert load(place, adapter=adapter, device="cpu").adapter is not None


def warned(place, adapter, *texts):
    with pytest.warns(UnverifiedBaseWarning, match="the base could not be verified") as caught:
        assert load(place, adapter=adapter, device="cpu").adapter is not None
    message = next(str(w.message) for w in caught if w.category is UnverifiedBaseWarning)
    assert all(text in message for text in texts), message


def test_random_weights_of_the_same_shape_are_not_taken_silently(golden, tmp_path, official):
    place = folder_of_base(golden, tmp_path / "random", nudge=0.5)
    folder = official(base_model_name_or_path="")
    warned(place, folder, "a base that it does not name", str(place))


@pytest.mark.parametrize("name", [INSTRUCT, "gsai-ml/llada-8b-instruct"])
def test_the_base_by_its_hub_name(golden, tmp_path, official, name, monkeypatch):
    place = snapshot(golden, tmp_path, INSTRUCT)
    monkeypatch.setattr("d2f.checkpoint.snapshot_download", lambda *a, **b: str(place))
    folder = official(base_model_name_or_path=name)
    silent(place, folder)
    silent(folder_of_base(golden, tmp_path / "data" / "LLaDA-8B-Instruct"), folder)
    warned(folder_of_base(golden, tmp_path / "data" / "mine"), folder, name, "mine")


def test_another_base_of_the_hub_is_refused(golden, tmp_path, official, monkeypatch):
    place = snapshot(golden, tmp_path, "GSAI-ML/LLaDA-8B-Base")
    copy = snapshot(golden, tmp_path, "someone/LLaDA-8B-Instruct")
    folder = official(base_model_name_or_path=INSTRUCT)
    monkeypatch.setattr("d2f.checkpoint.snapshot_download", lambda *a, **b: str(place))
    with pytest.raises(CheckpointError, match=f"base {INSTRUCT}, this base is GSAI-ML/LLaDA-8B-B"):
        load(place, adapter=folder, device="cpu")
    warned(copy, folder, "someone/")
    values = json.loads((folder / "adapter_config.json").read_text()) | {"auto_mapping": None}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"the base {INSTRUCT}, this base is tiny-teacher"):
        load("tiny-teacher", adapter=folder, device="cpu")


def test_a_named_folder_that_is_here_decides_by_its_weights(golden, tmp_path, official):
    named = folder_of_base(golden, tmp_path / "named")
    folder = official(base_model_name_or_path=str(named))
    silent(named, folder)
    silent(folder_of_base(golden, tmp_path / "same"), folder)
    other = folder_of_base(golden, tmp_path / "other", nudge=0.5)
    with pytest.raises(CheckpointError) as caught:
        load(other, adapter=folder, device="cpu")
    for text in (str(named), fingerprint(str(named))[:12], str(other)):
        assert text in str(caught.value)


def test_a_hash_decides_whatever_the_names(golden, tmp_path, official, base):
    folder = official(base_model_name_or_path=INSTRUCT)
    hash_ = fingerprint(str(golden / "llada-tiny"))
    dataclasses.replace(base.contract, base=INSTRUCT, base_hash=hash_).save(folder)
    silent(folder_of_base(golden, tmp_path / "mine"), folder)
    other = folder_of_base(golden, tmp_path / "LLaDA-8B-Instruct", nudge=0.5)
    refused(load(other, device="cpu"), folder, f"belongs to the base {INSTRUCT}", hash_[:12])


@pytest.mark.parametrize("name", ["tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-d2f-long"])
def test_the_bundled_adapters_are_on_their_base(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnverifiedBaseWarning)
        assert load(name, device="cpu").adapter is not None


def test_what_a_folder_says_of_its_models_name(golden, tmp_path):
    assert base_name(str(snapshot(golden, tmp_path, INSTRUCT))) == INSTRUCT
    assert base_name(str(HERE / "tiny-teacher")) == "tiny-teacher"
    assert base_name(str(tmp_path / "LLaDA-8B-Instruct")) is None
    assert base_name(None) is None
