"""python -m benchmarks.gpu: measurements are kept row by row, resumed, and ended in time."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time

import pytest

from benchmarks import gpu
from benchmarks.gpu import CUT, DONE, FAILED, NOT_RUN, Results, markdown, read_runs

FACTS = {"device": "a GPU", "torch": "2", "code": "1", "dry_run": False}
WRITER = """
import argparse, json, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("then")
parser.add_argument("--count")
parser.add_argument("--json", type=pathlib.Path)
options = parser.parse_args()
if options.count:
    open(options.count, "a").write("x")
beside = options.json.with_suffix(".part")
beside.write_text(json.dumps({"measured": [{"row": 1, "ms": 1.5}]}))
beside.replace(options.json)  # whole, as benchmarks write it
if options.then == "warn":
    print("x.py:1: RuntimeWarning: the Triton kernel span_attention does not work", file=sys.stderr)
if options.then == "hang":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
sys.exit(options.then == "fail")
"""


@pytest.fixture
def writer(tmp_path, monkeypatch):
    """Make a measurement that writes one row and ends as `then` says."""
    (tmp_path / "row_writer.py").write_text(WRITER)
    words = gpu.Measurement.words

    def of_the_writer(self, *, dry):
        return [word.removeprefix("benchmarks.") for word in words(self, dry=dry)]

    monkeypatch.setattr(gpu.Measurement, "words", of_the_writer)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "POLL", 0.05)
    monkeypatch.setattr(gpu, "GRACE", 0.5)

    def make(then="end", name="writer", seconds=1, more="", **others):
        command = f"row_writer {then} {more}".strip()
        return gpu.Measurement("kernels", name, seconds, command, **others)

    return make


def session(path, facts=FACTS, deadline=math.inf):
    return gpu.Session(Results(path, dict(facts)), deadline)


def last(path):
    return read_runs(path)[-1]["measured"]


def test_a_measurement_is_made_once_for_the_same_device_code_and_versions(tmp_path, writer, capsys):
    path, count = tmp_path / "results.json", tmp_path / "count"
    for _ in range(2):
        session(path).run([writer(more=f"--count {count}")])
    assert len(count.read_text()) == 1
    assert "kernels, writer: measured on" in capsys.readouterr().out
    for changed in ("device", "code"):
        session(path, FACTS | {changed: "other"}).run([writer(more=f"--count {count}")])
    assert len(count.read_text()) == 3
    assert read_runs(path)[0]["facts"] == FACTS, "earlier runs are kept"


def test_what_fails_is_measured_again_after_the_others(tmp_path, writer, capsys):
    path = tmp_path / "results.json"
    session(path).run([writer("fail", name="bad"), writer(name="good")])
    assert last(path)["bad"]["state"] == FAILED
    assert last(path)["bad"]["why"] == "exit status 1"
    capsys.readouterr()
    session(path).run([writer("fail", name="bad"), writer(name="new")])
    said = capsys.readouterr().out
    assert said.index("new: done") < said.index("bad: failed")


def test_what_runs_at_the_deadline_is_ended_and_its_rows_are_kept(tmp_path, writer):
    path = tmp_path / "results.json"
    began = time.monotonic()
    session(path, deadline=began + 3).run([writer("hang", seconds=1)])
    assert time.monotonic() - began < 10
    entry = last(path)["writer"]
    assert (entry["state"], entry["why"]) == (CUT, "the time was over")
    assert entry["found"]["measured"] == [{"row": 1, "ms": 1.5}]


def test_what_does_not_fit_is_left_and_what_cannot_run_says_why(tmp_path, writer, capsys):
    path = tmp_path / "results.json"
    soon = time.monotonic() + 5
    session(path, deadline=soon).run([writer(name="long", seconds=600)])
    assert "long: left for the next call" in capsys.readouterr().out
    session(path).run([writer(needs=("no_such_module",))])
    entry = last(path)["writer"]
    assert (entry["state"], entry["why"]) == (NOT_RUN, "needs no_such_module")


def test_a_fallback_is_said_beside_every_later_figure(tmp_path, writer):
    path = tmp_path / "results.json"
    session(path).run([writer("warn", name="first"), writer(name="second")])
    warned = ["the Triton kernel span_attention does not work"]
    assert [entry["warnings"] for entry in last(path).values()] == [warned, warned]
    assert "**With a fallback: the Triton kernel" in markdown(read_runs(path))


def test_tables_of_a_file_need_no_gpu(tmp_path, writer, capsys):
    path = tmp_path / "results.json"
    session(path).run([writer()])
    capsys.readouterr()
    assert gpu.main(["--table", str(path)]) == 0
    out = capsys.readouterr().out
    assert "**a GPU, " in out and "| 1 | 1.5 |" in out


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "expected --output FILE"), (["--table", "no.json"], "no.json: expected a file that")],
)
def test_a_bad_command_line_is_one_line(given, said, capsys):
    assert gpu.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line


class ParsedError(Exception):
    """A command line was read, and nothing else is to be done."""


def test_the_modules_take_the_commands(monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *arguments, **others):
        parse(self, *arguments, **others)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    for found in gpu.MEASUREMENTS:
        for dry in {False, bool(found.small)}:
            name, *arguments = found.words(dry=dry)
            with pytest.raises(ParsedError):
                importlib.import_module(name).main([*arguments, "--json", "x.json"])


@pytest.mark.slow
def test_a_dry_run_measures_in_small(tmp_path):
    """Of two parts; each module's small run has a test of its own."""
    path, parts = tmp_path / "dry.json", ["correctness", "forward"]
    assert gpu.main(["--dry-run", "--output", str(path), "--only", *parts]) == 0
    (run,) = json.loads(path.read_text())["runs"]
    states = {name: entry["state"] for name, entry in run["measured"].items()}
    chosen = [found for found in gpu.MEASUREMENTS if found.part in parts]
    assert states == {found.name: DONE if found.small else NOT_RUN for found in chosen}
