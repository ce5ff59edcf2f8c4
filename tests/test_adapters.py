"""Adapters: new, saved, loaded again, merged as PEFT merges, and refused where they do not belong.
Whatever PEFT loads onto a base loads here."""

import dataclasses
import json
import shutil
import warnings

import peft
import pytest
import stock
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from d2f import spans as sp
from d2f.adapters import ATTENTION, attach, new_lora
from d2f.checkpoint import base_name, fingerprint
from d2f.errors import CheckpointError, SupposedWarning, UnverifiedBaseWarning
from d2f.loading import load
from d2f.models import HERE
from d2f.saving import save, save_adapter, save_model
from decode import D2F, Static
from decode.decoders import default_decoder

IDS = torch.arange(4, 20)[None]
SPANS = sp.block_causal(16, 5, 4)
INSTRUCT = "GSAI-ML/LLaDA-8B-Instruct"
WEIGHTS = "adapter_model.safetensors"


def logits(model, spans=SPANS):
    with torch.inference_mode():
        return model.forward(IDS, spans)


@pytest.fixture
def base(golden):
    return load(golden / "llada-tiny", device="cpu")


def test_an_official_adapter_is_taken_for_one_of_d2f(golden, base):
    """The default decoder is then D2F; without it, or with a contract that says otherwise, not."""
    with pytest.warns(SupposedWarning, match="does not say what trained it: D2F"):
        adapted = load(golden / "llada-tiny", adapter=golden / "llada-tiny/adapter", device="cpu")
    assert adapted.contract == dataclasses.replace(base.contract, objective="d2f")
    assert (default_decoder(adapted.contract), default_decoder(base.contract)) == (D2F, Static)


@pytest.fixture
def official(golden, tmp_path):
    """official(**changes): the golden LLaDA adapter with a changed configuration."""

    def make(**changes):
        folder = shutil.copytree(golden / "llada-tiny/adapter", tmp_path / "adapter")
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return make


def edit(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def refused(model, folder, *patterns):
    with pytest.raises(CheckpointError) as caught:
        attach(model, str(folder))
    for pattern in patterns:
        assert pattern in str(caught.value)


# Kinds: PEFT's own logits and merged weights.

PROJECTIONS = ["q_proj", "v_proj"]
LORAS = {
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
KINDS = {
    name: LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS} | changes)
    for name, changes in LORAS.items()
} | {
    "LoHa": peft.LoHaConfig(r=4, target_modules=PROJECTIONS),
    "LoKr": peft.LoKrConfig(r=4, target_modules=PROJECTIONS),
    "IA3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "OFT": peft.OFTConfig(oft_block_size=8, target_modules=PROJECTIONS),
    "VeRA": peft.VeraConfig(r=4, target_modules=["q_proj"]),
}
BIAS_OF_B = LoraConfig(r=4, lora_alpha=6, target_modules=PROJECTIONS, lora_bias=True)
OF_TIED = [  # and of layers with biases
    "all linear", "DoRA", "DoRA on embeddings", "saved head", "saved embeddings", "head", "biases",
    "trained tokens", "bias of B", "OFT",
]  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    stock.checkpoint(folder / "llama", "llama")
    stock.checkpoint(folder / "qwen2", "qwen2", tied=True)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "llama") for kind in KINDS), *((kind, "qwen2") for kind in OF_TIED)],
)
def test_whatever_peft_loads(bases, tmp_path, kind, name):
    base, causal = bases / name, sp.causal(16)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    theirs = peft.get_peft_model(theirs, KINDS.get(kind, BIAS_OF_B)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapter = tmp_path / "adapter"
    theirs.save_pretrained(adapter)
    with torch.inference_mode():
        want = theirs(input_ids=IDS).logits

    ours, plain = load(base, adapter=adapter, device="cpu"), load(base, device="cpu")
    before, got = logits(plain, causal), logits(ours, causal)
    plain.adapter = PeftModel.from_pretrained(plain.backbone, adapter)
    assert torch.equal(got, logits(plain, causal)), "PEFT's own loading, in our attention"
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, before, atol=1e-3)
    save_model(ours, tmp_path / "merged", dtype=torch.float32)
    save(ours, tmp_path / "alone")
    assert torch.equal(got, logits(ours, causal)), "saving changes nothing"
    assert torch.equal(logits(load(tmp_path / "alone", device="cpu"), causal), got)
    ours.merge_adapter()
    torch.testing.assert_close(logits(ours, causal), want, rtol=1e-4, atol=1e-4)
    again = load(tmp_path / "merged", device="cpu")
    assert torch.equal(logits(again, causal), logits(ours, causal)), "merged as PEFT merges"


def test_a_new_lora_changes_nothing_and_trains_only_itself(base):
    before = logits(base)
    new_lora(base, r=4, alpha=8, dropout=0.5)
    base.adapter.eval()
    assert torch.equal(logits(base), before)
    learning = [name for name, p in base.adapter.named_parameters() if p.requires_grad]
    assert len(learning) == 3 * len(ATTENTION) * 2
    assert all(".lora_" in name for name in learning)


def test_a_saved_adapter_loads_with_the_same_logits_and_contract(base, golden, tmp_path):
    """To the bit; on the base in any dtype, named or alone."""
    new_lora(base, r=4, alpha=6, dropout=0.1, targets=["q_proj", "down_proj"])
    torch.manual_seed(0)
    for name, parameter in base.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    base.adapter.eval()
    hash_ = fingerprint(base.path)
    changes = {"objective": "d2f", "block_size": 8, "noise": (0.2, 0.7), "prompt_rule": "block"}
    base.contract = dataclasses.replace(
        base.contract, base=str(golden / "llada-tiny"), base_hash=hash_, **changes
    )
    place = tmp_path / "adapter"
    save_adapter(base, place)
    for again in (load(golden / "llada-tiny", adapter=place, device="cpu"), load(place)):
        assert torch.equal(logits(again), logits(base))
        assert again.contract == base.contract
        assert not any(p.requires_grad for p in again.adapter.parameters())
    assert load(golden / "llada-tiny", adapter=place, dtype="bf16").contract == base.contract
    with pytest.raises(CheckpointError, match="is an adapter: expected a model for"):
        load(place, adapter=place)
    for name, problem in (
        ("LLaDA-8B-Instruct", "an adapter of LLaDA-8B-Instruct, which is not at hand"),
        (None, "names no base: give the base as model"),
    ):
        save_adapter(base, place, base=name)
        with pytest.raises(CheckpointError, match=problem):
            load(place)


# Names of the official code.


def test_names_of_the_official_file(base, golden, official):
    """PEFT's name of the adapter in memory is in some files."""
    folder = official()
    weights = load_file(folder / WEIGHTS)
    save_file({k.replace(".weight", ".default.weight"): v for k, v in weights.items()},
              folder / WEIGHTS)  # fmt: skip
    attach(base, str(folder))
    want = load(golden / "llada-tiny", adapter=golden / "llada-tiny/adapter", device="cpu")
    assert torch.equal(logits(base), logits(want))
    refused(base, folder, "already has an adapter")


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")
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


# Damage: each misfit is an error that names it.

KEY = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"
OURS = "layers.0.self_attn.q_proj.lora_A.weight"
OTHER = KEY.replace("blocks.0", "blocks.3")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.update({KEY: torch.zeros(4, 48)}), f"{OURS}: expected shape [4, 64], got [4"),
        (lambda w: w.pop(KEY), f"1 missing: base_model.model.model.{OURS}"),
        (lambda w: w.update({OTHER: torch.zeros(4, 64)}), "1 unexpected: base_model.model.model.l"),
        (lambda w: w.update({KEY: torch.zeros(4, 64, dtype=torch.int8)}), "F32, F16, BF16, got I8"),
    ],
    ids=["shape", "missing", "unexpected", "integers"],
)
def test_weights_that_do_not_fit(base, official, change, said):
    folder = official()
    edit(folder, change)
    refused(base, folder, said)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"r": 8}, "expected shape [8, 64], got [4, 64]"),
        ({"r": "four"}, "TypeError"),
        ({"target_modules": ["q_proj"]}, "unexpected"),
        ({"target_modules": ["c_attn"]}, "Target modules {'c_attn'} not found in the base"),
        ({"target_modules": "all-linear"}, "missing"),
        ({"use_dora": True}, "missing: base_model.model"),
        ({"modules_to_save": ["wte"]}, "1 missing: base_model.model.model.embed_tokens"),
        ({"rank_pattern": {"q_proj": 8}}, "expected shape [8, 64], got [4, 64]"),
        ({"layers_to_transform": [0, 1]}, "unexpected"),
        ({"init_lora_weights": "mystery"}, "mystery"),
        ({"peft_type": "LARA"}, "LARA"),
        ({"target_module": ["q"]}, "no target_module in a LORA adapter (got ['q']); did you mean"),
        ({"of_a_later_peft": 1}, "of_a_later_peft"),
    ],
)
def test_a_configuration_that_its_weights_contradict(base, official, changes, problem):
    refused(base, official(**changes), problem)


def test_files_cut_short_missing_or_pickled(base, official):
    folder = official()
    content = (folder / WEIGHTS).read_bytes()
    for keep in (0.0, 0.01, 0.999):
        (folder / WEIGHTS).write_bytes(content[: int(keep * len(content))])
        refused(base, folder, f"{WEIGHTS} is damaged or cut short")
    torch.save({}, folder / "adapter_model.bin")
    for name in (WEIGHTS, "adapter_config.json"):
        (folder / name).unlink()
        refused(base, folder, f"expected an adapter with a {name}")
    refused(base, "nobody/no-such-adapter", "nobody/no-such-adapter: no such folder")


# The base that it belongs to: wrong ones are refused where that is known, and never silent.


def test_an_adapter_of_another_family(base, dream, golden, official):
    """Dream's adapter on LLaDA: same module names, so only the family tells."""
    refused(base, golden / "dream-tiny/adapter", "made for the family dream", "this base is llada")
    folder = official(auto_mapping=None)
    dream.contract.save(folder)
    refused(base, folder, "made for the family dream", "this base is llada")
    for changes, text in (
        ({"mask_id": 95}, "the adapter's mask id is 95, this base's is 3"),
        ({"mask_id": 9600}, "mask_id must lie in the vocabulary [0, 96), got 9600"),
        ({"logit_shift": 1}, "logit_shift must be 0 in the family llada"),
    ):
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


def silent(place, adapter=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnverifiedBaseWarning)
        assert load(place, adapter=adapter, device="cpu").adapter is not None


def warned(place, adapter, *texts):
    with pytest.warns(UnverifiedBaseWarning, match="the base could not be verified") as caught:
        assert load(place, adapter=adapter, device="cpu").adapter is not None
    message = next(str(w.message) for w in caught if w.category is UnverifiedBaseWarning)
    assert all(text in message for text in texts), message


def test_a_base_that_is_not_named(golden, tmp_path, official):
    place = folder_of_base(golden, tmp_path / "random", nudge=0.5)
    warned(place, official(base_model_name_or_path=""), "a base that it does not name", str(place))
    for name in ("tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-d2f-long"):
        silent(name)


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
    folder = official(base_model_name_or_path=INSTRUCT, auto_mapping=None)
    monkeypatch.setattr("d2f.checkpoint.snapshot_download", lambda *a, **b: str(place))
    for other, name in ((place, "GSAI-ML/LLaDA-8B-B"), ("tiny-teacher", "tiny-teacher")):
        with pytest.raises(CheckpointError, match=f"base {INSTRUCT}, this base is {name}"):
            load(other, adapter=folder, device="cpu")
    warned(copy, folder, "someone/")


def test_a_named_folder_that_is_here_decides_by_its_weights(golden, tmp_path, official):
    named = folder_of_base(golden, tmp_path / "named")
    folder = official(base_model_name_or_path=str(named))
    silent(folder_of_base(golden, tmp_path / "same"), folder)
    other = folder_of_base(golden, tmp_path / "other", nudge=0.5)
    refused(load(other), folder, str(named), fingerprint(str(named))[:12], str(other))


def test_a_hash_decides_whatever_the_names(golden, tmp_path, official, base):
    folder = official(base_model_name_or_path=INSTRUCT)
    hash_ = fingerprint(str(golden / "llada-tiny"))
    dataclasses.replace(base.contract, base=INSTRUCT, base_hash=hash_).save(folder)
    silent(folder_of_base(golden, tmp_path / "mine"), folder)
    other = folder_of_base(golden, tmp_path / "LLaDA-8B-Instruct", nudge=0.5)
    refused(load(other, device="cpu"), folder, f"belongs to the base {INSTRUCT}", hash_[:12])


def test_what_a_folder_says_of_its_models_name(golden, tmp_path):
    assert base_name(str(snapshot(golden, tmp_path, INSTRUCT))) == INSTRUCT
    assert base_name(str(HERE / "tiny-teacher")) == "tiny-teacher"
    assert base_name(str(tmp_path / "LLaDA-8B-Instruct")) is None
    assert base_name(None) is None
