"""The benchmarks' own behaviour; what they measure is not for tests."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import ablation, common, decode_step, forward, kernels, trace, train_step
from d2f.adapters import new_lora
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
    monkeypatch.delitem(sys.modules, module, raising=False)  # runpy warns of what is imported
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__")
    assert not end.value.code
    assert capsys.readouterr().out.startswith(f"usage: python -m {module}")


def test_a_forward_and_a_training_step_enter_few_files():
    assert 0 < len(trace.forward()) <= 12
    assert 0 < len(trace.step()) <= 12


SMALL = {
    "kernels loss": "--rows 3 --vocabularies 300 --width 8 --repeat 1",
    "kernels confidence": "--rows 1 3 --vocabularies 300 --width 8 --repeat 1",
    # in bf16, which is a GPU's: RoPE is in fp32 then, and attention gets two dtypes
    "decode_step": "--shapes tiny --rows 4 --cached 16 --repeat 1 --dtype bfloat16",
    "train_step": "--shape tiny --length 64 --repeat 1 --dtype bfloat16 --ways plain ours",
    "kernels attention": "--rows 4 --cached 16 --lengths 8 --repeat 1",
}


@pytest.mark.parametrize("command", SMALL)
def test_a_benchmark_writes_what_it_prints(command, tmp_path, capsys, monkeypatch):
    for module in (kernels, train_step):
        monkeypatch.setattr(module, "in_fresh_process", lambda measure, *a: measure(*a))
    monkeypatch.setattr(decode_step, "try_compile", lambda model: None)
    monkeypatch.setattr(decode_step, "bandwidth", lambda device: 1e9)
    path, (name, *which) = tmp_path / "out.json", command.split()
    module = {"kernels": kernels, "decode_step": decode_step, "train_step": train_step}[name]
    module.main([*which, *SMALL[command].split(), "--json", str(path)])
    rows = json.loads(path.read_text())["measured"]
    assert rows and len(capsys.readouterr().out.splitlines()) > len(rows) / 2
    if which == ["attention"]:  # flash stands where there is no mask
        assert [row["what"] for row in rows if "flash" in row] == ["decoding", "bidirectional"] * 2
        decoding = [row for row in rows if row["what"] == "decoding"]
        assert all(row["blocks"] == 1 for row in decoding if "flash" in row)
        assert any(row["blocks"] == 2 for row in decoding)


def test_the_parts_of_a_forward_are_within_the_whole(capsys):
    model = "tiny-d2f"
    arguments = ["--model", model, "--task", "sudoku", "--problems", "2", "--batch-sizes", "1", "2"]
    forward.main(arguments)
    about, header, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith(f"{model} on sudoku, 2 problems; ")
    columns = header.split()
    rows = [dict(zip(columns, map(float, line.split()), strict=True)) for line in lines]
    assert [row["batch"] for row in rows] == [1, 2]
    assert rows[1]["forwards"] < rows[0]["forwards"], "two problems share a forward"
    assert all(row[part] > 0 for row in rows for part in forward.PARTS)
    assert all(row["model"] <= row["forward"] for row in rows)


def test_the_plain_training_step_has_the_gradient_of_ours():
    """What the benchmark compares does one and the same."""
    torch.manual_seed(0)
    model = common.build("tiny", torch.float32, "cpu")
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=8, dropout=0.0)
    trained = {n: p for n, p in model.adapter.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.2)
    batch, share = train_step.draw(model, 2, 96)
    got = torch.autograd.grad(train_step.ours(model, batch)(), list(trained.values()))
    want = torch.autograd.grad(train_step.plain(model, batch, share)(), list(trained.values()))
    for name, a, b in zip(trained, got, want, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


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
