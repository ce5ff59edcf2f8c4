"""Devices, dtypes and threads: errors say which there are; how many threads are chosen, and how
they wait."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

import d2f
from d2f.device import busy, parse_device, parse_dtype, parse_threads, usable_cpus
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


# Threads.


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, 99),  # no control groups at all
        ({"cpu.max": "max 100000"}, 99),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 99),
        ({"cpu.max": "nonsense"}, 99),
    ],
)
def test_the_quota_of_a_container(tmp_path, monkeypatch, files, quota):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(99))
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert usable_cpus(tmp_path) == quota


def test_how_many_threads_there_are(monkeypatch):
    """N as given; else the processors that the process may use, for None no more than torch is set
    to; one where other programs keep all of these busy, unless OMP_NUM_THREADS says how many."""
    load = []
    monkeypatch.setattr("d2f.device.usable_cpus", lambda: 6)
    monkeypatch.setattr("d2f.device.busy", lambda: bool(load))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [parse_threads(given) for given in (3, "auto", None)] == [3, 6, 2]
    load.append("another program")
    assert [parse_threads(given) for given in (3, "auto", None)] == [3, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [parse_threads(given) for given in ("auto", None)] == [1, 2]
    for bad in (0, True, "two"):
        with pytest.raises(InputError, match="threads must be auto or a whole number"):
            parse_threads(bad)


@pytest.mark.parametrize(("shares", "expected"), [((99.0, 95.0), True), ((100.0, 20.0), False)])
def test_processors_are_busy_where_all_that_may_be_used_are(monkeypatch, shares, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    monkeypatch.setattr(psutil, "cpu_percent", lambda *_, percpu: [0.0, *shares])
    assert busy() is expected


def test_a_model_has_the_threads_that_it_was_loaded_with(golden):
    before = torch.get_num_threads()
    try:
        assert d2f.load(golden / "llada-tiny", device="cpu", threads=3).threads == 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("given", [None, "7"])
def test_how_threads_wait_is_said_before_torch_is_loaded(given):
    """And other projects' programs are told what the user said, if anything."""
    code = (
        "import d2f, os; from d2f.device import users_environment as users; "
        "print(os.environ['GOMP_SPINCOUNT'], users().get('GOMP_SPINCOUNT'))"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    around = {name: text for name, text in os.environ.items() if name not in names}
    around |= {} if given is None else {"GOMP_SPINCOUNT": given}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=around, check=True
    )
    assert found.stdout == f"{given or 10000} {given}\n"
