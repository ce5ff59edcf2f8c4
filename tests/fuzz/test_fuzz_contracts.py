"""Whatever a contract says, the checkpoint loads and decodes, or is refused in one line."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.loading import load
from tests.fuzz.folders import NATIVE, change, edited, laid, put, put_json, tokens
from tests.fuzz.odd import VALUES, damaged
from tests.fuzz.outcome import attempt, budget

NAME = "d2f_contract.json"
OTHERS = {
    "family": ["llada", "dream", "sdar", "wedlm", "causal"],
    "mask_id": [0, 1, 2, None, 299, 300],
    "end_ids": [[], [0], [0, 0], [5, 6], [299], [300]],
    "logit_shift": [0, 1],
    "rope_fp32": [True, False],
    "prompt_rule": ["bidirectional", "block", "block_causal", "causal"],
    "objective": [None, "d2f", "masked_diffusion", "next_token", "wedlm", "wino_plus"],
    "block_size": [None, 1, 4, 10**6],
    "noise": [None, [0, 1], [0.2, 0.7], [0.5, 0.5]],
    "base": [None, "", "owner/name", "../x"],
    "base_hash": [None, "", "0" * 64],
}
# Say how a model was trained, or what it is called: the decoder here has its own block size.
IDLE = {"objective", "block_size", "noise", "base", "base_hash"}
NO_ID = [-1, 10**12, 2**64, 1.5, True, "mask"]
NONSENSE = {
    "family": ["gpt", "", None, 3, [], ...],
    "mask_id": [*NO_ID, 0, 300, [1], {}, ...],
    "end_ids": [[i] for i in NO_ID] + [[1], [300], [[0]], [None], None, 0, "0", {}, ...],
    "logit_shift": [-1, 2, 0.5, True, "1", None, 10**12, ...],
    "rope_fp32": [0, 1, "true", None, [], ...],
    "prompt_rule": ["evil", "", None, 3, [], "Causal", ...],
    "objective": ["evil", "", 3, [], True],
    "block_size": [0, -1, 1.5, "4", True, [], 10**12, 2**64],
    "noise": [[5, -3], [0.7, 0.2], [-0.1, 0.5], [0.5, 1.5], [0.5], [], [0, 1, 1], "0.2",
              ["a", "b"], [None, None], [True, True], 0.5, {}],
    "base": [3, [], True, {}],
    "base_hash": [3, [], True, {}, "x", "../..", "0" * 65],
    "x": [1],
}  # fmt: skip


@pytest.fixture(scope="module")
def want(folders):
    """The tokens of an undamaged base, by name."""
    return cache(lambda name: tokens(load(folders / name, device="cpu")))


@budget(0.4)
@given(data=st.data())
def test_changed_contract(folders, place, want, data):
    name = data.draw(st.sampled_from(NATIVE))
    folder = laid(folders / name, place)
    before = json.loads((folder / NAME).read_text())
    after = data.draw(edited(before, OTHERS))
    put_json(folder, NAME, after)
    model = attempt(lambda: load(folder, device="cpu"))
    came = None if model is None else attempt(lambda: tokens(model))
    odd = {key for key in before.keys() | after if before.get(key, ...) != after.get(key, ...)}
    if came is not None and odd <= IDLE:
        assert came == want(name), odd


@budget(0.2)
@given(data=st.data())
def test_damaged_text(folders, place, data):
    folder = laid(folders / data.draw(st.sampled_from(NATIVE)), place)
    text = (folder / NAME).read_text(encoding="utf-8")
    put(folder, NAME, data.draw(damaged(text)))
    model = attempt(lambda: load(folder, device="cpu"))
    if model is not None:
        attempt(lambda: tokens(model))


@budget(0.2)
@given(st.binary(max_size=100) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(folders, place, content):
    folder = laid(folders / "llada", place)
    put(folder, NAME, content)
    attempt(lambda: load(folder, device="cpu"), nonsense=True)


CASES = [
    pytest.param(key, value, id=f"{key}-{str(value)[:40]}")
    for key, values in NONSENSE.items()
    for value in values
]


@pytest.mark.parametrize(("key", "value"), CASES)
def test_nonsense_is_refused(folders, place, key, value):
    folder = laid(folders / "llada", place)
    change(folder, NAME, {key: value})
    attempt(lambda: load(folder, device="cpu"), nonsense=True)
