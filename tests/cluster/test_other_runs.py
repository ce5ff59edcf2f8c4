"""The output of another run is refused before any weights are read."""

from __future__ import annotations

import pytest

from decode import evaluate, tune
from distill import rollouts

COMMANDS = {
    "evaluate": (evaluate.main, "--split heldout --max-new-tokens 16", "--split tuning"),
    "tune": (
        tune.main,
        "--heldout 2 --repetitions 1 --no-figures --tau-add 0.1 --tau-act 1 --tau-conf 0.5",
        "--seed 1",
    ),
    "rollouts": (rollouts.main, "--block-size 8", "--seed 1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_another_runs_output_is_refused_before_weights_are_read(
    name, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("d2f.tasks.task.GeneratedTask.right", lambda *_: True)
    main, more, other = COMMANDS[name]
    words = ["--model", saved, "--tasks", "sudoku", "--problems", "2", *more.split()]
    words += ["--output", str(tmp_path / "out")]
    assert main(words) == 0
    monkeypatch.setattr("decode.workers.load", lambda *_: pytest.fail("weights were read"))
    assert main([*words, *other.split()]) == 2
    flag = other.split()[0].removeprefix("--")
    error = capsys.readouterr().err
    assert "is the output of another run: " in error and f"{flag} was " in error
