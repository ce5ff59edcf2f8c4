"""A device that is not there is an error that says which are, wherever it is named."""

import pytest
import torch

import d2f
from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from decode.compare.config import Transformers
from decode.compare.local import TransformersRunner

BAD = ["foo", "cuda:99", "meta:x"]


@pytest.mark.parametrize("name", BAD)
def test_a_device_that_is_not_there(name):
    with pytest.raises(InputError, match=f"device {name}: no such device here, expected cpu"):
        d2f.load("tiny-teacher", device=name)


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


def test_a_dtype_by_each_of_its_names():
    cpu = torch.device("cpu")
    for name, short in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")):
        dtype = getattr(torch, name)
        assert {parse_dtype(given, cpu) for given in (name, short, dtype)} == {dtype}


def test_the_dtype_where_none_is_named():
    assert parse_dtype(None, torch.device("cpu")) == torch.float32
    assert parse_dtype(None, torch.device("meta")) == torch.bfloat16
    with pytest.raises(InputError, match="dtype: got 'fp8'; expected one of auto"):
        parse_dtype("fp8", torch.device("cpu"))


@pytest.mark.parametrize(("amx", "avx512"), [(False, False), (True, False), (False, True)])
def test_the_dtype_that_auto_is(amx, avx512, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512)
    fast = torch.bfloat16 if amx or avx512 else torch.float32
    assert parse_dtype("auto", torch.device("cpu")) == fast
    assert parse_dtype("auto", torch.device("cuda")) == torch.bfloat16
