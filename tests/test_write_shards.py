"""Weights are written one after another: the bytes that safetensors writes, in files of a size, and
nothing where a value is not finite."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import random_model

import d2f
from d2f.checkpoint import Weight, write_shards
from d2f.errors import CheckpointError, InputError
from decode import D2F, generate

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 5), max_size=3)
# No surrogates: JSON has no word for them, nor has a module's name.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)


def weights(tensors: dict[str, torch.Tensor]) -> dict[str, Weight]:
    return {
        name: Weight(tuple(value.shape), partial(torch.Tensor.clone, value))
        for name, value in tensors.items()
    }


@given(st.dictionaries(NAMES, SHAPES, min_size=1, max_size=6), DTYPES)
def test_a_file_is_what_safetensors_writes(tmp_path_factory, shapes, dtype):
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    write_shards(weights(tensors), folder, dtype)
    converted = {name: value.to(dtype) for name, value in tensors.items()}
    save_file(converted, folder / "theirs", metadata={"format": "pt"})
    assert (folder / "model.safetensors").read_bytes() == (folder / "theirs").read_bytes()


def test_a_model_in_several_files_is_the_same_model(tmp_path):
    model = random_model("llada")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    model.save(whole)
    model.save(parts, max_shard_size="20KB")
    names = sorted(path.name for path in parts.glob("model*.safetensors"))
    assert len(names) > 3 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    sizes = {path.name: path.stat().st_size for path in parts.glob("*.safetensors")}
    held: dict[str, torch.Tensor] = {}
    for name in names:
        tensors = load_file(parts / name)
        assert all(index["weight_map"][one] == name for one in tensors)
        # A tensor larger than that has a file of its own.
        assert sizes[name] < 25_000 or len(tensors) == 1
        held |= tensors
    expected = load_file(whole / "model.safetensors")
    assert held.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(held[name], expected[name]) for name in held)
    one, other = (
        generate(d2f.load(f), [[5, 6, 7]], D2F(4, max_new_tokens=8)) for f in (whole, parts)
    )
    assert one[0].tokens == other[0].tokens


def test_a_save_of_another_number_of_files_takes_the_place_of_one(tmp_path):
    model, place = random_model("llada"), tmp_path / "model"
    for size, files in (("20KB", False), ("1GB", True), ("20KB", False)):
        model.save(place, max_shard_size=size)
        assert (place / "model.safetensors").exists() is files
        assert (place / "model.safetensors.index.json").exists() is not files
        assert d2f.load(place).vocab_size == model.vocab_size
    (place / "modelling.safetensors.txt").touch()
    with pytest.raises(InputError, match="which a saved model does not have"):
        model.save(place)


def test_what_is_not_finite_is_not_written(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.full((4,), 1e30), "c": torch.full((2,), torch.nan)}
    with pytest.raises(CheckpointError, match="in 2 of 3 tensors in float16, first b"):
        write_shards(weights(tensors), tmp_path, torch.float16, 8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["", "5", "many", "5XB", "-1GB"])
def test_a_size_that_is_none_is_refused(tmp_path, size):
    with pytest.raises(InputError, match="max_shard_size"):
        random_model("llada").save(tmp_path / "model", max_shard_size=size)
    assert not (tmp_path / "model").exists()
