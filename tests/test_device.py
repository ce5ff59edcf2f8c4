"""A device that is not there is an error that says which are, wherever it is named."""

import pytest
import torch

import d2f
from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from decode.compare.config import Transformers
from decode.compare.local import TransformersRunner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("name", ["foo", "cuda:99", "meta:x"])
def test_a_device_that_is_not_there_is_named_before_anything_is_read(name):
    with pytest.raises(InputError, match=f"device {name}: no such device here, expected cpu"):
        d2f.load("no such model", device=name)
    entry = Transformers(name="hf", kind="transformers", model="no such model", device="cuda:99")
    with pytest.raises(InputError, match="device cuda:99: no such device here"):
        TransformersRunner(entry, [])


def test_devices_that_are_there():
    assert parse_device("cpu") == parse_device(CPU) == CPU
    assert parse_device("meta").type == "meta"
    assert parse_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_dtype_by_its_name_and_where_none_is_named():
    for name, short in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")):
        dtype = getattr(torch, name)
        assert {parse_dtype(given, CPU) for given in (name, short, dtype)} == {dtype}
    assert parse_dtype(None, CPU) == torch.float32
    assert parse_dtype(None, torch.device("meta")) == torch.bfloat16
    with pytest.raises(InputError, match="dtype: got 'fp8'; expected one of auto"):
        parse_dtype("fp8", CPU)


@pytest.mark.parametrize(("amx", "avx512"), [(False, False), (True, False), (False, True)])
def test_the_dtype_that_auto_is(amx, avx512, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512)
    fast = torch.bfloat16 if amx or avx512 else torch.float32
    assert parse_dtype("auto", CPU) == fast
    assert parse_dtype("auto", CUDA) == torch.bfloat16
