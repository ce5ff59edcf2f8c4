"""The benchmarks' own behaviour; what they measure is not for tests."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ablation, common, decode_step, train_step
from d2f.config import check, read_mapping
from d2f.shipped import ABLATIONS, find_config, shipped

ROOT = Path(__file__).parent.parent
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if path.name == "__main__.py" or '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", COMMANDS)
def test_help_prints_and_does_nothing_else(module, monkeypatch, capsys):
    def forbidden(*arguments, **more):
        raise AssertionError("--help wrote a file or started a process")

    for place, name in [(Path, "write_text"), (Path, "write_bytes"), (Path, "mkdir")]:
        monkeypatch.setattr(place, name, forbidden)
    monkeypatch.setattr("subprocess.Popen.__init__", forbidden)
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    for name in [n for n in sys.modules if n == module or n.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)  # runpy warns of what is imported already
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert not end.value.code
    out = capsys.readouterr().out
    assert out.startswith("usage: ") and "--help" in out


@pytest.mark.parametrize("module", [decode_step, train_step])
def test_a_shape_that_does_not_fit_is_an_error_before_it_is_built(module, monkeypatch, capsys):
    monkeypatch.setattr(common, "free_bytes", lambda device: 2**33)
    monkeypatch.setattr(module, "about", lambda dtype: pytest.fail("it began"))
    flag = "--shapes" if module is decode_step else "--shape"
    assert module.main([flag, "LLaDA-8B", "--dtype", "float32"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: LLaDA-8B needs about ")
    assert "8.0 GiB are free" in said


def test_a_gpu_measures_the_large_shapes_that_it_holds(monkeypatch):
    needed = {"LLaDA-8B": 16, "Dream-7B": 15, "tiny": 1, "small": 1}
    for free, expected in [(20, common.LARGE), (15, ["Dream-7B"]), (4, common.SMALL)]:
        monkeypatch.setattr(common, "free_bytes", lambda device, free=free: free)
        assert list(common.default_shapes(needed, "cuda")) == list(expected)


def test_the_estimate_of_a_shape_is_its_weights_and_more():
    needed = decode_step.memory_needed("LLaDA-8B", torch.bfloat16, 128, 4096, "cpu")
    assert 2 * 8.0e9 < needed < 2 * 8.0e9 * 1.4


def test_what_was_measured_is_kept_where_a_later_row_fails(tmp_path, monkeypatch):
    def measure(model, rows, *arguments):
        if rows == 2:
            raise RuntimeError("no memory")
        return {"eager": 1.0}

    for name, value in [("bandwidth", lambda device: 1e9), ("try_compile", lambda model: None)]:
        monkeypatch.setattr(decode_step, name, value)
    monkeypatch.setattr(decode_step, "measure", measure)
    sizes = ["--shapes", "tiny", "--rows", "1", "2", "--cached", "8"]
    with pytest.raises(RuntimeError):
        decode_step.main([*sizes, "--json", str(tmp_path / "d.json")])
    assert [row["rows"] for row in json.loads((tmp_path / "d.json").read_text())["measured"]] == [1]


@pytest.mark.parametrize("name", shipped(*ABLATIONS))
def test_a_shipped_ablation_plans_every_variant_with_every_seed(name, tmp_path):
    values = read_mapping(find_config(name, *ABLATIONS))
    found = check(ablation.Ablation, values, name)
    plan = list(found.plan(tmp_path))
    trainings = [run for run in plan if run.set is not None]
    assert {run.seed for run in trainings} == set(found.seeds)
    assert {run.variant for run in trainings} == {variant.name for variant in found.variants}
    assert all(run.decode for run in plan)


def test_an_ablation_trains_measures_and_reports_what_is_missing(tmp_path, monkeypatch, capsys):
    """The commands themselves have tests of their own: here they leave what they would."""
    called = []

    def call(module, *words):
        called.append((module, *words))
        output = Path(words[words.index("--output") + 1])
        if module == "distill.train":
            (output / "model").mkdir(parents=True)
            return
        output.mkdir()
        right = 5 if "other" in str(output) else 3
        row = {"task": "story", "problems": 10, "right": right, "tokens_per_forward": 2.5}
        (output / "report.json").write_text(json.dumps({"rows": [row]}))

    monkeypatch.setattr(ablation, "call", call)
    config = {
        "train": "tiny-d2f", "seeds": [1, 2], "against": "plain", "tasks": ["story"],
        "variants": [{"name": "plain"}, {"name": "other", "set": {"optimizer.lr": 0.1}}],
        "decode": [{"name": "sure", "decoder": "d2f", "options": {"tau_conf": 0.9}}],
        "problems": 10,
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    flags = ["--config", str(tmp_path / "mine.yaml"), "--output", str(tmp_path / "report")]
    for _ in range(2):
        assert ablation.main([*flags, "--runs", str(tmp_path / "runs")]) == 0
    assert len(called) == 2 * 2 * 2, "the second time nothing is left to do"
    training = next(words for words in called if "other" in " ".join(words))
    assert training[training.index("--optimizer.lr") + 1] == "0.1"
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert [row["right"] for row in summary["rows"]] == [3, 5, 3, 5]
    assert "| other | 5 5 | 5.0 | +2.0 | 2.50 |" in capsys.readouterr().out
    bad = [*flags[:-1], str(tmp_path / "x"), "--only", "nothing"]
    assert ablation.main(bad) == 2
    assert "expected a pattern of some of plain-1" in capsys.readouterr().err
