"""Measurements run one after another, as long as there is time."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.bring_up import Measurement
from benchmarks.gpu.machine import ROOT, commit
from benchmarks.gpu.results_file import CUT, DONE, FAILED, NOT_RUN, ResultsFile
from benchmarks.gpu.timed_child import GRACE, run_until
from d2f.files import make_folder

FALLBACK = re.compile(r"Warning: ((?:the Triton kernel|no CUDA graph).*)")
KEPT = 6000  # characters of what a measurement printed, its end
SHOWN = 25  # lines of what a failed one printed


class Session:
    """Runs measurements into a file of results, until `deadline` (`time.monotonic`)."""

    def __init__(
        self,
        results: ResultsFile,
        deadline: float,
        vllm_python: str | None = None,
    ):
        self.results, self.deadline, self.vllm_python = results, deadline, vllm_python
        self.dry, self.commit = results.facts["dry_run"], commit()
        entries = results.measured.values()
        self.warnings = list(dict.fromkeys(w for entry in entries for w in entry["warnings"]))

    def run(self, measurements: Sequence[Measurement]) -> None:
        """All that are not measured yet and fit into the time: new ones, then those that failed."""
        make_folder(self.results.path.parent)
        measured = self.results.measured
        todo = []
        for found in measurements:
            entry = measured.get(found.name)
            if entry and entry["state"] == DONE and entry["command"] == self.words(found):
                _say(found, f"measured on {entry['date']}, same device, code and versions")
            else:
                todo.append(found)
        for found in sorted(todo, key=lambda m: measured.get(m.name, {}).get("state") == FAILED):
            seconds = self.results.seconds(found.name)
            if seconds is None:
                seconds = 0.0 if self.dry else found.seconds
            left = max(0.0, self.deadline - time.monotonic())
            cuda = self.results.facts["device"] != "cpu"
            if why := found.hindrance(cuda=cuda, dry=self.dry):
                _say(found, f"not run: {why}")
                self.results.save(found.name, self._entry(found, NOT_RUN, why, 0.0))
            elif seconds + GRACE > left:
                _say(found, f"left for the next call: about {seconds:.0f} s, {left:.0f} are left")
            else:
                self.measure(found)

    def words(self, found: Measurement) -> list[str]:
        """The module of a measurement, and its arguments."""
        words = found.words(dry=self.dry)
        if found.part == "compare" and self.vllm_python:
            words += ["--vllm-python", self.vllm_python]
        beside = self.results.path.with_suffix("").resolve()
        if beside.is_relative_to(ROOT):  # where it runs: no path of this machine in a report
            beside = beside.relative_to(ROOT)
        return [word.format(beside=beside, code=self.results.facts["code"]) for word in words]

    def measure(self, found: Measurement) -> None:
        """One measurement, saved with every row that it writes."""
        began = time.monotonic()
        earlier = self.results.measured.get(found.name)
        with tempfile.TemporaryDirectory() as folder:
            rows, log = Path(folder) / "found.json", Path(folder) / "log.txt"
            written = ""

            def save(state: str, why: str = "") -> None:
                nonlocal written
                text = log.read_text(encoding="utf-8", errors="replace")
                for warning in FALLBACK.findall(text):
                    if warning not in self.warnings:
                        self.warnings.append(warning)
                entry = self._entry(found, state, why, time.monotonic() - began)
                entry |= {"found": json.loads(written or "{}"), "output": text[-KEPT:]}
                # Of two that were cut off the longer is kept.
                if (
                    state != CUT
                    or earlier is None
                    or len(json.dumps(earlier["found"])) <= len(written)
                ):
                    self.results.save(found.name, entry)

            def look() -> None:
                nonlocal written
                if rows.exists() and (text := rows.read_text(encoding="utf-8")) != written:
                    written = text
                    save(CUT)

            status = run_until(
                [*found.before, sys.executable, "-m", *self.words(found), "--json", str(rows)],
                self.deadline - GRACE, log, look, cwd=ROOT, environment=_environment(),
            )  # fmt: skip
            if status is None:
                save(CUT, "the time was over")
            elif status == 0:
                save(DONE)
            else:
                save(FAILED, f"exit status {status}")
                said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
                print("\n".join(f"    {line}" for line in said))
        entry = self.results.measured[found.name]
        why = f": {entry['why']}" if entry["why"] else ""
        _say(found, f"{entry['state']}{why}, {time.monotonic() - began:.0f} s")
        for warning in entry["warnings"]:
            print(f"    warned of: {warning}")

    def _entry(self, found: Measurement, state: str, why: str, seconds: float) -> dict[str, Any]:
        return {
            "state": state,
            "why": why,
            "command": self.words(found),
            "date": date.today().isoformat(),
            "commit": self.commit,
            "seconds": round(seconds, 1),
            "warnings": list(self.warnings),
            "found": {},
            "output": "",
        }


def _environment() -> dict[str, str]:
    """That of this process, where the children find the same packages, and print at once."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _say(found: Measurement, what: str) -> None:
    print(f"{found.part}, {found.name}: {what}", flush=True)
