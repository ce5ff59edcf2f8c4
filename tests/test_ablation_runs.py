"""The runs of an ablation: trained once, measured once, and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
import yaml
from small_ablation import ROOT, SMALL, written

from benchmarks.ablation import __main__ as ablation_command
from benchmarks.ablation.__main__ import main


@pytest.mark.slow
def test_every_variant_is_trained_with_every_seed_and_measured(tmp_path, monkeypatch, capsys):
    """It is reported after each run. A second call trains and measures nothing again, but a setting
    that is new; other settings of the training are refused."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    reports = []
    write = ablation_command.write
    monkeypatch.setattr(ablation_command, "write", lambda *r: reports.append(r[0]) or write(*r))
    words = ["--config", str(written(tmp_path, seeds=[1])), "--output", str(tmp_path / "out")]
    words += ["--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    runs = report["runs"]
    assert [len(r["runs"]) for r in reports] == [1, 2, 3, 3] and reports[-1] == report
    assert [(r["variant"], r["seed"]) for r in runs] == [
        ("teacher", None), ("soft", 1), ("hard", 1)
    ]  # fmt: skip
    for entry in runs:
        (row,) = entry["rows"]
        assert row["problems"] == 3 and row["task"] == "sudoku" and row["split"] == "heldout"
        assert row["right_by_problem"].count("1") == row["right"]
        assert len(row["right_by_problem"]) == 3
    assert runs[1]["loss"] != runs[2]["loss"]
    configs = [yaml.safe_load(p.read_text()) for p in (tmp_path / "runs").glob("*/config.yaml")]
    assert {c["distill_target"] for c in configs} == {"soft", "hard"}
    assert {(c["seed"], c["steps"], c["data"]["rows"]) for c in configs} == {(1, 2, 2)}

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("model.safetensors")}
    rows = [entry["rows"] for entry in runs]
    assert main(words) == 0
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [entry["rows"] for entry in again["runs"]] == rows
    assert before == {p: p.stat().st_mtime_ns for p in before}

    del reports[:]
    assert main([*words, "--problems", "2", "--only", "soft-1"]) == 0
    assert len(reports) == 1  # what it has of three problems stays until the call's part is done
    fewer = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["problems"] for run in fewer["runs"] for row in run["rows"]} == {2}
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert main([*words, "--set.steps", "3"]) == 2
    assert "holds another run (steps: 2 there, 3 now" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_done_in_parts_and_reported_in_between(tmp_path, monkeypatch, capsys):
    """--only does the runs that match, --report-only none; the report says what there is."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--config", str(written(tmp_path)), "--output", str(tmp_path / "out")]
    words += ["--runs", str(tmp_path / "runs")]
    assert main([*words, "--report-only"]) == 2
    assert "nothing of this ablation is measured yet" in capsys.readouterr().err
    assert main([*words, "--only", "nothing"]) == 2
    assert "some of teacher, soft-1, hard-1, soft-2, hard-2" in capsys.readouterr().err
    assert main([*words, "--only", "soft-2"]) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["soft-2"]
    first = (tmp_path / "out" / "report.md").read_text()
    assert "Measured: 1 of 5 runs, 1 of 5 figures; what is left is not in this report." in first
    assert "| one | soft | (no 1) " in first and "| one | hard |" not in first
    assert main([*words, "--report-only"]) == 0
    assert (tmp_path / "out" / "report.md").read_text() == first
    assert main([*words, "--report-only", "--problems", "2"]) == 2  # of 2 nothing is measured
    capsys.readouterr()
    record = tmp_path / "runs" / "soft-2" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"inputs": {"init": "0" * 64}}))
    assert main([*words, "--report-only"]) == 2  # the student of another teacher
    assert "a run that was trained on something else (init had" in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_goes_on_where_its_runs_are_gone(tmp_path, monkeypatch, capsys):
    """What it has of the same training, on the same base, is not done again; of another it is an
    error, and what nothing else has is not lost."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--config", str(written(tmp_path)), "--output", str(tmp_path / "out")]
    path = tmp_path / "out" / "report.json"

    def call(runs: str, *more: str) -> int:
        return main([*words, "--runs", str(tmp_path / runs), *more])

    def by_run() -> dict[tuple[str, int], dict[str, object]]:
        return {(r["variant"], r["seed"]): r for r in json.loads(path.read_text())["runs"]}

    assert call("here", "--only", "soft-1") == 0
    assert call("here", "--only", "teacher") == 0
    first = by_run()
    assert call("there", "--only", "soft-*") == 0
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["soft-2"]
    assert call("there", "--only", "teacher") == 0  # the same weights: not decoded again
    assert sorted(by_run(), key=str) == [("soft", 1), ("soft", 2), ("teacher", None)]
    assert {key: by_run()[key] for key in first} == first
    before = path.read_bytes()
    assert call("elsewhere", "--report-only") == 0
    assert path.read_bytes() == before

    capsys.readouterr()
    assert call("elsewhere", "--report-only", "--set.steps", "3") == 2
    assert "report.json has another soft-1 (steps: 2 there, 3 now)" in capsys.readouterr().err
    assert call("elsewhere", "--problems", "2", "--only", "hard-1") == 2
    assert (
        "neither asked for now nor in a folder of runs (soft 1, soft 2, teacher)"
        in capsys.readouterr().err
    )
    report = json.loads(before)
    report["runs"][1]["inputs"] = {"init": "0" * 64}
    path.write_text(json.dumps(report))
    assert call("elsewhere", "--report-only") == 2
    assert "report.json has another soft-1 (init had SHA-256 0000" in capsys.readouterr().err
    path.write_text(json.dumps({"runs": [{"variant": "soft"}]}))
    assert call("elsewhere", "--report-only") == 2
    assert "not a report of an ablation" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_ablation_leaves_no_run_behind(tmp_path):
    """What trained in a process of its own has saved its steps and is gone."""
    folder = tmp_path / "runs" / "soft-1"
    config = written(tmp_path, seeds=[1], untrained=[], set=SMALL["set"] | {"steps": 10**6})
    words = ["--config", str(config), "--output", str(tmp_path / "out")]
    words += ["--runs", str(folder.parent)]
    line = [sys.executable, "-m", "benchmarks.ablation", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(line, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as started:
        try:
            wait_until(lambda: (folder / "log.jsonl").is_file() or started.poll() is not None)
            children = psutil.Process(started.pid).children(recursive=True)
        finally:
            started.kill()
    assert children
    _, left = psutil.wait_procs(children, timeout=60)
    for one in left:
        one.kill()
    assert not left
    assert list((folder / "checkpoints").iterdir())


def wait_until(holds: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)
