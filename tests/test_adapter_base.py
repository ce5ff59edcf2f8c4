"""An adapter on a base that is not its own: refused where that is known, never silent."""

import dataclasses
import json
import shutil
import warnings

import pytest
from safetensors.torch import load_file, save_file

from d2f.adapters import base_name, fingerprint
from d2f.errors import CheckpointError, UnverifiedBaseWarning
from d2f.loading import load
from d2f.models import HERE

INSTRUCT = "GSAI-ML/LLaDA-8B-Instruct"


@pytest.fixture
def adapter(golden, tmp_path):
    """The golden LLaDA adapter, made for the base of a given name: adapter(name) -> folder."""

    def make(name):
        folder = shutil.copytree(golden / "llada-tiny/adapter", tmp_path / "adapter")
        path = folder / "adapter_config.json"
        values = json.loads(path.read_text()) | {"base_model_name_or_path": name}
        path.write_text(json.dumps(values))
        return folder

    return make


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


def test_random_weights_of_the_same_shape_are_not_taken_silently(golden, tmp_path, adapter):
    place = folder_of_base(golden, tmp_path / "random", nudge=0.5)
    warned(place, adapter(""), "a base that it does not name", str(place))


@pytest.mark.parametrize("name", [INSTRUCT, "gsai-ml/llada-8b-instruct"])
def test_the_base_by_its_hub_name(golden, tmp_path, adapter, name):
    silent(snapshot(golden, tmp_path, INSTRUCT), adapter(name))


def test_another_base_of_the_hub_is_refused(golden, tmp_path, adapter):
    place = snapshot(golden, tmp_path, "GSAI-ML/LLaDA-8B-Base")
    with pytest.raises(CheckpointError) as caught:
        load(place, adapter=adapter(INSTRUCT), device="cpu")
    assert f"belongs to the base {INSTRUCT}, this base is GSAI-ML/LLaDA-8B-Base" in str(
        caught.value
    )


def test_a_bundled_model_is_not_a_base_of_the_hub(tmp_path, adapter):
    """Bundled models are known by name too."""
    folder = adapter(INSTRUCT)
    values = json.loads((folder / "adapter_config.json").read_text()) | {"auto_mapping": None}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"the base {INSTRUCT}, this base is tiny-teacher"):
        load("tiny-teacher", adapter=folder, device="cpu")


@pytest.mark.parametrize("name", [INSTRUCT, "/home/them/models/llada"])
def test_a_download_under_a_name_of_ones_own_warns(golden, tmp_path, adapter, name):
    """Nothing is known of a local folder, or of a folder on the machine of whoever trained."""
    warned(folder_of_base(golden, tmp_path / "data" / "mine"), adapter(name), name, "mine")


def test_a_local_path_beside_a_hub_name_warns(golden, tmp_path, adapter):
    warned(snapshot(golden, tmp_path, INSTRUCT), adapter("/home/them/models/llada"), INSTRUCT)


def test_another_owners_copy_of_the_same_name_warns(golden, tmp_path, adapter):
    warned(snapshot(golden, tmp_path, "someone/LLaDA-8B-Instruct"), adapter(INSTRUCT), "someone/")


@pytest.mark.parametrize("name", [INSTRUCT, "/home/them/models/llada-8b-instruct/"])
def test_a_folder_of_the_bases_name(golden, tmp_path, adapter, name):
    silent(folder_of_base(golden, tmp_path / "data" / "LLaDA-8B-Instruct"), adapter(name))


def test_a_named_folder_that_is_here_decides_by_its_weights(golden, tmp_path, adapter):
    named = folder_of_base(golden, tmp_path / "named")
    folder = adapter(str(named))
    silent(named, folder)
    silent(folder_of_base(golden, tmp_path / "same"), folder)
    other = folder_of_base(golden, tmp_path / "other", nudge=0.5)
    with pytest.raises(CheckpointError) as caught:
        load(other, adapter=folder, device="cpu")
    for text in (str(named), fingerprint(str(named))[:12], str(other)):
        assert text in str(caught.value)


def test_a_hash_decides_whatever_the_names(golden, tmp_path, adapter, llada):
    folder = adapter(INSTRUCT)
    hash_ = fingerprint(str(golden / "llada-tiny"))
    dataclasses.replace(llada.contract, base=INSTRUCT, base_hash=hash_).save(folder)
    silent(folder_of_base(golden, tmp_path / "mine"), folder)
    silent(snapshot(golden, tmp_path, "GSAI-ML/LLaDA-8B-Base"), folder)
    other = folder_of_base(golden, tmp_path / "LLaDA-8B-Instruct", nudge=0.5)
    with pytest.raises(CheckpointError, match=f"belongs to the base {INSTRUCT}"):
        load(other, adapter=folder, device="cpu")


@pytest.mark.parametrize("name", ["tiny-wino-plus", "tiny-wino-plus-d2f", "tiny-d2f-long"])
def test_the_bundled_adapters_are_on_their_base(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnverifiedBaseWarning)
        assert load(name, device="cpu").adapter is not None


@pytest.mark.parametrize("name", [3, ["a"], "x" * 5000, "a\x00b"])
def test_names_that_are_none(golden, adapter, name):
    folder = adapter(name)
    if isinstance(name, str):
        warned(golden / "llada-tiny", folder)
    else:
        with pytest.raises(CheckpointError, match="base_model_name_or_path must be text"):
            load(golden / "llada-tiny", adapter=folder, device="cpu")


def test_what_a_folder_says_of_its_models_name(golden, tmp_path):
    assert base_name(str(snapshot(golden, tmp_path, INSTRUCT))) == INSTRUCT
    assert base_name(str(HERE / "tiny-teacher")) == "tiny-teacher"
    assert base_name(str(tmp_path / "LLaDA-8B-Instruct")) is None
    assert base_name(None) is None
