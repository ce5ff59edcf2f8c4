import pytest
import torch
from tiny import random_model

from d2f.saving import save_model


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> str:
    """A small random D2F model, as a folder."""
    folder = tmp_path_factory.mktemp("model") / "llada"
    save_model(random_model("llada"), folder, dtype=torch.float32, objective="d2f")
    return str(folder)
