"""Whatever a checkpoint's config.json and weight files hold, it loads and decodes, or is refused
in one line; what changes nothing changes no token, and nonsense is refused."""

from __future__ import annotations

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config

from d2f.loading import load
from tests.fuzz.folders import (
    BASES,
    NATIVE,
    WEIGHTS,
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

INDEX = f"{WEIGHTS}.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# Say nothing that a decoded token depends on.
IDLE = {"architectures", "attention_dropout", "bos_token_id", "dtype", "initializer_range",
        "pad_token_id", "torch_dtype", "transformers_version", "use_cache", "auto_map",
        "_name_or_path", "pretraining_tp", "max_window_layers", "init_std", "init_device",
        "residual_dropout", "embedding_dropout", "init_fn", "flash_attention", "precision",
        "output_attentions", "output_hidden_states", "return_dict", "id2label", "num_labels",
        "problem_type", "task_specific_params", "is_decoder", "tokenizer_class"}  # fmt: skip
ROPES = [{"rope_type": kind, "rope_theta": 1e4, **more}
         for kind in ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "axial")
         for more in ({}, {"factor": 2.0}, {"factor": 0.5}, {"factor": "x"}, {"factor": 0},
                      {"factor": 4.0, "original_max_position_embeddings": 64},
                      {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 64},
                      {"partial_rotary_factor": 0.5}, {"beta_fast": -1, "factor": 2.0})
        ]  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "rope_parameters": ROPES,
    "rope_scaling": ROPES + [{**rope, "type": rope["rope_type"]} for rope in ROPES],
    "head_dim": [4, 8, 16, 7, 64],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"], ["x"]],
    "sliding_window": [None, 4, 4096],
    "use_sliding_window": [True, False],
    "tie_word_embeddings": [True],
    "attention_bias": [True],
    "mlp_bias": [True],
    "qk_norm": [True, False],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}],
    "hidden_act": ["gelu", "relu", "silu", "swish", "evil"],
    "eos_token_id": [0, 1, 2, 3, [0, 2], None],
    "mask_token_id": [0, 1, 2, 3, None],
    "model_type": ["llama", "qwen2", "qwen3", "llada", "Dream", "sdar", "wedlm", "gpt2"],
    "embedding_size": [None, 96, 128],
    "block_size": [4, 8, 0],
    "weight_tying": [True],
    "dtype": ["float16", "float32", "bfloat16", "int8", "evil"],
    "torch_dtype": ["float16", "bfloat16", "int8", "evil"],
    "attn_implementation": ["eager", "evil"],
    "_attn_implementation": ["flash_attention_2", "evil"],
    "return_dict": [False],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "is_decoder": [True, False],
    "use_return_dict": [False],
    "num_labels": [0, -1, 10**9],
    "id2label": [{}, {"0": "a"}, "x"],
    "auto_map": [{"AutoModel": "evil.Evil"}],
    "_name_or_path": ["../x"],
    "pruned_heads": [{"0": [1]}],
    "attribute_map": [{"hidden_size": "x"}],
    "base_model_tp_plan": [{"a": "b"}],
    "tokenizer_class": ["Evil"],
    "chunk_size_feed_forward": [2, -1],
    "transformers_version": ["0.0", "evil"],
}  # fmt: skip
ATTRIBUTES = sorted({*dir(LlamaConfig()), *dir(Qwen2Config())})
NO_SIZE = [0, -1, 10**12, "64", 1.5, True, []]
NO_NUMBER = [-1, "x", True, [], 10**400]
NO_ID = [-1, 10**12, 2**63, "mask", 1.5, True, {}, [[1]], ["a"], [-1]]
NO_ROPE = ["x", 3, [], {"rope_type": "evil"}, {"rope_type": 3}, {"rope_type": []},
           {"rope_type": "linear"}, {"rope_type": "linear", "factor": -1},
           {"rope_type": "linear", "factor": 0}, {"rope_type": "linear", "factor": "x"},
           {"rope_type": "yarn", "factor": True}, {"rope_type": "default", "rope_theta": -1},
           {"rope_type": "default", "rope_theta": 0}, {"rope_type": "default", "rope_theta": "x"},
           {"rope_type": "longrope", "factor": 2.0}, {"rope_type": "dynamic", "factor": 1e400},
           {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": -1}]  # fmt: skip
NONSENSE: dict[str, dict[str, list[Any]]] = {
    "llada-official": {
        **dict.fromkeys(("d_model", "n_heads", "n_layers", "mlp_hidden_size",
                         "max_sequence_length"), NO_SIZE),
        "vocab_size": [-1, 10**12, "many", 1.5, True],
        "embedding_size": [-1, 10**12, "many", 95, 97],
        "n_kv_heads": [-1, 3, 8, "x", 1.5, 10**12],
        "rms_norm_eps": [*NO_NUMBER, 2],
        "rope_theta": [*NO_NUMBER, 0, None],
        "mask_token_id": [*NO_ID, 96, 2, None, ...],
        "eos_token_id": [*NO_ID, 96, 3, [2, 3]],
        "model_type": ["gpt2", "", None, 3, [], ...],
        "weight_tying": ["yes", 3, True],
        "rope_full_precision": [False],
    },
    "dream-official": {
        **dict.fromkeys(("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
                         "intermediate_size", "num_key_value_heads", "max_position_embeddings",
                         "head_dim"), NO_SIZE),
        "rms_norm_eps": [*NO_NUMBER, 2, None],
        "rope_theta": [*NO_NUMBER, 0],
        "rope_scaling": [rope for rope in NO_ROPE if rope != []],
        "hidden_act": ["evil", "", 3, None, [], {}],
        "mask_token_id": [*NO_ID, 96, 2, None, ...],
        "eos_token_id": [*NO_ID, 96, 3],
        "use_sliding_window": ["yes", 3],
        "layer_types": [["evil"] * 3, ["full_attention"], ["sliding_attention"] * 3, "x"],
        "tie_word_embeddings": ["yes", 3, True],
        "quantization_config": [{"quant_method": "gptq"}, "int4"],
    },
    "causal": {
        "hidden_size": [*NO_SIZE, 33],
        "num_attention_heads": [*NO_SIZE, 3, 8],
        "rope_parameters": NO_ROPE,
        "head_dim": [*NO_SIZE, 7],
        "hidden_act": ["evil", 3],
        "vocab_size": [*NO_SIZE, 1],
        "attention_bias": [True],
        "mlp_bias": [True],
    },
    "sdar-official": {
        "block_size": [0, -1, 1.5, "x", True],
        "head_dim": NO_SIZE,
        "num_key_value_heads": [*NO_SIZE, 3],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def want(folders):
    """The tokens of an undamaged base, by name."""
    return cache(lambda name: tokens(load(folders / name, device="cpu")))


def decoded(folder: Path) -> list[int] | None:
    """The tokens of the checkpoint in a folder, None where it was refused."""
    model = attempt(lambda: load(folder, device="cpu"))
    return None if model is None else attempt(lambda: tokens(model))


@budget(0.5)
@given(data=st.data())
def test_changed_config(folders, place, want, data):
    name = data.draw(st.sampled_from(BASES))
    folder = laid(folders / name, place)
    before = json.loads((folder / "config.json").read_text())
    after = data.draw(edited(before, OTHERS))
    put_json(folder, "config.json", after)
    came = decoded(folder)
    odd = {key for key in before.keys() | after if before.get(key, ...) != after.get(key, ...)}
    unknown = odd - before.keys() - OTHERS.keys()
    if came is not None and odd <= IDLE | unknown:
        assert came == want(name), odd


@budget(0.2)
@given(data=st.data())
def test_what_loads_is_saved_whole(folders, place, data):
    folder = laid(folders / data.draw(st.sampled_from(BASES)), place)
    values = json.loads((folder / "config.json").read_text())
    put_json(folder, "config.json", data.draw(edited(values, OTHERS)))
    model = attempt(lambda: load(folder, device="cpu"))
    if model is not None:
        saved = place.with_name("saved")
        shutil.rmtree(saved, ignore_errors=True)
        attempt(lambda: model.save(saved))
        if saved.is_dir():
            assert decoded(saved) == attempt(lambda: tokens(model))


@budget(0.1)
@given(st.sampled_from(NATIVE), st.sampled_from(ATTRIBUTES), VALUES)
def test_any_attribute(folders, place, name, key, value):
    """transformers sets whatever a config.json names, its own methods too."""
    folder = laid(folders / name, place)
    change(folder, "config.json", {key: value})
    decoded(folder)


@budget(0.2)
@given(data=st.data())
def test_damaged_text(folders, place, data):
    name = data.draw(st.sampled_from(BASES))
    folder = laid(folders / name, place)
    text = (folder / "config.json").read_text(encoding="utf-8")
    put(folder, "config.json", data.draw(damaged(text)))
    decoded(folder)


@budget(0.1)
@given(
    st.sampled_from(["config.json", "generation_config.json", INDEX, WEIGHTS]),
    st.binary(max_size=100) | VALUES.map(lambda v: json.dumps(v).encode()),
)
def test_any_bytes(folders, place, name, content):
    folder = laid(folders / "llada", place)
    put(folder, name, content)
    if name == "config.json" or name == WEIGHTS:
        attempt(lambda: load(folder, device="cpu"), nonsense=True)
    else:
        decoded(folder)


@budget(0.1)
@given(
    st.dictionaries(
        st.sampled_from(["eos_token_id", "max_length", "temperature", "do_sample", "num_beams",
                         "cache_implementation", "transformers_version", "top_p"]) | TEXT,
        VALUES, max_size=4,
    )
)  # fmt: skip
def test_any_generation_config(folders, place, want, values):
    """Nothing of it is used: what is read decodes as without."""
    folder = laid(folders / "llada", place)
    put_json(folder, "generation_config.json", values)
    came = decoded(folder)
    assert came is None or came == want("llada")


CASES = [
    pytest.param(name, key, value, id=f"{name}-{key}-{str(value)[:40]}")
    for name, fields in NONSENSE.items()
    for key, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("name", "key", "value"), CASES)
def test_nonsense_is_refused(folders, place, name, key, value):
    folder = laid(folders / name, place)
    change(folder, "config.json", {key: value})
    attempt(lambda: load(folder, device="cpu"), nonsense=True)


@st.composite
def cut_or_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """A weight file with its end, or bytes of its header, not as they were."""
    kind = draw(st.sampled_from(["cut", "grow", "bytes", "length"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if kind == "grow":
        return content + draw(st.binary(min_size=1, max_size=50))
    if kind == "length":
        return draw(st.binary(min_size=8, max_size=8)) + content[8:]
    size = len(content) - len(header(content)[1])
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, size - 1))
        piece = draw(st.binary(min_size=1, max_size=3))
        content = content[:at] + piece + content[at + len(piece) :]
    return content


@budget(0.2)
@given(data=st.data())
def test_damaged_weights(folders, place, data):
    folder = laid(folders / data.draw(st.sampled_from(BASES)), place)
    put(folder, WEIGHTS, data.draw(cut_or_changed((folder / WEIGHTS).read_bytes())))
    decoded(folder)


@budget(0.2)
@given(data=st.data())
def test_changed_header(folders, place, data):
    folder = laid(folders / data.draw(st.sampled_from(BASES)), place)
    values, rest = header((folder / WEIGHTS).read_bytes())
    name = data.draw(st.sampled_from(sorted(values)))
    kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "whole", "name", "gone"]))
    if kind == "gone":
        del values[name]
    elif kind == "name":
        values[data.draw(TEXT)] = values.pop(name)
    elif kind == "whole":
        values[name] = data.draw(VALUES)
    elif isinstance(values[name], dict):
        dtypes = st.sampled_from(["F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "I64", "F64", "X"])
        numbers = st.lists(st.integers(-2, 2**63), max_size=3)
        values[name][kind] = data.draw((dtypes if kind == "dtype" else numbers) | VALUES)
    put(folder, WEIGHTS, with_header(values, rest))
    decoded(folder)


@budget(0.2)
@given(data=st.data())
def test_changed_tensors(folders, place, data):
    """Odd values are decoded or named; tensors of another shape, name or number are refused."""
    folder = laid(folders / data.draw(st.sampled_from(BASES)), place)
    held = load_file(folder / WEIGHTS)
    name = data.draw(st.sampled_from(sorted(held)))
    value = held[name]
    kind = data.draw(st.sampled_from(["fill", "cast", "int", "shape", "extra", "gone", "empty"]))
    odd = {
        "fill": lambda: torch.full_like(
            value, data.draw(st.sampled_from([0.0, math.nan, math.inf, 1e30, -1e38]))
        ),
        "cast": lambda: value.to(
            data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float64]))
        ),
        "int": lambda: value.to(
            data.draw(st.sampled_from([torch.int8, torch.uint8, torch.bool, torch.int64,
                                       torch.float8_e4m3fn]))
        ),
        "shape": lambda: data.draw(
            st.sampled_from([value.reshape(-1)[:-1], value[None], value[1:], value.new_zeros(())])
        ),
        "extra": lambda: value,
        "gone": lambda: None,
        "empty": lambda: value.new_zeros(0),
    }[kind]()  # fmt: skip
    extra = data.draw(st.sampled_from(["x", "model.layers.9.mlp.up_proj.weight", f"{name}_scale"]))
    change_tensors(folder, WEIGHTS, {extra if kind == "extra" else name: odd})
    if kind in ("fill", "cast"):
        decoded(folder)
    else:
        attempt(lambda: load(folder, device="cpu"), nonsense=True)


def split(folder: Path) -> dict[str, str]:
    """The weights of a folder in two files; the map of their index."""
    held = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(held)
    where = {}
    for file, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save_file({name: held[name] for name in part}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    return where


@budget(0.2)
@given(data=st.data())
def test_changed_index(folders, place, want, data):
    """An index says where weights are, not which: what is taken decodes the same."""
    name = data.draw(st.sampled_from(BASES))
    folder = laid(folders / name, place)
    where = split(folder)
    index: Any = {"metadata": {"total_size": 0}, "weight_map": where}
    kind = data.draw(st.sampled_from(["map", "index", "text", "file"]))
    if kind == "map":
        others = {key: [*SHARDS, "../x", "x"] for key in list(where)[:3]}
        index["weight_map"] = data.draw(edited(where, others))
    elif kind == "index":
        index = data.draw(edited(index, {"metadata": [None, {}], "x": [1]}))
    elif kind == "file":
        file = data.draw(st.sampled_from(SHARDS))
        put(folder, file, data.draw(cut_or_changed((folder / file).read_bytes())))
    text = json.dumps(index)
    put(folder, INDEX, data.draw(damaged(text)) if kind == "text" else text)
    came = decoded(folder)
    if kind != "file" and came is not None:
        assert came == want(name)


@pytest.mark.parametrize(
    "where",
    [{}, [], None, 3, "model.safetensors", {"x": 3}, {"x": "../y.safetensors"}, {"x": "y.bin"},
     {"x": "/etc/passwd.safetensors"}, {"x": "missing.safetensors"}, {"x": ""}, {"x": "\0"},
     {"x": ".safetensors"}, {"x": "a" * 5000 + ".safetensors"}, {"x": "\0.safetensors"},
     {"x": "\ud800.safetensors"}, {"x": "\x1b[2J.safetensors"}],
    ids=lambda where: repr(where)[:30],
)  # fmt: skip
def test_an_index_of_nonsense_is_refused(folders, place, where):
    folder = laid(folders / "llada", place)
    split(folder)
    put_json(folder, INDEX, {"weight_map": where})
    attempt(lambda: load(folder, device="cpu"), nonsense=True)
