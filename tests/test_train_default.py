"""`accelerate launch distill/train.py` needs no --config: it distils the bundled teacher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from d2f.errors import InputError
from distill import train
from distill.config import read_config

ROOT = Path(__file__).parent.parent


def test_without_a_configuration_it_is_that_of_the_bundled_student(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / train.DEFAULT_CONFIG).write_text("objective: next_token\n")  # of the user's
    monkeypatch.delenv("RANK", raising=False)
    config, options = train.parse(["--steps", "3"])
    assert config == read_config("tiny-d2f.yaml", ["--steps", "3"])
    assert (options.check, options.verbose) == (False, False)
    assert (config.objective.name, config.init) == ("d2f", "tiny-teacher")
    said = capsys.readouterr().err
    assert said.startswith("notice: no --config: tiny-d2f, which distils the bundled teacher")
    assert "runs/tiny-d2f" in said
    monkeypatch.setenv("RANK", "1")  # one process says it
    train.parse([])
    monkeypatch.setenv("RANK", "0")
    train.parse(["--config", "tiny-ar"])
    assert capsys.readouterr().err == ""
    with pytest.raises(InputError, match="stepz"):
        train.parse(["--stepz", "3"])


def test_the_line_of_the_readme_trains_from_any_folder(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    small = ["--steps", "1", "--data.rows", "2", "--tracker", "none"]
    done = subprocess.run(
        [*launch, str(ROOT / "distill" / "train.py"), *small],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "distils the bundled teacher" in done.stderr
    card = (tmp_path / "runs" / "tiny-d2f" / "adapter" / "README.md").read_text()
    assert "| starts from | tiny-teacher |" in card
