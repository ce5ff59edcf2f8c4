"""A copy of the tree in which tests run, so that the tree itself is never changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutation import plugin

NOT_COPIED = shutil.ignore_patterns(
    *(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis"),
    *("runs", "outputs", "wandb", "build", "dist", "*.egg-info"),
)


class Outcome(NamedTuple):
    """Of chosen tests: pytest's status, None past the limit; ids in the order in which they ran."""

    status: int | None
    ran: list[str]
    failed: list[str]


class Workplace:
    """`folder/tree` is a copy of `root`; tests run there, one call at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree, self._folder, self._changes = folder / "tree", folder, 0
        self._process: subprocess.Popen | None = None
        shutil.copytree(root, self.tree, ignore=NOT_COPIED, symlinks=True)
        (folder / "plugin").mkdir()
        shutil.copy(plugin.__file__, folder / "plugin" / "mutation_plugin.py")

    def write(self, path: str, source: str) -> None:
        file = self.tree / path
        file.write_text(source, encoding="utf-8")
        # Python knows compiled files by size and second: each change has a second of its own.
        self._changes += 1
        os.utime(file, (self._changes, self._changes))

    def run_chosen(self, limits: dict[str, float], seconds: float, *more: str) -> Outcome:
        """Run tests in their order; a limit of seconds each, and of all of them together."""
        chosen = self._folder / "chosen.json"
        chosen.write_text(json.dumps(limits))
        files = dict.fromkeys(test.split("::")[0] for test in limits)
        status, _ = self.pytest([*files, *more], {"MUTATION_CHOSEN": str(chosen)}, seconds)
        log = chosen.with_suffix(".log")
        lines = log.read_text().splitlines() if log.is_file() else []
        log.unlink(missing_ok=True)
        ran, failed = (
            [line.removeprefix(word) for line in lines if line.startswith(word)]
            for word in ("ran ", "failed ")
        )
        return Outcome(status, ran, failed)

    def pytest(
        self, arguments: Sequence[str], environment: dict[str, str], seconds: float | None = None
    ) -> tuple[int | None, str]:
        """Run pytest in the copy; its status, None past the limit, and what it said."""
        ours = ("COVERAGE", "MUTATION", "PYTHON")  # these tests may be run by another measurement
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        environment = inherited | environment
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
        environment["PYTHONPATH"] = f"{self.tree}{os.pathsep}{self._folder / 'plugin'}"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "mutation_plugin",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--basetemp={self._folder / 'tmp'}", *arguments]
        with (self._folder / "said.txt").open("w+") as said:
            process = self._process = subprocess.Popen(
                command,
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self.stop()  # what a test left running, too
                process.wait()
            said.seek(0)
            return status, said.read()

    def stop(self) -> None:
        """End the running tests and all that they started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
