"""python -m benchmarks.gpu: measurements are kept, resumed, and ended in time."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time

import pytest

from benchmarks import gpu
from benchmarks.gpu import CUT, DONE, FAILED, NOT_RUN, markdown, measure_all, read_runs

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
options.json.write_text(json.dumps({"measured": [{"row": 1, "ms": 1.5}]}))
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
    monkeypatch.setattr(gpu, "GRACE", 0.5)

    def make(then="end", name="writer", seconds=1, more="", **others):
        command = f"row_writer {then} {more}".strip()
        return gpu.Measurement("kernels", name, seconds, command, **others)

    return make


def measured(path, *measurements, facts=FACTS, seconds=math.inf):
    runs = measure_all(measurements, path, facts, time.monotonic() + seconds)
    assert runs == read_runs(path)
    return runs[-1]["measured"]


def test_a_measurement_is_made_once_for_the_same_device_and_code(tmp_path, writer, capsys):
    path, count = tmp_path / "results.json", tmp_path / "count"
    for _ in range(2):
        measured(path, writer(more=f"--count {count}"))
    assert len(count.read_text()) == 1
    assert "kernels, writer: measured on" in capsys.readouterr().out
    measured(path, writer(more=f"--count {count}"), facts=FACTS | {"code": "other"})
    assert len(count.read_text()) == 2
    assert read_runs(path)[0]["facts"] == FACTS, "earlier runs are kept"
    assert gpu.main(["--table", str(path)]) == 0  # which needs no GPU
    out = capsys.readouterr().out
    assert "**a GPU, " in out and "| 1 | 1.5 |" in out


def test_what_fails_is_measured_again_after_the_others(tmp_path, writer, capsys):
    path = tmp_path / "results.json"
    found = measured(path, writer("fail", name="bad"), writer("warn", name="good"))
    assert (found["bad"]["state"], found["bad"]["why"]) == (FAILED, "exit status 1")
    capsys.readouterr()
    found = measured(path, writer("fail", name="bad"), writer(name="new"))
    said = capsys.readouterr().out
    assert said.index("new: done") < said.index("bad: failed")
    # A fallback is said beside every later figure.
    warned = ["the Triton kernel span_attention does not work"]
    assert [found[name]["warnings"] for name in ("good", "new", "bad")] == [warned] * 3
    assert "**With a fallback: the Triton kernel" in markdown(read_runs(path))


def test_what_runs_at_the_deadline_is_ended_and_its_rows_are_kept(tmp_path, writer, capsys):
    began, path = time.monotonic(), tmp_path / "results.json"
    given = writer("hang"), writer(name="long", seconds=600)
    found = measured(path, *given, writer(name="other", needs=("no_such_module",)), seconds=2.5)
    assert time.monotonic() - began < 10
    cut, other = found["writer"], found.get("other")
    assert (cut["state"], cut["why"]) == (CUT, "the time was over")
    assert cut["found"]["measured"] == [{"row": 1, "ms": 1.5}]
    assert "long: left for the next call" in capsys.readouterr().out and other is None
    found = measured(path, writer(name="other", needs=("no_such_module",)))
    assert (found["other"]["state"], found["other"]["why"]) == (NOT_RUN, "needs no_such_module")


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
def test_a_dry_run_measures_in_small(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.common.in_fresh_process", lambda measure: measure())
    path = tmp_path / "dry.json"
    assert gpu.main(["--dry-run", "--output", str(path), "--only", "forward"]) == 0
    (run,) = json.loads(path.read_text())["runs"]
    states = {name: entry["state"] for name, entry in run["measured"].items()}
    chosen = [found for found in gpu.MEASUREMENTS if found.part == "forward"]
    assert states == {found.name: DONE if found.small else NOT_RUN for found in chosen}
