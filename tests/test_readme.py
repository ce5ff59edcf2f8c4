"""Every command of the README runs; tests/test_docs.py looks at its tables, links and flags."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.util import find_spec

import pytest
from documents import ROOT, run

from d2f.command import COMMANDS

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


LINES = [line for block in blocks("bash") for line in block.splitlines() if line]
# What a command would take minutes for, or do to the tree, is asked for in small and elsewhere.
SMALLER = {
    "d2f train": "--steps 1 --data.rows 2",
    "d2f decode": "--problems 1",
    "d2f evaluate": "--problems 2",
    "d2f tune": "--problems 2 --heldout 1 --tau-conf 0.9 --repetitions 1 --no-figures",
}


@pytest.mark.parametrize("command", [line for line in LINES if not line.startswith("make ")])
def test_a_command_of_the_readme_runs(command, tmp_path):
    assert run(command, tmp_path, SMALLER) or "train" in command


@pytest.mark.parametrize("command", [line for line in LINES if line.startswith("make ")])
def test_a_make_target_of_the_readme_runs_a_command_that_exists(command):
    # What the make that runs these tests was given (`make test ARGS=-x`) is not for this one.
    free = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARGS"))}
    stamps = (".venv/.installed-run", ".venv/.installed", ".venv-vllm/.installed")
    done = [word for stamp in stamps for word in ("-o", stamp)]
    recipe = subprocess.run(
        ["make", "-n", *done, command.split()[1]],
        cwd=ROOT,
        env=free,
        capture_output=True,
        text=True,
    )
    assert recipe.returncode == 0, recipe.stderr
    words = recipe.stdout.strip().splitlines()[-1].split()
    assert words[:2] == [".venv/bin/python", "-m"] and find_spec(words[2])


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    (program,) = blocks("python")
    monkeypatch.chdir(tmp_path)
    exec(program, {})


def test_it_is_short_and_names_every_command():
    assert len(README.splitlines()) <= 150
    assert [name for name in COMMANDS if f"d2f {name}" not in README] == []


def test_the_bundled_models_fit_in_70_megabytes():
    files = [p for p in (ROOT / "d2f" / "models").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 70e6
