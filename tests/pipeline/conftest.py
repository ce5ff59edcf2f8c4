"""Random models of each kind for the command; shared, so never to be changed."""

import shutil

import pytest
import torch
from files import make_model
from safetensors.torch import load_file, save_file

from d2f.tasks.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(400)


@pytest.fixture(scope="session")
def student(folder, tokenizer):
    return make_model(folder / "student", "dream", tokenizer, objective="d2f", block_size=16)


@pytest.fixture(scope="session")
def teacher(folder, tokenizer):
    return make_model(folder / "teacher", "llada", tokenizer, objective="masked_diffusion")


@pytest.fixture(scope="session")
def causal(folder, tokenizer):
    return make_model(folder / "causal", "causal", tokenizer, objective="next_token")


@pytest.fixture(scope="session")
def wino_plus(folder, tokenizer):
    return make_model(
        folder / "wino-plus", "llada", tokenizer, objective="wino_plus", block_size=16
    )


@pytest.fixture(scope="session")
def broken(folder, student):
    """The student with a NaN embedding of token 5, which this project would not save."""
    place = folder / "broken"
    shutil.copytree(student, place)
    weights = load_file(place / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = torch.nan
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    return str(place)
