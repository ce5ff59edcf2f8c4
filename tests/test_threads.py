"""Threads of forwards on a CPU: how many there may be, which number is chosen, how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
import torch

import d2f
from d2f.device import busy, parse_threads, usable_cpus
from d2f.errors import InputError


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
