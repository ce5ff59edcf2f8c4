"""python -m benchmarks.gpu --output benchmarks/results/gpu/h100.json --minutes 9

Run every GPU measurement of the project on this machine's NVIDIA GPU, in this order:

    correctness  the kernels' tests and those marked `gpu`, natively
    decode_step  a decoding forward of LLaDA-8B's and Dream-7B's shapes against its floor
    kernels      attention, loss and confidence beside what PyTorch and others have
    training     a step of LLaDA-8B's shape at 1,024 tokens, and at 4,096 with checkpointing
    forward      the parts of a decoding forward of the bundled models
    compare      the bundled models beside each other, and beside vLLM with --vllm-python

The file is whole after every measurement. The same command goes on with it: what was measured on
the same device with the same code and versions is not measured again; what failed is, at the end.
With --minutes a measurement that would not be over in time is left for the next call, and one that
takes longer than expected is cut off; what it had written is kept. A warning that a kernel or a
graph is not used stands beside every later figure, which is then one of the plain computation.

At the end come the tables for docs/gpu.md; --table prints those of a file, on any machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import parser
from d2f.errors import InputError
from d2f.files import make_folder, write_beside

ROOT = Path(__file__).parents[1]
CODE = ("triton_kernels", "d2f", "decode", "distill", "benchmarks", "tests")
FALLBACK = re.compile(r"Warning: ((?:the Triton kernel|no CUDA graph).*)")
KEPT = 6000  # characters of what a measurement printed, its end
GRACE = 5.0  # seconds in which a measurement may end by itself
PARTS = ("correctness", "decode_step", "kernels", "training", "forward", "compare")
DONE, FAILED, CUT, NOT_RUN = "done", "failed", "cut", "not run"
TESTS = ("pytest", "hypothesis")


@dataclass(frozen=True)
class Measurement:
    """A process that measures something and writes each row to the file that `--json` names.

    command: a module of benchmarks with its arguments. small: those of a dry run; None where it
    means something on a GPU alone, or another measurement runs the same module. seconds: a guess
    for an H100, until it was measured. needs: modules without which it does not run.
    """

    part: str
    name: str
    seconds: int
    command: str
    small: str | None = None
    needs: tuple[str, ...] = ()

    def words(self, *, dry: bool) -> list[str]:
        """The module and its arguments."""
        module, *arguments = self.command.split()
        return [f"benchmarks.{module}", *((self.small or "").split() if dry else arguments)]

    def hindrance(self, *, cuda: bool, dry: bool) -> str:
        """Why it does not run here, empty where it does."""
        if self.small is None and (dry or not cuda):
            return "not for a dry run" if cuda else "needs a GPU"
        missing = [name for name in self.needs if find_spec(name) is None]
        return f"needs {' and '.join(missing)}" if missing else ""


_STEP = "decode_step --repeat 10 --rows 16 64 --shapes"
MEASUREMENTS = tuple(Measurement(*row) for row in (
    ("correctness", "kernels' tests", 60, "gpu_parts kernels --jobs 12", None, TESTS),
    ("correctness", "tests marked gpu", 60, "gpu_parts marked --jobs 4", None, TESTS),
    ("decode_step", "a decoding step of LLaDA-8B, 512 cached", 75, f"{_STEP} LLaDA-8B --cached 512",
     "--shapes tiny --rows 4 --cached 16 --repeat 1"),
    ("decode_step", "a decoding step of LLaDA-8B, 4,096 cached", 75,
     f"{_STEP} LLaDA-8B --cached 4096"),
    ("decode_step", "a decoding step of Dream-7B, 512 cached", 75,
     f"{_STEP} Dream-7B --cached 512"),
    ("decode_step", "a decoding step of Dream-7B, 4,096 cached", 75,
     f"{_STEP} Dream-7B --cached 4096"),
    ("kernels", "attention", 120, "kernels attention --cached 512 4096 --lengths 1024 4096",
     "attention --rows 4 --cached 16 --lengths 8 --repeat 1"),
    ("kernels", "the distillation loss", 90, "kernels loss --vocabularies 126464 --rows 512 4096",
     "loss --rows 3 --vocabularies 300 --width 8 --repeat 1"),
    ("kernels", "confidence", 30, "kernels confidence --rows 16 64 --vocabularies 126464",
     "confidence --rows 1 --vocabularies 300 --width 8 --repeat 1"),
    ("training", "a training step of 1,024 tokens", 90, "train_step --repeat 3",
     "--shape tiny --length 64 --repeat 1 --ways ours"),
    ("training", "a training step of 4,096 tokens", 90,
     "train_step --repeat 3 --length 4096 --checkpointing --ways ours"),
    ("forward", "parts of a forward of tiny-d2f", 60, "forward --model tiny-d2f --device cuda",
     "--model tiny-d2f --problems 1 --batch-sizes 1"),
    ("forward", "parts of a forward of tiny-ar", 60, "forward --model tiny-ar --device cuda"),
    ("compare", "the bundled models compared", 400,
     "gpu_parts compare --output {beside}-compare-{code}",
     "compare --output {beside}-compare-{code}", ("httpx", "openai")),
))  # fmt: skip


Run = dict[str, Any]
"""What was measured on one device with one state of the code: {"facts": {"device", "torch", "code",
...}, "measured": {NAME: entry}}. An entry has its state (done, failed, cut, not run) and why, its
command, date, commit and seconds, the warnings after which figures are of the plain computation,
what the benchmark wrote (found) and the end of what it printed (output)."""


def run_of(runs: list[Run], facts: dict[str, Any]) -> Run:
    """Find the last run of these facts, or begin one."""
    found = next((run for run in reversed(runs) if run["facts"] == facts), None)
    if found is None:
        runs.append(found := {"facts": facts, "measured": {}})
    return found


def measure_all(
    measurements: Sequence[Measurement],
    path: Path,
    facts: dict[str, Any],
    deadline: float = math.inf,
    vllm_python: str | None = None,
) -> list[Run]:
    """Measure what is missing and fits into the time until `deadline` (`time.monotonic`): new ones,
    then those that failed. Write `path` after each; return the runs in it."""
    runs = read_runs(path) if path.exists() else []
    run, dry, commit = run_of(runs, facts), facts["dry_run"], _commit()
    measured = run["measured"]
    warnings = list(dict.fromkeys(w for entry in measured.values() for w in entry["warnings"]))
    make_folder(path.parent)
    for found in sorted(
        measurements, key=lambda m: measured.get(m.name, {}).get("state") == FAILED
    ):
        words, entry = _words(found, path, facts, vllm_python), measured.get(found.name)
        if entry and entry["state"] == DONE and entry["command"] == words:
            _say(found, f"measured on {entry['date']}, same device, code and versions")
            continue
        left = max(0.0, deadline - time.monotonic() - GRACE)
        if not dry and found.seconds > left:
            _say(found, f"left for the next call: about {found.seconds} s, {left:.0f} are left")
            continue
        made: Run = {"state": NOT_RUN, "found": {}, "output": ""}
        made["why"] = found.hindrance(cuda=facts["device"] != "cpu", dry=dry)
        began = time.monotonic()
        try:
            if not made["why"]:
                _measure(words, left, made)
        finally:  # also of one that was interrupted what it has written is kept
            warnings += [w for w in FALLBACK.findall(made["output"]) if w not in warnings]
            made |= {"command": words, "date": date.today().isoformat(), "commit": commit}
            made |= {"seconds": round(time.monotonic() - began, 1), "warnings": list(warnings)}
            made["output"] = made["output"][-KEPT:]
            measured[found.name] = made
            write_beside(path, json.dumps({"runs": runs}, indent=1) + "\n")
        why = f": {made['why']}" if made["why"] else ""
        _say(found, f"{made['state']}{why}, {made['seconds']:.0f} s")
        for warning in warnings:
            print(f"    warned of: {warning}")
        if made["state"] == FAILED:
            print("\n".join(f"    {line}" for line in made["output"].splitlines()[-25:]))
    return runs


def _words(
    found: Measurement, path: Path, facts: dict[str, Any], vllm_python: str | None
) -> list[str]:
    """Return the module of a measurement, and its arguments."""
    words = found.words(dry=facts["dry_run"])
    if found.part == "compare" and vllm_python:
        words += ["--vllm-python", vllm_python]
    beside = path.with_suffix("").resolve()
    if beside.is_relative_to(ROOT):  # where it runs: no path of this machine in a report
        beside = beside.relative_to(ROOT)
    return [word.format(beside=beside, code=facts["code"]) for word in words]


def _measure(words: list[str], seconds: float, made: Run) -> None:
    """Run a measurement for at most so many seconds, then end it with all that it started; fill in
    its state, what it has written and what it printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        rows, log = Path(folder) / "found.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", *words, "--json", str(rows)]
        made.update(state=CUT, why="it was interrupted")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, process_group=0,
            )  # fmt: skip
        try:
            status = process.wait(None if math.isinf(seconds) else seconds)
            made.update(state=DONE, why="")
            if status:
                made.update(state=FAILED, why=f"exit status {status}")
        except subprocess.TimeoutExpired:
            made["why"] = "the time was over"
        finally:
            with suppress(ProcessLookupError):  # nothing of its group is left
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            made["output"] = log.read_text(encoding="utf-8", errors="replace")
            made["found"] = json.loads(rows.read_text("utf-8")) if rows.exists() else {}


def code() -> str:
    """Hash all Python files of this checkout, also where there is no git."""
    total = hashlib.sha256()
    for path in sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        total.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def _commit() -> str | None:
    """Return the commit that is checked out, None without git or a repository."""
    if shutil.which("git") is None:
        return None
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None


def device_and_versions() -> dict[str, Any]:
    """Collect the facts of this process; called in one of its own, it frees the GPU's memory."""
    import numpy
    import torch
    import transformers
    import triton

    found: dict[str, Any] = {"device": "cpu", "cuda": None}
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        found = {
            "device": facts.name,
            "capability": f"{facts.major}.{facts.minor}",
            "gib": round(facts.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    versions = {p.__name__: p.__version__ for p in (torch, triton, transformers, numpy)}
    return {**found, **versions, "python": platform.python_version()}


def _say(found: Measurement, what: str) -> None:
    print(f"{found.part}, {found.name}: {what}", flush=True)


# The tables.


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Read the runs in a file. Raises InputError."""
    try:
        runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: expected a file that python -m benchmarks.gpu has written"
        ) from error
    return runs


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Show every run: what it was measured on, a line a measurement, and the rows of each."""
    return "\n\n".join("\n\n".join(_run(run)) for run in runs) or "Nothing has been measured."


def _run(run: dict[str, Any]) -> Iterator[str]:
    facts, measured = dict(run["facts"]), run["measured"]
    dates = sorted({entry["date"] for entry in measured.values()})
    commits = sorted({entry["commit"] for entry in measured.values() if entry["commit"]})
    dry = "Dry run: no figure here means anything. " if facts.pop("dry_run") else ""
    yield f"**{facts.pop('device')}, {' and '.join(dates) or 'not yet'}**"
    said = [f"{name} {value}" for name, value in facts.items() if value is not None]
    yield f"{dry}{', '.join([*said, *(f'commit {name}' for name in commits)])}."
    rows = []
    for name, entry in measured.items():
        state = entry["state"] + (f": {entry['why']}" if entry["why"] else "")
        row = {"measured": name, "state": state, "seconds": entry["seconds"]}
        rows.append({**row, "warned of": "; ".join(entry["warnings"])})
    yield _table(rows)
    for name, entry in measured.items():
        lists = [rows for rows in entry["found"].values() if rows and isinstance(rows, list)]
        tables = [rows for rows in lists if isinstance(rows[0], dict)]
        if tables:
            said = "; ".join(entry["warnings"])
            warned = f" **With a fallback: {said}.**" if said else ""
            whole = "" if entry["state"] == DONE else f" ({entry['state']}: what there is of it)"
            yield f"{name}{whole}: `python -m {' '.join(entry['command'])}`{warned}"
            yield from map(_table, tables)
        if "report" in entry["found"]:  # Markdown already
            yield entry["found"]["report"].replace("\n#", "\n###").removeprefix("# ").strip()


def _table(rows: Sequence[dict[str, Any]]) -> str:
    from decode.report import markdown_table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = ([_cell(row.get(column, "")) for column in columns] for row in rows)
    return "\n".join(markdown_table(columns, cells))


def _cell(value: Any) -> str:
    """Show four digits of a number, and nothing that would end the cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print what was measured."""
    began = time.monotonic()
    given = parser(__doc__)
    given.add_argument("--output", type=Path, metavar="FILE", help="JSON of the results")
    given.add_argument("--minutes", type=float, default=math.inf, help="to stop within")
    given.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    given.add_argument("--vllm-python", help="Python of an environment with vLLM for this GPU")
    given.add_argument("--dry-run", action="store_true", help="everything at tiny sizes")
    given.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print their tables")
    options = given.parse_args(arguments)
    try:
        if options.table:
            print(markdown([run for path in options.table for run in read_runs(path)]))
            return 0
        if options.output is None:
            raise InputError("expected --output FILE for the results, or --table FILE to print")
        from benchmarks.common import in_fresh_process

        facts = in_fresh_process(device_and_versions) or {}
        if facts["device"] == "cpu" and not options.dry_run:
            raise InputError("expected an NVIDIA GPU, torch finds none (--dry-run does without)")
        facts |= {"code": code(), "dry_run": options.dry_run}
        chosen = [found for found in MEASUREMENTS if found.part in options.only]
        deadline = began + 60 * options.minutes
        runs = measure_all(chosen, options.output, facts, deadline, options.vllm_python)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(f"\n{markdown(runs)}")
    measured = run_of(runs, facts)["measured"]
    failed = [name for name, entry in measured.items() if entry["state"] == FAILED]
    if failed:
        print(f"error: failed, see above: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends what it started
    sys.exit(main())
