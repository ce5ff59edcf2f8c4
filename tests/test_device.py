"""A device that is not there is an error that says which are, wherever it is named."""

import pytest
import torch

import d2f
from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from decode.compare.config import Transformers
from decode.compare.local import TransformersRunner

BAD = ["foo", "cuda:99", "cpu:x", "", "cuda:-1", "meta:x"]


@pytest.mark.parametrize("name", BAD)
def test_a_device_that_is_not_there(name):
    with pytest.raises(InputError, match=f"device {name}: no such device here, expected cpu"):
        d2f.load("tiny-teacher", device=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_cuda_where_there_is_none():
    """torch raises AssertionError."""
    with pytest.raises(InputError, match="device cuda: no such device here, expected cpu: "):
        d2f.load("tiny-teacher", device="cuda")


def test_a_bad_device_is_named_before_anything_is_read():
    with pytest.raises(InputError, match="device foo"):
        d2f.load("no such model", device="foo")
    with pytest.raises(InputError, match="quantize fp8: not on cpu"):
        d2f.load("no such model", quantize="fp8", device="cpu")
    entry = Transformers(name="hf", kind="transformers", model="no such model", device="cuda:99")
    with pytest.raises(InputError, match="device cuda:99: no such device here"):
        TransformersRunner(entry, [])


def test_devices_that_are_there():
    assert parse_device("cpu") == parse_device(torch.device("cpu")) == torch.device("cpu")
    assert parse_device("meta").type == "meta"
    assert parse_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dtype_by_each_of_its_names(dtype):
    full = str(dtype).removeprefix("torch.")
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[full]
    cpu = torch.device("cpu")
    assert parse_dtype(full, cpu) == parse_dtype(short, cpu) == parse_dtype(dtype, cpu) == dtype


def test_the_dtype_where_none_is_named():
    assert parse_dtype(None, torch.device("cpu")) == torch.float32
    assert parse_dtype(None, torch.device("meta")) == torch.bfloat16
    with pytest.raises(InputError, match=r"dtype must be one of .*got 'fp8'"):
        parse_dtype("fp8", torch.device("cpu"))


@pytest.mark.parametrize(("amx", "avx512"), [(False, False), (True, False), (False, True)])
def test_the_dtype_that_auto_is(amx, avx512, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512)
    fast = torch.bfloat16 if amx or avx512 else torch.float32
    assert parse_dtype("auto", torch.device("cpu")) == fast
    assert parse_dtype("auto", torch.device("cuda")) == torch.bfloat16
