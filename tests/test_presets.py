"""The decoder options that ship in configs/ are options that decoders take."""

from pathlib import Path

import pytest

from d2f.config import read_mapping
from decode.cli import split
from decode.decoders import DECODERS

CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = sorted([*(CONFIGS / "published").glob("*.yaml"), *(CONFIGS / "tuned").glob("*.yaml")])


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_taken_whole(path):
    name, given = split(read_mapping(path), str(path))
    decoder = DECODERS[name or "d2f"](**given)
    assert all(getattr(decoder, key) == value for key, value in given.items())


def test_the_published_settings_of_d2f_are_there():
    """Table of arXiv 2508.09192's official evaluation scripts: block size, tau_add, tau_conf."""
    found = {}
    for path in PRESETS:
        if path.stem.startswith("d2f-"):
            v = read_mapping(path)
            found[path.stem] = (v["block_size"], v["tau_add"], v["tau_conf"])
    assert found == {
        "d2f-llada-gsm8k": (64, 0.7, 0.9), "d2f-llada-mbpp": (32, 0.9, 0.9),
        "d2f-llada-humaneval": (32, 0.1, 0.9), "d2f-llada-math": (32, 0.1, 0.9),
        "d2f-dream-gsm8k-cot": (32, 0.1, 0.9), "d2f-dream-mbpp": (48, 0.1, 0.9),
        "d2f-dream-humaneval": (32, 0.9, 0.95), "d2f-dream-math": (64, 0.1, 0.9),
    }  # fmt: skip
