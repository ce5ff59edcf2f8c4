"""Measurements one after another: kept row by row, gone on with, ended in time."""

from __future__ import annotations

import json
import math
import os
import re
import time

import pytest
from row_writer import WARNING

from benchmarks.gpu import timed_child
from benchmarks.gpu.bring_up import Measurement
from benchmarks.gpu.measured_tables import markdown
from benchmarks.gpu.results_file import CUT, DONE, FAILED, NOT_RUN, ResultsFile, read_runs
from benchmarks.gpu.session import Session
from d2f.errors import InputError

FACTS = {"device": "a GPU", "torch": "2", "code": "1", "dry_run": False}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(timed_child, "POLL", 0.02)


def writer(arguments="", name="writer", seconds=1, **others):
    command = f"tests.gpu_measurements.row_writer {arguments}"
    return Measurement("kernels", name, seconds, command, **others)


def session(path, facts=FACTS, deadline=math.inf):
    return Session(ResultsFile(path, dict(facts)), deadline)


def last_run(path):
    return read_runs(path)[-1]["measured"]


def test_each_row_is_in_the_file_before_the_next_is_measured(tmp_path):
    path = tmp_path / "results.json"
    session(path).run([writer(f"--rows 3 --await {path}")])
    entry = last_run(path)["writer"]
    assert entry["state"] == DONE, entry["output"]
    assert [row["ms"] for row in entry["found"]["measured"]] == [0.0, 1.5, 3.0]


def test_a_measurement_is_not_made_twice_on_the_same_device_by_the_same_code(tmp_path, capsys):
    path, count = tmp_path / "results.json", tmp_path / "count"
    for _ in range(2):
        session(path).run([writer(f"--count {count}")])
    assert len(count.read_text().splitlines()) == 1
    assert "kernels, writer: measured on" in capsys.readouterr().out
    session(path).run([writer(f"--count {count} --rows 1")])  # is another one
    for changed in ("device", "torch", "code", "dry_run"):
        session(path, FACTS | {changed: "other"}).run([writer(f"--count {count}", small="")])
    assert len(count.read_text().splitlines()) == 5
    assert read_runs(path)[0]["facts"] == FACTS, "earlier runs are kept"
    assert len(read_runs(path)) == 5


def test_what_still_runs_at_the_deadline_is_ended_and_its_rows_are_kept(tmp_path, monkeypatch):
    path, pids = tmp_path / "results.json", tmp_path / "pids"
    hanging = writer(f"--rows 2 --then hang --pids {pids} --await {path}")
    clock, deadline = time.monotonic, time.monotonic() + 600
    # The time is over when it has started all that there is to end.
    monkeypatch.setattr(time, "monotonic", lambda: deadline if pids.exists() else clock())
    session(path, deadline=deadline).run([hanging])
    entry = last_run(path)["writer"]
    assert (entry["state"], entry["why"]) == (CUT, "the time was over")
    assert len(entry["found"]["measured"]) == 2
    assert (tmp_path / "asked").exists(), "it may end by itself first"
    monkeypatch.undo()
    patience = time.monotonic() + 60  # a process that was killed may take a moment
    while any(map(is_running, pids.read_text().split())):
        assert time.monotonic() < patience
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_of_two_that_were_cut_off_the_longer_is_kept(tmp_path, monkeypatch):
    path, found = tmp_path / "results.json", []
    for rows in (3, 1, 4):
        one = session(path)
        monkeypatch.setattr("benchmarks.gpu.session.run_until", cut_after(rows))
        one.run([writer(name="cut")])
        found.append(len(last_run(path)["cut"]["found"]["measured"]))
    assert found == [3, 3, 4]
    monkeypatch.undo()
    session(path).run([writer("--rows 1", name="cut")])
    assert last_run(path)["cut"]["state"] == DONE


def cut_after(rows):
    def run_until(command, deadline, log, look, **others):
        log.write_text("")
        place = log.with_name("found.json")
        place.write_text(json.dumps({"measured": [{"row": i} for i in range(rows)]}))
        look()

    return run_until


def test_what_would_not_be_over_in_time_is_left_and_later_ones_are_not(tmp_path, capsys):
    path = tmp_path / "results.json"
    deadline = time.monotonic() + 300
    long, short = writer(name="long", seconds=400), writer(name="short", seconds=20)
    session(path, deadline=deadline).run([long, short])
    assert list(last_run(path)) == ["short"]
    assert "long: left for the next call: about 400 s, " in capsys.readouterr().out
    # What it took here before says more than the guess, by whatever code that was.
    for other in ({"dry_run": True}, {"device": "another"}):
        session(path, FACTS | other).run([writer(name="long", seconds=400, small="--rows 1")])
        session(path, deadline=deadline).run([long])
        assert "long" not in read_runs(path)[0]["measured"]
    session(path).run([long])
    path.write_text(re.sub(r'"seconds": [0-9.]+', '"seconds": 0.0', path.read_text()))
    changed = FACTS | {"code": "2"}
    session(path, changed, deadline).run([long])
    (run,) = (run for run in read_runs(path) if run["facts"] == changed)
    assert run["measured"]["long"]["state"] == DONE


def test_what_failed_is_tried_again_behind_the_others(tmp_path, capsys):
    path, count = tmp_path / "results.json", tmp_path / "count"
    fails, ends = (writer(f"--then {then} --count {count}", then) for then in ("fail", "end"))
    session(path).run([fails])
    session(path).run([fails, ends])
    assert count.read_text().split() == ["fail", "end", "fail"]
    entry = last_run(path)["fail"]
    assert (entry["state"], entry["why"]) == (FAILED, "exit status 1")
    assert len(entry["found"]["measured"]) == 2
    assert "    all rows are written" in capsys.readouterr().out.splitlines()


def test_a_fallback_stands_beside_every_later_figure(tmp_path):
    path = tmp_path / "results.json"
    session(path).run([writer(name="before"), writer("--then warn", "warns")])
    session(path).run([writer(name="after")])  # in another call, too
    said = {name: entry["warnings"] for name, entry in last_run(path).items()}
    assert said == {"before": [], "warns": [WARNING], "after": [WARNING]}
    lines = markdown(read_runs(path)).splitlines()
    assert [line.startswith("before:") for line in lines if "row_writer" in line] == [True] + [
        False
    ] * 2
    assert [WARNING in line for line in lines if "row_writer" in line] == [False, True, True]


def test_what_cannot_run_says_what_it_needs(tmp_path):
    path = tmp_path / "results.json"
    cpu = FACTS | {"device": "cpu", "dry_run": True}
    session(path, cpu).run([
        writer(name="gpu"),
        writer(name="module", small="", needs=("no_such_module",)),
        writer(name="program", small="", before=("no-such-program", "x")),
        writer(name="runs", small="--rows 1"),
    ])  # fmt: skip
    entries = last_run(path)
    assert [entry["why"] for entry in entries.values()] == [
        "needs a GPU", "needs no_such_module", "needs no-such-program", "",
    ]  # fmt: skip
    assert [entry["state"] for entry in entries.values()] == [NOT_RUN] * 3 + [DONE]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{}]}', '{"runs": 3}', "\xff"])
def test_another_file_is_refused_and_left_as_it_is(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"other\.json: expected a file that python -m benchmarks"):
        ResultsFile(path, FACTS)
    assert path.read_text(encoding="latin-1") == text
    assert os.listdir(tmp_path) == ["other.json"]
