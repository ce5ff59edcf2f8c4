"""Damaged and misfitting checkpoints, split weight files, the fingerprint: each misfit is an error
that names what was expected and what came."""

import dataclasses
import json
import shutil

import pytest
import torch
from golden_facts import difference, run
from safetensors.torch import load_file, save_file

import d2f.attention
from d2f.adapters import fingerprint
from d2f.errors import CheckpointError, InputError
from d2f.loading import load

FAMILIES = ["llada", "dream"]
TIED = "tie_word_embeddings"
MASKS = ["bidirectional", "block_causal_8"]


# Damage. Each error names what was expected and what came.


@pytest.fixture
def copy(golden, tmp_path):
    """A copy of a golden checkpoint, to be damaged: copy(family) -> folder."""

    def make(family):
        folder = tmp_path / family
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy(golden / f"{family}-tiny" / name, folder / name)
        return folder

    return make


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs(copy, name):
    """As `git clone` of a hub's repository leaves them without git-lfs."""
    folder = copy("llada")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\n")
    refused(folder, f"{name}: is a pointer of Git LFS: `git lfs pull` gets the file")


def edit_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    values = {name: value for name, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))


def refused(folder, *patterns, error=CheckpointError, **options):
    with pytest.raises(error) as caught:
        load(folder, device="cpu", **options)
    for pattern in patterns:
        assert pattern in str(caught.value)


@pytest.mark.parametrize(
    ("family", "key", "native"),
    [
        ("llada", "model.transformer.blocks.1.ff_proj.weight", "layers.1.mlp.gate_proj.weight"),
        ("llada", "model.transformer.ff_out.weight", "lm_head.weight"),
        ("dream", "model.layers.2.self_attn.q_proj.bias", "model.layers.2.self_attn.q_proj.bias"),
        ("dream", "lm_head.weight", "lm_head.weight"),
    ],
)
def test_missing_weight(copy, family, key, native):
    """transformers would leave it freshly initialised and only print a report."""
    folder = copy(family)
    edit_weights(folder, lambda weights: weights.pop(key))
    refused(folder, "1 missing", native, family)


@pytest.mark.parametrize(
    ("family", "key", "named"),
    [
        ("llada", "model.transformer.blocks.0.q_norm.weight", "blocks.0.q_norm.weight"),
        ("llada", "model.transformer.blocks.3.attn_norm.weight", "layers.3.input_layernorm.weight"),
        ("dream", "model.layers.0.self_attn.o_proj.bias", "layers.0.self_attn.o_proj.bias"),
    ],
)
def test_unexpected_weight(copy, family, key, named):
    folder = copy(family)
    edit_weights(folder, lambda weights: weights.__setitem__(key, torch.zeros(64)))
    refused(folder, "1 unexpected", named)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llada", "model.transformer.blocks.0.attn_out.weight"),
        ("dream", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_misshapen_weight(copy, family, key):
    folder = copy(family)
    edit_weights(folder, lambda weights: weights.__setitem__(key, torch.zeros(64, 48)))
    refused(folder, "o_proj.weight", "expected shape [64, 64], got [64, 48]")


def test_fewer_layers_in_the_file_than_in_the_config(copy):
    folder = copy("llada")
    edit_config(folder, n_layers=4)
    refused(folder, "9 missing", "model.layers.3.")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.1, 0.9, 0.9999])
def test_weight_file_cut_short(copy, keep):
    """An interrupted download: in the header, or in the data."""
    folder = copy("llada")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: int(keep * len(content))])
    refused(folder, str(folder), "cut short")


def test_weight_file_missing(copy):
    folder = copy("dream")
    (folder / "model.safetensors").unlink()
    refused(folder, str(folder), "model.safetensors")


def test_config_missing(copy):
    folder = copy("llada")
    (folder / "config.json").unlink()
    refused(folder, "expected a model folder with a config.json")


@pytest.mark.parametrize("text", ["{not json", "", "[1, 2]", '"llada"', "null"])
def test_config_not_a_json_object(copy, text):
    folder = copy("llada")
    (folder / "config.json").write_text(text)
    refused(folder, str(folder))


@pytest.mark.parametrize("kind", ["gpt2", None, ...])
def test_unknown_model_type(copy, kind):
    folder = copy("llada")
    edit_config(folder, model_type=kind)
    refused(folder, "model_type must be one of", "'llada'", repr(None if kind is ... else kind))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_type", "sequential"),
        ("layer_norm_type", "low_precision"),
        ("activation_type", "swiglu"),
        ("rope", False),
        ("alibi", True),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("attention_layer_norm", True),
        ("input_emb_norm", True),
        ("scale_logits", True),
        ("rope_full_precision", False),
    ],
)
def test_llada_variant_that_llama_cannot_express(copy, name, value):
    folder = copy("llada")
    edit_config(folder, **{name: value})
    refused(folder, f"{name} must be ", f"got {value!r}")


@pytest.mark.parametrize("name", ["d_model", "n_layers", "rope_theta", "max_sequence_length"])
def test_llada_config_that_lacks_a_size(copy, name):
    folder = copy("llada")
    edit_config(folder, **{name: ...})
    refused(folder, "config.json of the family llada lacks", name)


@pytest.mark.parametrize(("family", "name"), [("llada", "n_layers"), ("dream", "hidden_size")])
def test_config_value_of_the_wrong_type(copy, family, name):
    folder = copy(family)
    edit_config(folder, **{name: "many"})
    refused(folder, str(folder), name.removeprefix("n_"), "'many'")


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_config_that_lacks_a_size(copy, name):
    """transformers would take its default, and build a model of 8B parameters."""
    folder = copy("dream")
    edit_config(folder, **{name: ...})
    refused(folder, str(folder), "config.json lacks", name)


def test_config_sizes_that_make_no_sense(copy):
    """64 hidden over 5 heads."""
    folder = copy("dream")
    edit_config(folder, num_attention_heads=5)
    refused(folder, str(folder))


@pytest.mark.parametrize(("family", "name"), [("llada", "weight_tying"), ("dream", TIED)])
def test_output_weights_that_are_said_to_be_the_embeddings(copy, family, name):
    """They would be kept when it is loaded, and lost when it is saved."""
    folder = copy(family)
    edit_config(folder, **{name: True})
    refused(folder, "tie_word_embeddings")
    head, embeddings = (
        ("model.transformer.ff_out.weight", "model.transformer.wte.weight")
        if family == "llada"
        else ("lm_head.weight", "model.embed_tokens.weight")
    )
    edit_weights(folder, lambda weights: weights.__setitem__(head, weights[embeddings].clone()))
    assert load(folder, device="cpu").backbone.config.tie_word_embeddings
    edit_weights(folder, lambda weights: weights.pop(head))
    assert load(folder, device="cpu").backbone.config.tie_word_embeddings


def test_unknown_family(golden):
    refused(golden / "llada-tiny", "family must be one of", "'gpt'", family="gpt")


def test_family_of_another_format(golden):
    """LLaDA's file is no Dream."""
    refused(golden / "llada-tiny", "lacks hidden_size", family="dream")
    refused(golden / "dream-tiny", "lacks 'd_model'", family="llada")


def test_unknown_family_in_the_contract(copy, llada):
    folder = copy("llada")
    dataclasses.replace(llada.contract, family="gpt").save(folder)
    refused(folder, "family must be one of", "'gpt'")


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_missing_mask_id(copy, family):
    folder = copy(family)
    edit_config(folder, mask_token_id=...)
    refused(folder, f"the family {family} needs a mask id", "mask_token_id")


def test_mask_id_outside_the_vocabulary(copy):
    folder = copy("llada")
    edit_config(folder, mask_token_id=96)
    refused(folder, "mask_id must lie in the vocabulary [0, 96), got 96")


def test_bad_dtype_name(golden):
    refused(golden / "llada-tiny", "'int3'", "bfloat16", error=InputError, dtype="int3")


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model", "/no/such/folder", ""])
def test_name_that_exists_nowhere(name):
    """HF_HUB_OFFLINE is set for all tests: a name not in the local cache is not looked up."""
    refused(name, name)


def test_a_hub_name_keeps_its_contract(copy, llada, monkeypatch):
    """What this project saved is a Llama by its config alone; the contract says LLaDA."""
    folder = copy("llada")
    dataclasses.replace(llada.contract, objective="d2f", block_size=8).save(folder)
    monkeypatch.setattr(d2f.checkpoint, "snapshot_download", lambda name, **_: str(folder))
    model = load("somebody/some-model", device="cpu")
    assert (model.contract.block_size, model.tokenizer) == (8, None)


# Files that are split, and the fingerprint.


def split(folder):
    """The same weights in two files and an index, as large checkpoints come."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_several_files_load_the_same(golden, copy, family):
    folder = copy(family)
    split(folder)
    model = load(folder, device="cpu")
    got = run(model, golden, family, "block_causal_8")
    whole = run(load(golden / f"{family}-tiny", device="cpu"), golden, family, "block_causal_8")
    assert difference(got, whole) == 0.0
    assert fingerprint(str(folder)) == fingerprint(str(golden / f"{family}-tiny"))


def test_one_of_several_files_missing(copy):
    folder = copy("llada")
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, str(folder), "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("row", [0, 48, 95])
def test_fingerprint_changes_with_each_row_it_samples(golden, copy, row):
    """First, middle and last row of every tensor."""
    folder = copy("llada")
    whole = fingerprint(str(golden / "llada-tiny"))
    assert fingerprint(str(folder)) == whole

    def nudge(weights):
        weights["model.transformer.wte.weight"][row, -1] += 1e-6

    edit_weights(folder, nudge)
    assert fingerprint(str(folder)) != whole


def test_fingerprint_changes_with_names_and_shapes(golden, copy):
    folder = copy("dream")
    whole = fingerprint(str(folder))
    edit_weights(folder, lambda w: w.__setitem__("other", w.pop("lm_head.weight")))
    renamed = fingerprint(str(folder))
    edit_weights(folder, lambda w: w.__setitem__("other", w["other"].view(64, 96)))
    reshaped, other = fingerprint(str(folder)), fingerprint(str(golden / "llada-tiny"))
    assert len({whole, renamed, reshaped, other}) == 4


def test_fingerprint_ignores_an_adapter_kept_beside_the_weights(golden, copy):
    folder = copy("llada")
    whole = fingerprint(str(folder))
    shutil.copy(golden / "llada-tiny/adapter/adapter_model.safetensors", folder)
    assert fingerprint(str(folder)) == whole


def test_fingerprint_of_a_folder_without_safetensors_is_an_error(tmp_path):
    """Else all such checkpoints would have one fingerprint."""
    with pytest.raises(CheckpointError, match="safetensors"):
        fingerprint(str(tmp_path))
