"""Random models of each kind for the command; shared, so never to be changed."""

import shutil

import pytest
import torch
from files import CONTEXT
from safetensors.torch import load_file, save_file

from d2f.convert import build
from d2f.saving import save_model
from d2f.tasks.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(400)


def make_model(place, family, tokenizer, **contract):
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1}
    model = build(family, tokenizer, context_length=CONTEXT, **shape)
    with torch.no_grad():
        model.backbone.lm_head.weight.mul_(12)
    save_model(model, place, dtype=torch.float32, **contract)
    return str(place)


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
