"""Commands that stand in documents, run in small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_small(command: str, smaller: dict[str, str]) -> list[str]:
    """The arguments of a command, with more behind it where it starts with a key of `smaller`."""
    words = command.split('"')  # documents quote with double quotes only
    arguments = [
        part
        for i, text in enumerate(words)
        for part in ([text] if i % 2 else text.split())
    ]  # fmt: skip
    for start, more in smaller.items():
        if command.startswith(start) and "--prompt" not in command:
            arguments += more.split()
    arguments = [str(ROOT / a) if a.startswith(("distill/", "configs/")) else a for a in arguments]
    if arguments[0] == "python":
        return [sys.executable, *arguments[1:]]
    if arguments[0] == "d2f":
        return [sys.executable, "-m", *arguments]
    if arguments[:2] == ["accelerate", "launch"]:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
        return [*launch, *arguments[2:]]
    raise AssertionError(f"a document has a command that no test knows: {command}")
