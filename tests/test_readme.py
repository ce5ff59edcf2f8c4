"""Every command of the README runs, and its table is what was measured."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line]
# What a command would take hours for, or do to the tree, is asked for in small and elsewhere.
SMALLER = {
    "accelerate launch": "--steps 1 --data.rows 2 --tracker none --output {tmp}/run",
    "d2f decode": "--problems 1",
    "d2f evaluate": "--problems 2 --tasks sudoku",
    "d2f tune": "--problems 2 --heldout 1 --tau-conf 0.9 --repetitions 1 --no-figures",
}


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_small(command: str, tmp: Path) -> list[str]:
    words = command.split('"')  # the README quotes with double quotes only
    arguments = [
        part
        for i, text in enumerate(words)
        for part in ([text] if i % 2 else text.split())
    ]  # fmt: skip
    for start, more in SMALLER.items():
        if command.startswith(start) and "--prompt" not in command:
            arguments += more.format(tmp=tmp).split()
    arguments = [str(ROOT / a) if a.startswith("distill/") else a for a in arguments]
    if arguments[0] == "d2f":
        return [sys.executable, "-m", *arguments]
    if arguments[:2] == ["accelerate", "launch"]:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        return [*launch, *arguments[2:]]
    raise AssertionError(f"the README has a command that this test does not know: {command}")


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith("make ")])
def test_a_command_of_the_readme_runs(command, tmp_path):
    assert run(in_small(command, tmp_path), tmp_path) or "train" in command


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_a_make_target_of_the_readme_runs_a_command_that_exists(command, tmp_path):
    """`make run` is run; the others would run this test again, or train for hours, so the module
    that they start is asked for its help."""
    target = command.split()[1]
    free = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    recipe = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", "-o", ".venv-vllm/.installed", target],
        cwd=ROOT,
        env=free,
        capture_output=True,
        text=True,
    )
    assert recipe.returncode == 0, recipe.stderr
    words = recipe.stdout.strip().splitlines()[-1].split()
    assert words[:2] == [".venv/bin/python", "-m"]
    if target == "run":
        output = run([sys.executable, *words[1:], "--problems", "1"], tmp_path)
        assert "tokens" in output
    else:
        assert run([sys.executable, "-m", words[2], "--help"], tmp_path)


def test_the_python_of_the_readme_runs(tmp_path):
    (program,) = blocks("python")
    assert run([sys.executable, "-c", program], tmp_path)


def test_the_table_is_what_was_measured():
    from distill.make_models import with_results

    assert with_results(README) == README


def test_the_comparison_is_what_the_report_says():
    from benchmarks.readme import RESULT, with_table
    from decode.comparison.report import Report

    assert with_table(README, Report.load(RESULT / "report.json")) == README


def test_the_folders_that_the_readme_names_exist():
    for folder in re.findall(r"`([a-z_]+/)`", README):
        assert (ROOT / folder).is_dir(), folder


def test_the_bundled_models_fit_in_40_megabytes():
    files = [p for p in (ROOT / "d2f" / "models").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 40e6
