"""Threads of forwards on a CPU: how many there may be, which number is chosen, how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from every_decoder import exact_model
from hypothesis import given
from hypothesis import strategies as st

import decode
from d2f.device import TRIALS, ThreadChoice, cpu_quota, parse_threads, thread_counts, usable_cpus
from d2f.errors import InputError
from decode.engine.learned import Learned


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
    ],
)
def test_the_quota_of_a_container(tmp_path, own, files, quota):
    place, root = groups(tmp_path, own, **files)
    assert cpu_quota(place, root) == quota
    here = len(os.sched_getaffinity(0))
    assert usable_cpus(place, root) == (here if quota is None else max(1, min(here, int(quota))))


def test_no_control_groups_at_all(tmp_path):
    assert cpu_quota(tmp_path / "none", tmp_path / "nothing") is None


def test_the_counts_to_choose_from():
    assert [thread_counts(n) for n in (1, 2, 3, 4, 6)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4),
        (1, 2, 4, 6),
    ]


def test_what_threads_may_be(monkeypatch):
    monkeypatch.setattr("d2f.device.usable_cpus", lambda: 6)
    assert parse_threads(3) == (3,)
    assert parse_threads("auto") == (1, 2, 4, 6)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert parse_threads(None) == (1, 2)
    for bad in (0, -1, True, 2.0, "two", "AUTO", "", 10**9):
        with pytest.raises(InputError, match="threads must be auto or a whole number"):
            parse_threads(bad)


def run(choice: ThreadChoice, seconds, forwards: int, rows: int = 8) -> tuple[list[int], float]:
    """The counts that were chosen for forwards that take ``seconds(count, forward)``."""
    chosen, total = [], 0.0
    for i in range(forwards):
        count = choice.choose(rows)
        chosen.append(count)
        total += seconds(count, i)
        choice.note(rows, count, seconds(count, i))
    return chosen, total


@given(st.lists(st.floats(0.5, 60), min_size=2, max_size=4), st.integers(0, 9))
def test_the_fastest_is_taken_and_trials_cost_little(times, seed):
    """Also where the others take sixty times as long, and with a tenth of noise."""
    counts = tuple(range(1, len(times) + 1))
    draws = np.random.default_rng(seed)
    choice = ThreadChoice(counts)

    def seconds(count, _):
        return times[count - 1] * (1 + 0.1 * float(draws.random()))

    _, first = run(choice, seconds, 40)
    chosen, total = run(choice, seconds, 1000)
    good = [count for count in counts if times[count - 1] <= 1.2 * min(times)]
    assert sum(count in good for count in chosen) >= 900
    # Each trial is begun below the share: it may be passed by one of each.
    worst = 1.1 * sum(times)
    assert total <= 1000 * 1.1 * 1.2 * min(times) + 2 * TRIALS * (first + total) + worst


def test_it_follows_other_work_that_comes_and_goes():
    choice = ThreadChoice((1, 2, 4))
    alone, beside = {1: 4.0, 2: 3.0, 4: 2.0}, {1: 4.5, 2: 30.0, 4: 200.0}
    chosen, _ = run(choice, lambda count, _: alone[count], 200)
    assert chosen[-1] == 4
    chosen, _ = run(choice, lambda count, _: beside[count], 200)
    assert chosen[-100:].count(1) >= 98
    chosen, _ = run(choice, lambda count, _: alone[count], 4000)
    assert chosen[-1] == 4


def test_a_number_of_rows_has_its_own_choice_and_spares_what_was_hopeless():
    choice = ThreadChoice((1, 4))
    run(choice, lambda count, _: {1: 1.0, 4: 50.0}[count], 20, rows=8)
    chosen, _ = run(choice, lambda count, _: {1: 2.0, 4: 1.0}[count], 20, rows=200)
    assert chosen[0] == 1 and 4 not in chosen[:3]  # what was far off for 8 rows is tried later
    choice = ThreadChoice((1, 4))
    for rows, best in ((8, 1), (200, 4)):
        chosen, _ = run(
            choice, lambda count, _, best=best: 1.0 + (count != best) / 4, 40, rows=rows
        )
        assert chosen.count(best) > 30


def test_the_process_keeps_its_own_number():
    before = torch.get_num_threads()
    learned = Learned((1, 2))
    seen = set()
    for _ in range(12):
        with learned.best_threads(8):
            seen.add(torch.get_num_threads())
        assert torch.get_num_threads() == before
        learned.note_forward(8, 8, 1, 1.0, 0.0)
    assert seen == {1, 2}


def test_tokens_do_not_depend_on_threads():
    prompts, decoder = [[5, 6, 7], [8, 9]], decode.D2F(4, tau_conf=0.3, max_new_tokens=12)
    model = exact_model("llada")
    expected = [r.tokens for r in decode.generate(model, prompts, decoder)]
    other = exact_model.__wrapped__("llada")
    other.thread_counts = (1, 2)
    for _ in range(3):
        assert [r.tokens for r in decode.generate(other, prompts, decoder)] == expected


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
