"""Threads of forwards on a CPU: how many there may be, which number is chosen, how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
import torch

import d2f
from d2f.device import busy, cpu_quota, parse_threads, usable_cpus
from d2f.errors import InputError


def groups(tmp_path, own: str, **files: str):
    """The file that says a process's groups, and the folder of all groups, as Linux has them."""
    for name, text in files.items():
        place = (
            tmp_path
            / "cgroup"
            / name.replace("__", "/").replace("cpu_max", "cpu.max").replace("cpu_cfs", "cpu.cfs")
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    (tmp_path / "own").write_text(own)
    return tmp_path / "own", tmp_path / "cgroup"


@pytest.mark.parametrize(
    "own, files, quota",
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu_max": "max 100000\n"}, None),
        ("0::/\n", {"cpu_max": "250000 100000\n"}, 2.5),
        # The group around it has less.
        ("0::/a/b\n", {"a__cpu_max": "150000 100000", "a__b__cpu_max": "300000 100000"}, 1.5),
        ("0::/gone\n", {"cpu_max": "50000 100000"}, 0.5),
        (
            "4:cpu,cpuacct:/box\n0::/\n",
            {"cpu__box__cpu_cfs_quota_us": "200000", "cpu__box__cpu_cfs_period_us": "100000"},
            2.0,
        ),
        (
            "4:cpu:/\n",
            {"cpu__cpu_cfs_quota_us": "-1", "cpu__cpu_cfs_period_us": "100000"},
            None,
        ),
        ("nonsense", {"cpu_max": "nonsense"}, None),
        ("", {}, None),  # no control groups at all
    ],
)
def test_the_quota_of_a_container(tmp_path, own, files, quota):
    place, root = groups(tmp_path, own, **files)
    assert cpu_quota(place, root) == quota
    here = len(os.sched_getaffinity(0))
    assert usable_cpus(place, root) == (here if quota is None else max(1, min(here, int(quota))))


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
    for bad in (0, -1, True, 2.0, "two", "AUTO", "", 10**9):
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


@pytest.mark.parametrize(
    "first, given_spins, expected",
    [("d2f", None, "10000 kept"), ("torch", None, "None kept"), ("d2f", "7", "7 kept")],
)
def test_how_threads_wait_is_said_before_torch_is_loaded(first, given_spins, expected):
    code = (
        f"import {first}, d2f, os; from d2f.device import users_environment as mine; "
        "given = os.environ.get('USERS'); "
        "print(os.environ.get('GOMP_SPINCOUNT'), "
        "'kept' if mine().get('GOMP_SPINCOUNT') == given else 'lost')"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    around = {name: text for name, text in os.environ.items() if name not in names}
    if given_spins is not None:
        around |= {"GOMP_SPINCOUNT": given_spins, "USERS": given_spins}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=around, check=True
    )
    assert found.stdout.split("\n")[0] == expected
