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
    mask_id=st.none() | st.integers(0, 2 * 10**6),
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
    "family": "llada", "mask_id": 3, "end_ids": [2], "logit_shift": 0, "rope_fp32": True,
    "prompt_rule": "bidirectional",
}  # fmt: skip


def write(folder, values):
    (folder / FILE_NAME).write_text(json.dumps(values))


@given(contract=contracts)
def test_what_is_saved_is_read_back(tmp_path_factory, contract):
    folder = tmp_path_factory.mktemp("contract")
    contract.save(folder)
    assert Contract.load(folder) == contract


def test_fields_left_out_and_a_folder_without_one(tmp_path):
    assert Contract.load(tmp_path) is None
    write(tmp_path, GOOD)
    contract = Contract.load(tmp_path)
    assert contract.end_ids == (2,)
    assert (contract.block_size, contract.noise, contract.base_hash) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mask_ids": 3}, r"mask_ids: there is no such key; did you mean mask_id\?"),
        ({"mask_id": -1}, "mask_id: expected .*0.*, got -1"),
        ({"end_ids": [2, -5]}, "end_ids.1: expected .*0.*, got -5"),
        ({"mask_id": "3"}, "mask_id: expected"),
        ({"mask_id": True}, "mask_id: expected"),
        ({"end_ids": None}, "end_ids: expected"),
        ({"logit_shift": False}, "logit_shift: expected"),
        ({"logit_shift": 2}, "logit_shift: expected"),
        ({"rope_fp32": 1}, "rope_fp32: expected"),
        ({"block_size": 8.0}, "block_size: expected"),
        ({"block_size": 2**20 + 1}, "block_size: expected"),
        ({"noise": [0.2, 0.5, 0.7]}, "noise: "),
        ({"noise": [0.5, 0.3]}, "noise: expected the lower"),
        ({"noise": [-0.1, 0.2]}, "noise.0: expected"),
        ({"base_hash": "0" * 63}, "base_hash: expected"),
        ({"prompt_rule": "evil"}, "prompt_rule: expected .*bidirectional"),
        ({"objective": "world peace"}, "objective: expected .*wino_plus"),
    ],
)
def test_keys_types_and_values_that_make_no_sense(tmp_path, changes, said):
    """A file that was edited by hand; each would be read as something else later."""
    write(tmp_path, GOOD | changes)
    with pytest.raises(CheckpointError, match=f"{FILE_NAME}: {said}"):
        Contract.load(tmp_path)
