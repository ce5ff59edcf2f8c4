"""Every command of the README runs; tests/test_docs.py looks at its tables."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec

import pytest
from documents import ROOT, run

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line]
# What a command would take hours for, or do to the tree, is asked for in small and elsewhere.
SMALLER = {
    "accelerate launch": "--steps 1 --data.rows 2 --tracker none --output {tmp}/run",
    "d2f train": "--steps 1 --data.rows 2",
    "d2f decode": "--problems 1",
    "python -m decode.pipeline": "--problems 1",
    "d2f evaluate": "--problems 2 --tasks sudoku",
    "d2f tune": "--problems 2 --heldout 1 --tau-conf 0.9 --repetitions 1 --no-figures",
}


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("make ")])
def test_a_command_of_the_readme_runs(command, tmp_path):
    smaller = {start: more.format(tmp=tmp_path) for start, more in SMALLER.items()}
    assert run(command, tmp_path, smaller) or "train" in command


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_a_make_target_of_the_readme_runs_a_command_that_exists(command, tmp_path):
    target = command.split()[1]
    # What the make that runs these tests was given (`make test ARGS=-x`) is not for this one.
    ours = ("MAKE", "MFLAGS", "ARGS")
    free = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = ["-o", ".venv/.installed", "-o", ".venv-vllm/.installed"]
    recipe = subprocess.run(
        ["make", "-n", *done, target], cwd=ROOT, env=free, capture_output=True, text=True
    )
    assert recipe.returncode == 0, recipe.stderr
    words = recipe.stdout.strip().splitlines()[-1].split()
    assert words[:2] == [".venv/bin/python", "-m"] and find_spec(words[2])


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    (program,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(program, {})


def test_the_folders_that_the_readme_names_exist():
    for folder in re.findall(r"`([a-z_/]+/)`", README):
        assert (ROOT / folder).is_dir(), folder


def test_the_bundled_models_fit_in_70_megabytes():
    files = [p for p in (ROOT / "d2f" / "models").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 70e6
