"""Damaged and misfitting checkpoints: each misfit is an error that names what was expected and what
came, before a token is decoded."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from golden_facts import difference, run
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tiny import random_model

import d2f.checkpoint
from d2f.checkpoint import fingerprint, folder_of
from d2f.errors import CheckpointError, InputError
from d2f.loading import describe, load
from d2f.models import HERE
from d2f.saving import save_model
from d2f.tokenizer import load_tokenizer
from decode.compare.config import Transformers
from decode.compare.local import TransformersRunner

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copy(golden, tmp_path):
    """A copy of a golden checkpoint, to be damaged: copy(family, changes of config.json)."""

    def make(family, **changes):
        folder = tmp_path / family
        folder.mkdir()
        for name in ("config.json", WHOLE):
            shutil.copy(golden / f"{family}-tiny" / name, folder / name)
        values = json.loads((folder / "config.json").read_text()) | changes
        values = {name: value for name, value in values.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return make


def edit_weights(folder, change):
    weights = load_file(folder / WHOLE)
    change(weights)
    save_file(weights, folder / WHOLE, metadata={"format": "pt"})


def refused(folder, *patterns, **options):
    with pytest.raises(CheckpointError) as caught:
        load(folder, device="cpu", **options)
    for pattern in patterns:
        assert pattern in str(caught.value)


def test_the_output_of_a_training_names_the_model_in_it(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    refused(tmp_path, f"found none; did you mean {tmp_path / 'model'}?")


# Weights. transformers would leave what is missing freshly initialised and only print a report.


@pytest.mark.parametrize("family", ["llada", "dream", "wedlm", "causal"])
def test_each_weight_that_is_missing_renamed_or_misshapen_is_named(tmp_path, family):
    save_model(random_model(family), tmp_path, dtype=torch.float32)
    weights = load_file(tmp_path / WHOLE)
    some = [key for key in weights if ".layers.0." in key or "layers" not in key][::3]
    assert len(some) > 3
    for key in some:
        value = weights[key]
        for change, said in (
            ({}, f"1 missing: {key}"),
            ({f"{key}.old": value}, f"1 unexpected: {key}.old"),
            ({key: torch.zeros(3, 5)}, f"{key}: expected shape {list(value.shape)}, got [3, 5]"),
        ):
            rest = {name: w for name, w in weights.items() if name != key}
            save_file(rest | change, tmp_path / WHOLE, metadata={"format": "pt"})
            refused(tmp_path, "the weights do not fit a model of the family", said)


@pytest.mark.parametrize(
    ("key", "change", "said"),
    [
        ("ff_out.weight", None, "1 missing: lm_head.weight"),
        ("blocks.0.q_norm.weight", (64,), "1 unexpected: model.transformer.blocks.0.q_nor"),
        ("blocks.0.attn_out.weight", (64, 48), "expected shape [64, 64], got [64, 48]"),
    ],
)
def test_a_weight_under_an_official_name(copy, key, change, said):
    folder, key = copy("llada"), f"model.transformer.{key}"
    new = {} if change is None else {key: torch.zeros(change)}
    edit_weights(folder, lambda w: (w.pop(key, None), w.update(new)))
    refused(folder, said)


@pytest.mark.parametrize(
    ("family", "name", "head", "embeddings"),
    [
        ("llada", "weight_tying", "model.transformer.ff_out", "model.transformer.wte"),
        ("dream", "tie_word_embeddings", "lm_head", "model.embed_tokens"),
    ],
)
def test_output_weights_that_are_said_to_be_the_embeddings(copy, family, name, head, embeddings):
    """They would be kept when it is loaded, and lost when it is saved."""
    folder = copy(family, **{name: True})
    refused(folder, "tie_word_embeddings")
    edit_weights(folder, lambda w: w.update({f"{head}.weight": w[f"{embeddings}.weight"].clone()}))
    assert load(folder, device="cpu").backbone.config.tie_word_embeddings


def test_a_weight_file_cut_short_or_in_integers(copy):
    folder, name = copy("dream"), "model.layers.1.mlp.up_proj.weight"
    content = (folder / WHOLE).read_bytes()
    for keep in (0.0, 0.001, 0.9, 0.9999):  # in the header, or in the data
        (folder / WHOLE).write_bytes(content[: int(keep * len(content))])
        refused(folder, str(folder), "damaged or cut short")
    (folder / WHOLE).write_bytes(content)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        edit_weights(folder, lambda w, dtype=dtype: w.update({name: w[name].to(dtype)}))
        refused(folder, name, "expected weights in F64, F32, F16, BF16", "got ")


class Marks:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["beside", "by an index", "by the safetensors index"])
def test_a_pickle_is_never_read(copy, tmp_path, way):
    folder = copy("dream")
    weights = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    torch.save(weights | {"evil": Marks(tmp_path / "ran")}, folder / "pytorch_model.bin")
    where = {"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    if way == "by an index":
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(where))
    elif way == "by the safetensors index":
        (folder / INDEX).write_text(json.dumps(where))
    refused(folder, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model"):
        fingerprint(str(folder))
    entry = Transformers(name="hf", kind="transformers", model=str(folder), device="cpu")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        TransformersRunner(entry)
    assert not (tmp_path / "ran").exists()


# Configurations, contracts and tokenizers.


@pytest.mark.parametrize("text", ["{not json", "", "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", INDEX, "d2f_contract.json", "tokenizer.json"])
def test_a_file_that_is_missing_or_no_json_object(copy, name, text):
    folder = copy("llada")
    (folder / name).write_text(text)
    if name == INDEX:
        (folder / WHOLE).unlink()
    refused(folder, str(folder), name if name != "tokenizer.json" else "tokenizer")
    (folder / name).unlink()
    if name == "config.json":
        refused(folder, "expected a model folder with a config.json")
    elif name == INDEX:
        refused(folder, f"expected {WHOLE}")


BAD = [
    ("llada", {"model_type": "gpt2"}, ["model_type must be one of", "'llada'", "'gpt2'"]),
    ("llada", {"block_type": "sequential"}, ["block_type must be ", "got 'sequential'"]),
    ("llada", {"alibi": True}, ["alibi must be ", "got True"]),
    ("llada", {"rope_full_precision": False}, ["rope_full_precision must be "]),
    ("llada", {"d_model": ...}, ["config.json of the family llada lacks", "d_model"]),
    ("llada", {"n_layers": "many"}, ["n_layers", "'many'"]),
    ("llada", {"n_layers": 4}, ["9 missing", "model.layers.3."]),
    ("llada", {"mask_token_id": ...}, ["the family llada needs a mask id", "mask_token_id"]),
    ("llada", {"mask_token_id": 96}, ["mask_id must lie in the vocabulary [0, 96), got 96"]),
    ("llada", {"eos_token_id": [2, 3]}, ["mask id must not be one of the end ids [2, 3], got 3"]),
    # transformers would take its default, and build a model of 8B parameters.
    ("dream", {"hidden_size": ...}, ["config.json lacks hidden_size"]),
    ("dream", {"num_hidden_layers": 10**12}, ["num_hidden_layers must be a whole number from 1"]),
    ("dream", {"num_attention_heads": 5}, ["self_attn.q_proj", "expected shape"]),
    ("dream", {"hidden_act": "sigh"}, ["sigh"]),
    ("dream", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope"]),
    ("dream", {"quantization_config": {"bits": 4}}, ["quantization_config must be absent"]),
    ("dream", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 511},
     ["use_sliding_window must be false", "512 positions"]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "said"), BAD)
def test_a_configuration_of_no_model_or_another(copy, family, changes, said):
    refused(copy(family, **changes), *said)


def test_a_window_that_covers_all(copy):
    load(copy("dream", use_sliding_window=True, max_window_layers=0, sliding_window=512))


def test_another_family_than_its_own(golden, copy, llada):
    refused(golden / "llada-tiny", "family: got 'gpt'; expected one of causal, dream", family="gpt")
    refused(golden / "llada-tiny", "lacks hidden_size", family="dream")
    refused(golden / "dream-tiny", "family llada lacks", family="llada")
    folder = copy("llada")
    for changes, said in (
        ({"family": "gpt"}, "'gpt'"),
        ({"logit_shift": 1}, "logit_shift must be 0 in the family llada, got 1"),
        ({"rope_fp32": False}, "rope_fp32 must be True in the family llada"),
        ({"mask_id": None}, "needs a mask id"),
    ):
        dataclasses.replace(llada.contract, **changes).save(folder)
        refused(folder, said)


def test_a_checkpoints_own_code_is_never_run(tmp_path, monkeypatch):
    """As if somebody sat there and typed y where transformers asks."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = shutil.copytree(HERE / "tiny-teacher", tmp_path / "hostile")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    for file in ("tokenizer_config.json", "config.json"):
        values = json.loads((folder / file).read_text())
        values["auto_map"] = dict.fromkeys(
            ("AutoTokenizer", "AutoConfig", "AutoModelForCausalLM"), "evil.Evil"
        )
        if file == "config.json":  # a type that transformers does not have: it would ask
            values["model_type"] = "Dream"
        (folder / file).write_text(json.dumps(values))
    ours = load(folder, device="cpu").backbone.state_dict()
    for name, value in load_file(HERE / "tiny-teacher" / WHOLE).items():
        assert ours[name].equal(value.to(ours[name].dtype))
    (folder / "tokenizer.json").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "Evil"}))
    for read in (load_tokenizer, load, describe):
        with pytest.raises(CheckpointError, match="tokenizer cannot be read"):
            read(str(folder))
    assert not (tmp_path / "ran").exists()


# Names, the hub, files that are split, the fingerprint.


def test_names_that_exist_nowhere(monkeypatch):
    """HF_HUB_OFFLINE is set for all tests: a name not in the local cache is not looked up."""
    for name in ("nobody/no-such-model", "no-such-model", "/no/such/folder"):
        refused(name, name, "no such folder")
    monkeypatch.setattr(d2f.checkpoint, "snapshot_download", lambda *a, **b: pytest.fail("asked"))
    for name in ("tiny-d2", "Tiny-D2F", "tiny_d2f"):
        refused(name, f"{name}: no such folder or bundled model; did you mean tiny-d2f?")


def test_a_model_and_an_adapter_in_one_folder(golden, copy):
    """transformers would put the adapter on, without a word."""
    folder = copy("dream")
    for path in (golden / "dream-tiny/adapter").glob("adapter_*"):
        shutil.copy(path, folder)
    refused(folder, "holds a model and an adapter", "adapter_config.json")


FILES = [
    "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", INDEX,
    "pytorch_model.bin", "consolidated.00.pth", "model.q4.gguf",
]  # fmt: skip


def test_what_is_fetched(copy, llada, monkeypatch):
    """Never a pickle; weights only once all else is right; and the contract of a hub's folder."""
    folder, fetched = copy("llada"), []

    def fetch(repo, *, ignore_patterns):
        fetched.append(set(filter_repo_objects(FILES, ignore_patterns=ignore_patterns)))
        return str(folder)

    monkeypatch.setattr(d2f.checkpoint, "snapshot_download", fetch)
    folder_of("someone/model")
    assert fetched == [set(FILES[:4])]
    outline = describe("someone/model")
    assert fetched[1:] == [{"config.json", "tokenizer.json", INDEX}]
    assert (outline.vocab_size, outline.context_length, outline.mask_id) == (96, 512, 3)
    dataclasses.replace(llada.contract, objective="d2f", block_size=8).save(folder)
    assert load("somebody/some-model", device="cpu").contract.block_size == 8


def test_a_described_checkpoint_is_loaded_without_reading_it_again(golden, monkeypatch):
    folder = golden / "llada-tiny"
    outline = describe(folder, adapter=folder / "adapter")
    monkeypatch.setattr("d2f.loading.read_object", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr("d2f.loading.load_tokenizer", lambda *_: pytest.fail("read again"))
    model = load(outline, device="cpu")
    assert model.adapter is not None and model.tokenizer is outline.tokenizer
    with pytest.raises(InputError, match="where the outline was described"):
        load(outline, family="llada")


def test_weights_in_several_files_load_the_same(golden, copy):
    folder, whole = copy("llada"), golden / "llada-tiny"
    weights = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: files[i % 2] for i, name in enumerate(sorted(weights))}
    for file in files:
        part = {name: weights[name] for name in weights if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    got, want = (
        run(load(place, device="cpu"), golden, "llada", "block_causal_8")
        for place in (folder, whole)
    )
    assert difference(got, want) == 0.0
    assert fingerprint(str(folder)) == fingerprint(str(whole))
    (folder / files[1]).unlink()
    refused(folder, str(folder), files[1])


def test_fingerprint_changes_with_rows_names_and_shapes(golden, copy):
    """First, middle and last row of every tensor; not with an adapter kept beside the weights."""
    folder, wte = copy("llada"), "model.transformer.wte.weight"
    found = [fingerprint(str(golden / "llada-tiny"))]
    shutil.copy(golden / "llada-tiny/adapter/adapter_model.safetensors", folder)
    assert fingerprint(str(folder)) == found[0]
    for row in (0, 48, 95):
        edit_weights(folder, lambda w, row=row: w[wte][row, -1].add_(1e-6))
        found.append(fingerprint(str(folder)))
    edit_weights(folder, lambda w: w.__setitem__("other", w.pop(wte)))
    found.append(fingerprint(str(folder)))
    edit_weights(folder, lambda w: w.__setitem__("other", w["other"].view(64, 96)))
    assert len({*found, fingerprint(str(folder))}) == 6
