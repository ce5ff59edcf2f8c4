"""What an ablation makes before its runs: only what they read, and in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from small_ablation import ROOT, SMALL, written

from benchmarks.ablation.__main__ import main
from benchmarks.ablation.ablation_config import First, read_ablation
from benchmarks.ablation.first_steps import make, needed
from d2f.errors import InputError

TEACHER = First(makes="runs/teacher/model", run="distill.train --config teacher.yaml")
ROLLOUTS = {
    size: First(
        makes=f"runs/{size}.jsonl", run=f"distill.rollouts --model runs/teacher/model {size}"
    )
    for size in ("small", "large")
}


def names_of(tmp_path: Path, pattern: str) -> list[str]:
    """What is made for the runs with a pattern in their names."""
    settings = [{"name": size, "set": {"data.file": f"runs/{size}.jsonl"}} for size in ROLLOUTS]
    base = yaml.safe_load((ROOT / "configs" / "training" / "tiny-wino-plus.yaml").read_text())
    (tmp_path / "training.yaml").write_text(yaml.safe_dump(base | {"init": "tiny-teacher"}))
    teacher = SMALL["untrained"][0] | {"model": "runs/teacher/model"}
    first = [one.model_dump() for one in (TEACHER, *ROLLOUTS.values())]
    changes = {"train": str(tmp_path / "training.yaml"), "set": {}, "variants": [{"name": "soft"}],
               "settings": settings, "untrained": [teacher], "first": first}  # fmt: skip
    ablation = read_ablation(written(tmp_path, **changes))
    chosen = [run for run in ablation.plan(tmp_path) if pattern in run.name]
    assert chosen
    return [step.makes for step in needed(ablation.first, chosen)]


def test_only_what_the_runs_read_is_made(tmp_path):
    """And what that reads in turn, before it."""
    assert names_of(tmp_path, "teacher") == ["runs/teacher/model"]
    assert names_of(tmp_path, "large") == ["runs/teacher/model", "runs/large.jsonl"]
    both = ["runs/teacher/model", "runs/small.jsonl", "runs/large.jsonl"]
    assert names_of(tmp_path, "soft") == both


@pytest.mark.slow
def test_a_step_that_fails_or_makes_something_else_is_named(tmp_path):
    given, made = tmp_path / "given.json", tmp_path / "made.json"
    step = First(makes=str(made), run=f"json.tool --compact {given} {made}")
    with pytest.raises(InputError, match=r"json.tool .* ended with 2"):
        make([step])
    given.write_text('{"a":  1}')
    make([step])
    assert json.loads(made.read_text()) == {"a": 1}
    with pytest.raises(InputError, match="elsewhere is not there"):
        make([step.model_copy(update={"makes": str(tmp_path / "elsewhere")})])


@pytest.mark.parametrize("run", ["", "no.such.module --x", "json.tool 'open"])
def test_what_is_no_module_is_named_before_any_run(tmp_path, run):
    with pytest.raises(InputError, match="first"):
        read_ablation(written(tmp_path, first=[{"makes": "x", "run": run}]))


@pytest.mark.slow
def test_the_teacher_of_a_run_is_trained_before_it(tmp_path, monkeypatch, capfd):
    """The second call finds it finished; its student is the one that was trained then."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    teacher = tmp_path / "teacher"
    base = yaml.safe_load((ROOT / "configs" / "training" / "tiny-plain-teacher.yaml").read_text())
    base |= {"init": "tiny-ar", "output": str(teacher), "steps": 1, "compile": False}
    base |= {"data": {"tasks": {"sudoku": 1}, "row_length": 256, "rows": 1}}
    base["mixed_precision"] = "no"
    (tmp_path / "teacher.yaml").write_text(yaml.safe_dump(base))
    step = {"makes": f"{teacher}/model", "run": f"distill.train --config {tmp_path}/teacher.yaml"}
    values = SMALL["set"] | {"init": f"{teacher}/model"}
    config = written(tmp_path, set=values, seeds=[1], untrained=[], first=[step])
    words = ["--config", str(config), "--output", str(tmp_path / "out"), "--only", "soft-1"]
    words += ["--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    assert f"first: python -m {step['run']}" in capfd.readouterr().out
    (run,) = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert run["training"]["init"] == f"{teacher}/model"
    before = (teacher / "model" / "model.safetensors").stat().st_mtime_ns
    assert main(words) == 0
    assert "nothing is left to do" in capfd.readouterr().out
    assert (teacher / "model" / "model.safetensors").stat().st_mtime_ns == before
