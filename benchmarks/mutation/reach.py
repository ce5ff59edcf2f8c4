"""Which tests reach which line: one run of the tests with coverage, kept for the same tree."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from coverage import Coverage, CoverageData

from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.workplace import Workplace
from d2f.errors import InputError, brief
from d2f.files import write_beside

RC = """[run]
parallel = true
data_file = {folder}/coverage
context = ${{MUTATION_CONTEXT}}
include = {include}
disable_warnings = no-data-collected, module-not-imported, no-ctracer, already-imported
"""


WORD = re.compile(r"\w{3,}")


class Reach:
    """What `record` found. root: where the tests are, for their text."""

    def __init__(self, folder: Path, root: Path) -> None:
        found = json.loads((folder / "tests.json").read_text())
        self.tests: dict[str, dict] = found["tests"]
        self.unusable: list[str] = found["failing"]
        self._root = root
        self._words_of: dict[str, set[str]] = {}  # by test file
        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        measured = self._data.measured_files()
        self._measured = {file.removeprefix(found["tree"] + "/"): file for file in measured}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that can see a mutant, the likeliest to see it first.

        They reach a line of its statement, or their file names its module: compiled functions are
        not seen, nor a process that was killed or that several tests share. What runs when a module
        is imported may be seen by any test. There is a limit of time: those that reach the line and
        name the module, those whose files have the rarest words around the change (a key, what a
        message says), the others that reach it, and the rest come in turns, of each the quickest
        first.
        """
        names = _naming(mutant.path)
        contexts: set[str] = set()
        for path in self._measured:
            if path == mutant.path or (not mutant.reached_at and self._contains(path, names)):
                by_line = self._data.contexts_by_lineno(self._measured[path])
                for line in mutant.reached_at or by_line:
                    contexts.update(by_line.get(line, ()))
        reaching = {test for context in contexts for test in self._in_context(context)}
        files = {test.split("::")[0] for test in self.tests}
        naming = {file for file in files if self._contains(file, names)}
        named = {test for test in self.tests if test.split("::")[0] in naming}
        others = set() if mutant.reached_at else set(self.tests) - reaching - named
        worded = self._worded(mutant, files) & (reaching | others) - (reaching & named)
        ends: dict[str, float] = {}  # of each in its group, in seconds
        for group in (
            reaching & named,
            worded,
            reaching - named - worded,
            named - reaching,
            others - worded,
        ):
            tests = self._quickest_first(group)
            seconds = [self.tests[test]["seconds"] for test in tests]
            ends |= zip(tests, itertools.accumulate(seconds), strict=True)
        return sorted(ends, key=lambda test: (ends[test], test))

    def _worded(self, mutant: Mutant, files: set[str]) -> set[str]:
        """Tests in the files that have any of the three rarest words around a change."""
        lines = mutant.diff.splitlines()
        around = {word for line in lines if line[:1] in " -" for word in WORD.findall(line)}
        having = {word: {file for file in files if word in self._words(file)} for word in around}
        rarest = sorted((len(found), word) for word, found in having.items() if found)[:3]
        chosen = set().union(*(having[word] for _, word in rarest))
        return {test for test in self.tests if test.split("::")[0] in chosen}

    def _words(self, path: str) -> set[str]:
        if path not in self._words_of:
            text = (self._root / path).read_text(encoding="utf-8")
            self._words_of[path] = set(WORD.findall(text))
        return self._words_of[path]

    def _contains(self, path: str, names: re.Pattern[str]) -> bool:
        return bool(names.search((self._root / path).read_text(encoding="utf-8")))

    def _in_context(self, context: str) -> Iterable[str]:
        if not context.startswith("fixture "):
            return [context] if context in self.tests else []
        node, _, name = context.removeprefix("fixture ").rpartition("::")
        return (
            t for t, about in self.tests.items() if t.startswith(node) and name in about["fixtures"]
        )

    def _quickest_first(self, tests: set[str]) -> list[str]:
        tests = {t for t in tests if self.tests[t]["ran"]}.difference(self.unusable)
        of_file: dict[str, float] = {}
        for test in tests:
            file = test.split("::")[0]
            of_file[file] = of_file.get(file, 0.0) + self.tests[test]["seconds"]

        def order(test: str) -> tuple[float, str, float, str]:
            file = test.split("::")[0]
            return of_file[file], file, self.tests[test]["seconds"], test

        return sorted(tests, key=order)


def _naming(path: str) -> re.Pattern[str]:
    """How files name a module: d2f.cache, d2f/cache.py, from d2f import cache."""
    module = re.sub(r"(/__\w+__)?\.py$", "", path)  # decode/__init__.py is named decode
    package, _, name = (re.escape(part) for part in module.rpartition("/"))
    package = package.replace("/", "[./]") + r"([./]| import .*\b)" if package else ""
    return re.compile(rf"\b{package}{name}\b")


def record(
    folder: Path, place: Workplace, folders: Sequence[str], tests: Sequence[str], jobs: int
) -> None:
    """Run the tests with coverage of `folders`, into `folder`. Raises InputError."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in [*folder.glob("coverage*"), *folder.glob("tests-*.json")]:  # of a stopped run
        left.unlink()
    include = ", ".join(f"{place.tree}/{name}/*" for name in folders)
    rc = folder / "coveragerc"
    rc.write_text(RC.format(folder=folder, include=include))
    status, said = place.pytest([*tests, f"-n{jobs}"], {"MUTATION_RECORD": str(folder)})
    if status not in (0, 1):
        raise InputError(f"the tests could not be run: {brief(said[-2000:])}")
    Coverage(config_file=str(rc)).combine()
    found: dict[str, dict] = {}
    for part in folder.glob("tests-*.json"):
        found |= json.loads(part.read_text())
    # Some fail only because of coverage: the others could kill no mutant.
    failing = [test for test, about in found.items() if about["failed"]]
    if failing:
        failing = place.run_chosen(dict.fromkeys(failing, 600.0), 3600.0).failed
    kept = {"tree": str(place.tree), "tests": found, "failing": failing}
    write_beside(folder / "tests.json", json.dumps(kept))
