"""What is fetched from the hub: never a pickle, and no weights where none are read."""

from __future__ import annotations

import pytest
from huggingface_hub.utils import filter_repo_objects

from d2f import checkpoint as hub
from d2f.errors import CheckpointError
from d2f.loading import load

FILES = [
    "config.json", "tokenizer.json", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
    "consolidated.00.pth", "model.q4.gguf",
]  # fmt: skip
WEIGHTS = {name for name in FILES if name.endswith(".safetensors")}


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """The files of a repository that the last call would have fetched."""
    names: list[set[str]] = []

    def fetch(repo, *, allow_patterns=None, ignore_patterns=None, **more):
        found = filter_repo_objects(
            FILES, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        names.append(set(found))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    return names


def test_weights_are_fetched_as_safetensors_only(fetched):
    hub.folder_of("someone/model")
    assert fetched[0] >= WEIGHTS | {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert not {name for name in fetched[0] if name.endswith((".bin", ".pth", ".gguf"))}


def test_on_meta_nothing_but_the_small_files_is_fetched(fetched):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load("someone/model", device="meta")  # the folder that came is empty
    assert fetched and not any(names & WEIGHTS for names in fetched)
    assert "config.json" in fetched[0]
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load("someone/model", device="cpu")
    assert fetched[-1] >= WEIGHTS
