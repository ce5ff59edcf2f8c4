"""Every script of examples/ runs, in small; the notebook runs cell by cell."""

from __future__ import annotations

import json
import os
import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from d2f.command import main as d2f_command
from d2f.tasks import make_problems

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run an example in an empty folder, and return what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))  # of the server that one starts

    def run(name: str, *arguments: str) -> str:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))
        return capfd.readouterr().out

    return run


def test_own_prompts(run):
    said = run("decode_own_prompts", "Raj has 18 stamps. He buys 7 more.")
    assert "> Raj has 18 stamps" in said and "tokens a forward" in said
    assert run("decode_own_prompts").count("####") == 2


def test_decoders_on_one_prompt(run):
    lines = run("compare_decoders").splitlines()
    forwards = {(row[0], row[1]): int(row[3]) for row in map(str.split, lines[1:])}
    for model, fast, slow in (
        ("tiny-d2f-long", "d2f", "static"),
        ("tiny-plain-teacher", "freedave", "static"),
        ("tiny-wedlm", "wedlm", "autoregressive"),
    ):
        assert forwards[model, fast] < forwards[model, slow]
    answers = [re.findall(r"(?:wedlm|autoregressive) .*  ('.*')", line) for line in lines[-2:]]
    assert answers[0] == answers[1], "verified streaming is lossless"


def test_a_decoder_in_one_file(run, monkeypatch, capfd):
    assert re.findall(r"k=\d: +(\d+)", run("add_a_decoder")) == ["16", "8", "4"]
    monkeypatch.syspath_prepend(str(EXAMPLES))
    words = "decode --model tiny-teacher --decoder add_a_decoder:TopK --k 3 --block-size 8"
    monkeypatch.setattr("sys.argv", ["d2f", *words.split(), "--problems", "1", "--tasks", "sudoku"])
    assert d2f_command() == 0 and "sudoku-1" in capfd.readouterr().out


@pytest.mark.slow
def test_a_student_on_own_rows(run):
    assert "tokens a forward" in run("train_a_student", "--steps", "2")


@pytest.mark.slow
def test_lossless_drafting(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    problems = make_problems("story", "train", 16)
    prompts.write_text("".join(json.dumps({"prompt": p.question}) + "\n" for p in problems))
    said = run("lossless_drafting", "--steps", "2", "--prompts", str(prompts))
    plain, drafted = re.findall(r"(\d+) tokens in (\d+) forwards", said)
    assert plain[0] == drafted[0] and int(drafted[1]) <= int(plain[1])


@pytest.mark.slow
def test_serving_and_calling(run):
    said = run("serve_and_call")
    whole, streamed = re.findall(r"whole: (.*)\nstreamed: (.*)", said)[0]
    pieces = re.findall(r"'(?:[^'\\]|\\.)*'", streamed)
    assert "".join(piece[1:-1] for piece in pieces) == whole[1:-1] == r"18+7=25\n#### 25"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is missing")
def test_batch_over_ray(run):
    workers = str(min(2, len(os.sched_getaffinity(0))))
    assert "8 rows in" in run("batch_over_ray", "--rows", "8", "--workers", workers)


def test_the_notebook_runs(tmp_path, monkeypatch):
    """As plain Python: its pictures are drawn without a display."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    path = EXAMPLES / "how_d2f_decodes.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    exec(compile("\n".join(code), str(path), "exec"), {"display": print})
    assert path.stat().st_size < 1e6
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
