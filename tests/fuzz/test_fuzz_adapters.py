"""Whatever an adapter's files hold, it goes onto its base and decodes, or is refused in one
line; what changes nothing changes no token, and nonsense is refused."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from d2f.loading import load
from tests.fuzz.folders import (
    ADAPTER,
    change,
    change_tensors,
    edited,
    header,
    laid,
    put,
    put_json,
    tokens,
    with_header,
)
from tests.fuzz.odd import TEXT, VALUES, damaged
from tests.fuzz.outcome import attempt, budget
from tests.fuzz.test_fuzz_checkpoints import cut_or_changed

NAME = "adapter_config.json"
BASE = {"adapter": "llada-official", "own-adapter": "dream"}
PAIRS = st.sampled_from(sorted(BASE.items()))
OTHERS = {
    "r": [2, 4, 4.0, 8, 10**6],
    "lora_alpha": [1, 8, 8.0, 1e-30, 1e30],
    "lora_dropout": [0, 0.1, 0.999, None],
    "target_modules": [["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["lm_head"], "q_proj"],
    "init_lora_weights": [True, False, "gaussian", "eva", "pissa", "olora"],
    "use_rslora": [True, False],
    "use_dora": [True],
    "bias": ["all", "lora_only"],
    "modules_to_save": [["lm_head"], []],
    "layers_to_transform": [[0], 0],
    "rank_pattern": [{}, {"q_proj": 8}],
    "base_model_name_or_path": ["", "owner/name", None],
    "auto_mapping": [None, {"base_model_class": "DreamModel"}, {"base_model_class": "LLaDAModel"}],
    "task_type": ["CAUSAL_LM"],
    "peft_version": ["0.99"],
}  # fmt: skip
IDLE = {"peft_version", "task_type", "inference_mode", "revision", "megatron_core", "lora_dropout",
        "layers_pattern", "eva_config", "ensure_weight_tying", "runtime_config",
        "init_lora_weights"}  # fmt: skip
NONSENSE = {
    "r": [0, -1, 10**6, 10**12, 2**64, 4.5, "4", True, None, [], {}, 3, ...],
    "lora_alpha": [0, -1, "8", True, None, [], 10**400, ...],
    "lora_dropout": [2.0, 1, 1.0, -0.1, "0.1", [0.1], {"a": 1}, True, 10**400],
    "target_modules": [None, [], {}, 3, "q_proj", "all-linear", [3], [None], [["q_proj"]],
                       ["evil"], [""], ["q_proj", "q_proj_"], [".*"], ["q_proj"], ...],
    "peft_type": ["IA3", "lora", None, 3, [], "", ...],
    "use_rslora": ["yes", 3, [1]],
    "use_dora": [True, "yes"],
    "bias": ["all", "lora_only", "evil", 3],
    "init_lora_weights": ["pissa", "olora", "loftq", "corda", "evil", 3, {}, []],
    "layers_to_transform": [0, [0], [99]],
    "layer_replication": [[[0, 2]]],
    "modules_to_save": [["lm_head"]],
    "lora_bias": [True],
    "use_qalora": [True],
    "fan_in_fan_out": [True],
    "rank_pattern": [{"q_proj": 8}],
    "alpha_pattern": [{"q_proj": 8}],
    "base_model_name_or_path": [3, [], {}, True],
    "auto_mapping": [[1], "x", 3, {"base_model_class": "DreamModel"}],
    "x": [1, "on", [0]],
}  # fmt: skip


@pytest.fixture(scope="module")
def want(folders):
    """The tokens with an undamaged adapter, by its name."""
    return cache(
        lambda name: tokens(load(folders / BASE[name], adapter=folders / name, device="cpu"))
    )


@pytest.fixture(scope="module")
def decoded(folders, place):
    """The tokens of a base with the adapter laid out at `place`, None where it was refused."""

    def run(base):
        model = attempt(lambda: load(folders / base, adapter=place, device="cpu"))
        return None if model is None else attempt(lambda: tokens(model))

    return run


@budget(0.4)
@given(pair=PAIRS, data=st.data())
def test_changed_config(folders, place, want, decoded, pair, data):
    name, base = pair
    folder = laid(folders / name, place)
    before = json.loads((folder / NAME).read_text())
    after = data.draw(edited(before, OTHERS))
    put_json(folder, NAME, after)
    came = decoded(base)
    odd = {key for key in before.keys() | after if before.get(key, ...) != after.get(key, ...)}
    if came is not None and odd <= IDLE:
        assert came == want(name), odd


@budget(0.2)
@given(pair=PAIRS, data=st.data())
def test_damaged_text(folders, place, decoded, pair, data):
    name, base = pair
    folder = laid(folders / name, place)
    text = (folder / NAME).read_text(encoding="utf-8")
    put(folder, NAME, data.draw(damaged(text)))
    decoded(base)


@budget(0.1)
@given(
    st.sampled_from([NAME, ADAPTER, "d2f_contract.json"]),
    st.binary(max_size=100) | VALUES.map(lambda value: json.dumps(value).encode()),
)
def test_any_bytes(folders, place, name, content):
    folder = laid(folders / "own-adapter", place)
    put(folder, name, content)
    attempt(lambda: load(folders / "dream", adapter=folder, device="cpu"), nonsense=True)


CASES = [
    pytest.param(key, value, id=f"{key}-{str(value)[:40]}")
    for key, values in NONSENSE.items()
    for value in values
]


@pytest.mark.parametrize(("key", "value"), CASES)
def test_nonsense_is_refused(folders, place, key, value):
    folder = laid(folders / "adapter", place)
    change(folder, NAME, {key: value})
    base = folders / BASE["adapter"]
    attempt(lambda: load(base, adapter=folder, device="cpu"), nonsense=True)


@budget(0.2)
@given(pair=PAIRS, data=st.data())
def test_damaged_weights(folders, place, decoded, pair, data):
    name, base = pair
    folder = laid(folders / name, place)
    put(folder, ADAPTER, data.draw(cut_or_changed((folder / ADAPTER).read_bytes())))
    decoded(base)


@budget(0.2)
@given(pair=PAIRS, data=st.data())
def test_changed_header(folders, place, decoded, pair, data):
    name, base = pair
    folder = laid(folders / name, place)
    values, rest = header((folder / ADAPTER).read_bytes())
    key = data.draw(st.sampled_from(sorted(values)))
    kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "whole", "name", "gone"]))
    if kind == "gone":
        del values[key]
    elif kind == "name":
        values[data.draw(TEXT)] = values.pop(key)
    elif kind == "whole" or not isinstance(values[key], dict):
        values[key] = data.draw(VALUES)
    else:
        values[key][kind] = data.draw(st.sampled_from(["F16", "I64", [2, 2], [0, 8]]) | VALUES)
    put(folder, ADAPTER, with_header(values, rest))
    decoded(base)


@budget(0.2)
@given(pair=PAIRS, data=st.data())
def test_changed_tensors(folders, place, decoded, pair, data):
    """Odd values are decoded or named; tensors of another type, shape, or number are refused."""
    name, base = pair
    folder = laid(folders / name, place)
    held = load_file(folder / ADAPTER)
    key = data.draw(st.sampled_from(sorted(held)))
    value = held[key]
    kind = data.draw(st.sampled_from(["fill", "int", "shape", "extra", "gone", "empty"]))
    if kind == "fill":
        number = data.draw(st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e30, -1e38]))
        change_tensors(folder, ADAPTER, {key: torch.full_like(value, number)})
        decoded(base)
        return
    dtype = data.draw(st.sampled_from([torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn]))
    shapes = [value[1:], value[:, 1:], value[None], value.new_zeros(())]
    odd = {
        "int": value.to(dtype),
        "shape": data.draw(st.sampled_from(shapes)),
        "extra": value,
        "gone": None,
        "empty": value.new_zeros(0),
    }[kind]
    extra = data.draw(st.sampled_from(["x", f"{key}.x", f"{key}_scale"]))
    change_tensors(folder, ADAPTER, {extra if kind == "extra" else key: odd})
    attempt(lambda: load(folders / base, adapter=folder, device="cpu"), nonsense=True)


@budget(0.1)
@given(
    st.sampled_from(["", "tiny-d2f", "owner/name", ".", "..", "x" * 300, "a/b/c", "\0", "\ud800"])
    | TEXT
    | VALUES
)
def test_any_base_of_an_adapter_alone(folders, place, base):
    """The folder as the model: its base is loaded where it is at hand."""
    folder = laid(folders / "own-adapter", place)
    change(folder, NAME, {"base_model_name_or_path": base})
    attempt(lambda: load(folder, device="cpu"))
