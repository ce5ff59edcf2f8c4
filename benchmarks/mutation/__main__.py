"""python -m benchmarks.mutation

Puts one small fault after the other into copies of the tree, runs the tests that reach its line,
and prints the faults that no test noticed and the share that one did. Which tests reach which line
is found by one run of all tests, and kept in runs/mutation with the results as long as no Python
file changes: the same command again goes on where it was.

A fault is noticed if a test fails, or takes more than a minute and ten times its time. Where the
tests that reach a line take longer than --seconds together, the quickest files of them are run. A
fault counts as unnoticed, too, where no test reaches it, and where the test that noticed it fails
without it as well.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import queue
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError
from d2f.files import locked
from decode.report import wilson

if TYPE_CHECKING:
    from benchmarks.mutation.mutants import Mutant
    from benchmarks.mutation.reach import Reach
    from benchmarks.mutation.workplace import Workplace

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ["decode/engine", "decode/decoders", "d2f", "distill"]
NO_FAILURE = (0, 5)  # statuses of pytest: all passed, none was there


def measure(options: argparse.Namespace, root: Path, kept: Path) -> list[dict[str, Any]]:
    """Results of the sampled mutants, in the order of the sample; new ones are added to `kept`."""
    from benchmarks.mutation.mutants import sample
    from benchmarks.mutation.reach import Reach, record
    from benchmarks.mutation.workplace import Workplace

    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        Path(scratch).chmod(0o755)  # some tests run programs as another user
        places = [Workplace(root, Path(scratch, str(job))) for job in range(options.jobs)]
        tree = places[0].tree  # as it is now, whatever is edited meanwhile
        kept = kept.resolve() / _fingerprint(tree, [*options.folders, "of", *options.tests])
        try:
            with locked(kept):
                if not (kept / "tests.json").is_file():
                    print("recording which tests reach which line ...", flush=True)
                    record(kept, places[0], options.folders, options.tests, options.jobs)
                reach = Reach(kept, tree)
                for test in reach.unusable:
                    print(f"left out, fails without a fault: {test}")
                drawn = sample(tree, options.folders, options.seed)
                mutants = list(itertools.islice(drawn, options.mutants))
                results = _try_all(mutants, reach, places, kept / "results.jsonl", options.seconds)
                _check_kills(results, reach, places[0])
                return results
        finally:
            for place in places:
                place.stop()


def _fingerprint(tree: Path, more: Iterable[str]) -> str:
    digest = hashlib.sha256("\n".join(more).encode())
    for file in sorted(tree.rglob("*.py")):
        digest.update(file.relative_to(tree).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _try_all(
    mutants: list[Mutant], reach: Reach, places: list[Workplace], file: Path, seconds: float
) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.is_file() else []
    known = {(row["path"], row["diff"], row["seconds"]): row for row in map(json.loads, lines)}
    free: queue.SimpleQueue[Workplace] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def attempt(mutant: Mutant) -> dict[str, Any]:
        place = free.get()
        try:
            return _try(mutant, reach, place, seconds)
        finally:
            free.put(place)

    keys = [(mutant.path, mutant.diff, seconds) for mutant in mutants]
    new = [mutant for mutant, key in zip(mutants, keys, strict=True) if key not in known]
    with ThreadPoolExecutor(len(places)) as pool, file.open("a") as log:
        waiting = [pool.submit(attempt, mutant) for mutant in new]
        try:
            for done in as_completed(waiting):
                row = done.result()
                known[row["path"], row["diff"], seconds] = row
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(_line(row), flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for place in places:
                place.stop()
            raise
    return [known[key] for key in keys]


def _try(mutant: Mutant, reach: Reach, place: Workplace, seconds: float) -> dict[str, Any]:
    tests = reach.tests_of(mutant)
    times = [reach.tests[test]["seconds"] for test in tests]
    ends = itertools.accumulate(times)
    chosen = [test for test, end in zip(tests, ends, strict=True) if end < seconds] or tests[:1]
    row = {"path": mutant.path, "line": mutant.line, "kind": mutant.kind, "diff": mutant.diff}
    row |= {"seconds": seconds, "reaching": len(tests), "ran": 0, "killed": False, "by": None}
    if not chosen:
        return row
    source = (place.tree / mutant.path).read_text(encoding="utf-8")
    began = time.monotonic()
    place.write(mutant.path, mutant.source)
    try:
        limits = {test: 60.0 + 10.0 * reach.tests[test]["seconds"] for test in chosen}
        outcome = place.run_chosen(limits, 300.0 + 10.0 * sum(times[: len(chosen)]), "-x")
    finally:
        place.write(mutant.path, source)
    row |= {"killed": outcome.status not in NO_FAILURE, "ran": len(outcome.ran)}
    if row["killed"]:
        row["by"] = outcome.ran[-1] if outcome.ran else "the import of the tests"
        over_time = outcome.ran and not outcome.failed and outcome.status in (None, 1)
        row["how"] = "over its time" if over_time else "failed"
    return row | {"took": round(time.monotonic() - began, 1)}


def _check_kills(results: list[dict[str, Any]], reach: Reach, place: Workplace) -> None:
    """Run the tests that noticed something without a fault: a kill by one that fails is none."""
    killers = {row["by"] for row in results if row["by"] in reach.tests}
    checked = killers or itertools.islice(reach.tests, 1)
    outcome = place.run_chosen(dict.fromkeys(sorted(checked), 600.0), 3600.0)
    if not outcome.ran:
        raise InputError("no test runs in a copy of the tree: nothing is known of any fault")
    for row in results:
        if row["by"] in killers.difference(outcome.ran) | set(outcome.failed):
            row["killed"] = False
            print(f"{row['path']}:{row['line']}: {row['by']} fails without the fault as well")


def _line(row: dict[str, Any]) -> str:
    place = f"{row['path']}:{row['line']}"
    if row["killed"]:
        return f"killed    {place} {row['kind']}: {row['how']}: {row['by']}"
    tests = f"{row['ran']} of {row['reaching']} tests that reach it ran"
    tests = tests if row["reaching"] else "no test reaches it"
    return f"survived  {place} {row['kind']}: {tests}"


def report(results: list[dict[str, Any]], seed: int) -> str:
    """The survivors, each with its change, and the share that was killed with its interval."""
    lines = []
    for row in results:
        if not row["killed"]:
            lines += ["", _line(row), row["diff"]]
    killed, count = sum(row["killed"] for row in results), len(results)
    low, high = wilson(killed, count)
    late = sum(row["killed"] and row["how"] != "failed" for row in results)
    about = f"95 % interval {low:.1%} to {high:.1%}; seed {seed}; {late} by a time limit"
    lines += ["", f"killed {killed} of {count} mutants, {killed / count:.1%} ({about})"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mutants", type=int, default=100, help="faults to try (default 100)")
    parser.add_argument("--seed", type=int, default=15, help="of their sample (default 15)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--seconds", type=float, default=300, help="of tests a fault (default 300)")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="where faults are made")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests")
    options = parser.parse_args(arguments)
    try:
        for name in ("mutants", "jobs"):
            if getattr(options, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(options, name)}")
        for name in (*options.folders, *options.tests):
            if not (ROOT / name.split("::")[0]).exists():
                raise InputError(f"--folders and --tests are in {ROOT}, got {name}")
        if find_spec("mutmut") is None:
            raise InputError("faults are made by mutmut: pip install 'd2f-toolkit[dev]'")
        results = measure(options, ROOT, ROOT / "runs" / "mutation")
        if not results:
            raise InputError(f"{', '.join(options.folders)}: no line that can have a fault")
        print(report(results, options.seed))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
