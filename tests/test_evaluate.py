"""`python -m decode.evaluate`: what it prints and keeps, and what it refuses before any work."""

import json

import pytest

import decode.cli
from decode.evaluate import main

SMALL = ["--problems", "2", "--tasks", "sudoku"]


def test_the_numbers_are_kept(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    assert "sudoku" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["task"], row["problems"], row["max_new_tokens"]) == ("sudoku", 2, 32)
    assert [p.name for p in tmp_path.iterdir()] == ["numbers.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--problems", "2147483648"], "--problems 2147483648: count must be at most 100000"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--tasks", "chess"], "--tasks: expected a task among story, countdown, sudoku"),
        (["--tasks", "sudoku,sudoku"], "each once, got 'sudoku,sudoku'"),
        (["--json", "no/such/folder/x.json"], "folder"),
        (["--json", "."], "is not a file"),
        (["--device", "abacus"], "--device abacus: no such device here"),
        (["--device", "cuda:99"], "--device cuda:99: no such device here"),
        (["--device", "meta"], "--device meta: it holds shapes and no weights"),
        (["--dtype", "int4"], "--dtype: expected one of"),
        (["--model", "./no/such"], "--model ./no/such: expected a folder"),
        (["--tau1", "0.5"], "name a decoder that has them, wino"),
        (["--tau", "1.5"], "decoder d2f, the default of this model, has no option tau"),
        (["--tau-add", "2"], "tau_add must lie in [0, 1], got 2.0"),
        (["--model", "tiny-ar", "--decoder", "d2f"], "the decoder d2f needs a model with a mask"),
        (["--nothing"], "unknown option '--nothing'"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(decode.cli, "load", lambda options: pytest.fail("loaded"))
    assert main([*SMALL, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert captured.err.count("\n") == 1 and not captured.out


def test_a_link_given_for_the_report_is_followed(tmp_path, monkeypatch):
    """As by --output of decode.pipeline: known before the work, not refused after it."""
    monkeypatch.setattr("decode.evaluate.run", lambda _: {"rows": []})
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "report.json")
    assert main(["--json", str(link)]) == 0
    assert json.loads((tmp_path / "report.json").read_text()) == {"rows": []}
    assert link.is_symlink()
