"""Weights are safetensors inside the checkpoint's folder and floating point, or they are refused by
name: of models and adapters."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from d2f.adapters import attach, fingerprint
from d2f.checkpoint import WHOLE, read_object, stored, weight_files
from d2f.errors import CheckpointError, InputError
from d2f.loading import load
from decode.compare.config import Transformers
from decode.compare.entries import TransformersRunner

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(golden, tmp_path):
    place = tmp_path / "checkpoint" / "model"
    place.mkdir(parents=True)
    for name in ("config.json", WHOLE):
        shutil.copy(golden / "dream-tiny" / name, place)
    return place


def refused(place, *texts):
    with pytest.raises(CheckpointError) as caught:
        load(place, device="cpu")
    for text in texts:
        assert text in str(caught.value)


class Marks:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("way", ["beside", "by an index", "by the safetensors index"])
def test_a_pickle_is_never_read(folder, tmp_path, way):
    weights = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    torch.save(weights | {"evil": Marks(tmp_path / "ran")}, folder / "pytorch_model.bin")
    where = {"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    if way == "by an index":
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(where))
    elif way == "by the safetensors index":
        (folder / INDEX).write_text(json.dumps(where))
    refused(folder, "pytorch_model.bin", "safetensors")
    with pytest.raises(CheckpointError, match="safetensors"):
        fingerprint(str(folder))
    entry = Transformers(name="hf", kind="transformers", model=str(folder), device="cpu")
    with pytest.raises(InputError, match=r"pytorch_model\.bin"):
        TransformersRunner(entry, [])
    assert not (tmp_path / "ran").exists()


def test_a_sound_pickle_is_not_read_either(folder):
    torch.save(load_file(folder / WHOLE), folder / "pytorch_model.bin")
    (folder / WHOLE).unlink()
    refused(folder, "expected model.safetensors", "pytorch_model.bin, which is not read")


def test_another_file_that_the_config_names_is_not_read(folder):
    """transformers reads its transformers_weights in the place of the one that was checked."""
    values = json.loads((folder / "config.json").read_text())
    shutil.copy(folder / WHOLE, folder / "other.safetensors")
    values["transformers_weights"] = "other.safetensors"
    (folder / "config.json").write_text(json.dumps(values))
    refused(folder, "transformers_weights", "'other.safetensors'")


@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "backslashes"])
def test_an_index_that_leads_outside(folder, kind):
    outside = folder.parent / "outside.safetensors"
    (folder / WHOLE).rename(outside)
    name = {
        "parent": "../outside.safetensors",
        "absolute": str(outside),
        "link": "model-1.safetensors",
        "backslashes": "..\\outside.safetensors",
    }[kind]
    if kind == "link":
        (folder / name).symlink_to(outside)
    where = dict.fromkeys(load_file(outside), name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    refused(folder, repr(name), "outside of the folder")
    with pytest.raises(CheckpointError, match="outside of the folder"):
        fingerprint(str(folder))


@pytest.mark.parametrize(
    "name", ["\0.safetensors", "a" * 5000 + ".safetensors", "\ud800.safetensors"]
)
def test_an_index_of_no_file_names(folder, name):
    where = dict.fromkeys(load_file(folder / WHOLE), name)
    (folder / WHOLE).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    refused(folder, "expected the name of a weight file, got", repr(name[:60]))


@pytest.mark.parametrize("name", [WHOLE, INDEX])
def test_a_link_that_leads_outside(folder, name):
    outside = folder.parent / "outside"
    (folder / WHOLE).rename(outside)
    (folder / name).symlink_to("../outside")
    refused(folder, repr(name), "outside of the folder", str(outside))


@pytest.mark.parametrize("split", [False, True])
def test_a_snapshot_of_the_hubs_cache_is_links_that_stay_inside(golden, tmp_path, split):
    repository = tmp_path / "models--Dream-org--Dream"
    place = repository / "snapshots" / "0123abc"
    (repository / "blobs").mkdir(parents=True)
    place.mkdir(parents=True)
    weights = load_file(golden / "dream-tiny" / WHOLE)
    parts = {WHOLE: list(weights)}
    if split:
        parts = {
            "model-1.safetensors": list(weights)[::2],
            "model-2.safetensors": list(weights)[1::2],
        }
        where = {name: file for file, names in parts.items() for name in names}
        (repository / "blobs" / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for file, names in parts.items():
        save_file({n: weights[n] for n in names}, repository / "blobs" / file)
    shutil.copy(golden / "dream-tiny/config.json", repository / "blobs")
    for blob in (repository / "blobs").iterdir():
        (place / blob.name).symlink_to(f"../../blobs/{blob.name}")
    (tmp_path / "link").symlink_to(place)
    for path in (place, tmp_path / "link"):
        assert len(weight_files(path)) == len(parts)
        state = load(path, device="cpu").backbone.state_dict()
        assert all(torch.equal(state[name], value) for name, value in weights.items())
    secret = tmp_path / "models--other--one"
    secret.mkdir()
    file = sorted(parts)[0]
    shutil.move(repository / "blobs" / file, secret / file)
    (place / file).unlink()
    (place / file).symlink_to(secret / file)
    refused(place, repr(file), "outside of the folder")


def test_a_folder_that_is_a_link_itself(folder, tmp_path):
    (tmp_path / "here").symlink_to(folder)
    load(tmp_path / "here", device="cpu")


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
     '{"weight_map": {"a": "b.txt"}}', "[" * 100_000, '{"a":' * 100_000],
)  # fmt: skip
def test_an_index_that_is_none(folder, index):
    (folder / WHOLE).unlink()
    (folder / INDEX).write_text(index)
    refused(folder, INDEX)


def test_a_model_and_an_adapter_in_one_folder(golden, folder):
    """transformers would put the adapter on, without a word."""
    for path in (golden / "dream-tiny/adapter").glob("adapter_*"):
        shutil.copy(path, folder)
    refused(folder, "holds a model and an adapter", "adapter_config.json")


DTYPES = ["int8", "uint8", "bool", "int64", "int32", "int16", "float8_e4m3fn"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_floating_point(golden, folder, dtype):
    weights = load_file(folder / WHOLE)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(getattr(torch, dtype))
    save_file(weights, folder / WHOLE, metadata={"format": "pt"})
    refused(folder, name, "expected weights in F64, F32, F16, BF16", "got ")
    adapter = shutil.copytree(golden / "dream-tiny/adapter", folder.parent / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    name = sorted(weights)[3]
    weights[name] = weights[name].to(getattr(torch, dtype))
    save_file(weights, adapter / "adapter_model.safetensors")
    base = load(golden / "dream-tiny", device="cpu")
    with pytest.raises(CheckpointError) as caught:
        attach(base, str(adapter))
    assert name in str(caught.value) and "got " in str(caught.value)
    assert base.adapter is None


def test_a_quantised_checkpoint_by_its_config(folder):
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(values))
    refused(folder, "quantization_config", "gptq")


def test_an_adapters_weights_are_inside_of_its_folder(golden, tmp_path):
    adapter = shutil.copytree(golden / "dream-tiny/adapter", tmp_path / "adapter")
    shutil.move(adapter / "adapter_model.safetensors", tmp_path / "outside")
    (adapter / "adapter_model.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=r"'adapter_model\.safetensors' lies outside"):
        attach(load(golden / "dream-tiny", device="cpu"), str(adapter))


def test_an_adapters_pickle_is_not_read(golden, tmp_path):
    adapter = shutil.copytree(golden / "dream-tiny/adapter", tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    torch.save(weights, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"with a adapter_model\.safetensors"):
        attach(load(golden / "dream-tiny", device="cpu"), str(adapter))


@pytest.mark.parametrize(
    "text", ["{", "", "[1]", "null", '{"a": NaN}', "[" * 100_000, '{"a":' * 100_000, "1" * 5000]
)
def test_json_that_is_no_object_is_one_error(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"a\.json"):
        read_object(path, CheckpointError)


def test_json_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"none\.json: cannot be read: No such file"):
        read_object(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"cannot be read: Is a directory"):
        read_object(tmp_path)
    (tmp_path / "a.json").write_bytes(b"\xff{}")
    with pytest.raises(InputError, match="is not JSON"):
        read_object(tmp_path / "a.json")


def test_a_tensor_that_is_in_two_files(tmp_path):
    for name in ("a", "b"):
        save_file({"w": torch.zeros(1), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(
        CheckpointError, match=r"b\.safetensors: w is in another weight file as well"
    ):
        stored(files)
