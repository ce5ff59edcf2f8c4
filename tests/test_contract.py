"""The contract saved with a checkpoint: written, read back, and refused when damaged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.contract import FILE_NAME, Contract
from d2f.errors import CheckpointError

ratios = st.floats(0, 1)
bounds = st.tuples(ratios, ratios).map(lambda pair: (min(pair), max(pair)))
contracts = st.builds(
    Contract,
    family=st.sampled_from(["llada", "dream", "causal"]),
    mask_id=st.none() | st.integers(10**6 + 1, 2 * 10**6),  # no end id
    end_ids=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    logit_shift=st.integers(0, 1),
    rope_fp32=st.booleans(),
    prompt_rule=st.sampled_from(["bidirectional", "block", "block_causal", "causal"]),
    objective=st.none() | st.sampled_from(["d2f", "next_token"]),
    block_size=st.none() | st.integers(1, 64),
    noise=st.none() | bounds,
    base=st.none() | st.text(),
    base_hash=st.none() | st.text(alphabet="0123456789abcdef", min_size=64, max_size=64),
)
GOOD = {
    "family": "llada",
    "mask_id": 3,
    "end_ids": [2],
    "logit_shift": 0,
    "rope_fp32": True,
    "prompt_rule": "bidirectional",
}


def write(folder, values):
    (folder / FILE_NAME).write_text(json.dumps(values))


@given(contract=contracts)
def test_what_is_saved_is_read_back(tmp_path_factory, contract):
    folder = tmp_path_factory.mktemp("contract")
    contract.save(folder)
    assert Contract.load(folder) == contract


def test_a_folder_without_one(tmp_path):
    assert Contract.load(tmp_path) is None


def test_optional_fields_may_be_left_out(tmp_path):
    write(tmp_path, GOOD)
    contract = Contract.load(tmp_path)
    assert contract.end_ids == (2,)
    assert (contract.block_size, contract.noise, contract.base_hash) == (None, None, None)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "must be a JSON object"),
        ({}, "family: expected .* got nothing"),
        (GOOD | {"mask_ids": 3}, r"mask_ids: there is no such key; did you mean mask_id\?"),
        ({k: v for k, v in GOOD.items() if k != "mask_id"}, "mask_id: expected .* got nothing"),
        (GOOD | {"mask_id": -1}, "mask_id: expected .*0.*, got -1"),
        (GOOD | {"end_ids": [2, -5]}, "end_ids.1: expected .*0.*, got -5"),
    ],
)
def test_other_keys_and_ids_below_0(tmp_path, values, said):
    write(tmp_path, values)
    with pytest.raises(CheckpointError, match=said):
        Contract.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("family", 3),
        ("mask_id", "3"),
        ("mask_id", True),
        ("end_ids", 2),
        ("end_ids", None),
        ("logit_shift", "1"),
        ("logit_shift", False),
        ("rope_fp32", 1),
        ("prompt_rule", None),
        ("block_size", 8.0),
        ("noise", 0.2),
        ("noise", [0.2, 0.5, 0.7]),
        ("base_hash", 12),
    ],
)
def test_wrong_type(tmp_path, name, value):
    write(tmp_path, GOOD | {name: value})
    with pytest.raises(CheckpointError) as caught:
        Contract.load(tmp_path)
    assert f"{FILE_NAME}: {name}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_shift", 2),
        ("block_size", 0),
        ("block_size", 2**20 + 1),
        ("base_hash", "0" * 63),
        ("prompt_rule", "evil"),
        ("objective", "world peace"),
        ("noise", [5, -3]),
        ("noise", [-0.1, 0.2]),
        ("mask_id", 2),
    ],
)
def test_values_that_make_no_sense(tmp_path, name, value):
    """A file that was edited by hand; each would be read as something else later."""
    write(tmp_path, GOOD | {name: value})
    with pytest.raises(CheckpointError, match=rf"{FILE_NAME}: {name}[.\d]*: expected"):
        Contract.load(tmp_path)
