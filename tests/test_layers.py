"""Imports point one way: no circle of files, and no package knows one above it. All imports count,
those in functions and for type checking too: who reads a file has to read what it names."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each may use those before it: decode never distill, distill decode (rollouts, evaluation).
ORDER = ("triton_kernels", "d2f", "decode", "distill", "benchmarks")


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Of each module in the packages of `ORDER`, the modules there that it imports."""
    files = {}
    for package in ORDER:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: imported(name, path, files) - {name} for name, path in files.items()}


def imported(name: str, path: Path, files: dict[str, Path]) -> set[str]:
    found = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *(node.module or "").split(".")]).rstrip(".")
            for alias in node.names:  # a module of the package, or a name in its __init__
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in files else source)
    return found & files.keys()


def test_all_imports_are_seen(graph):
    """In a function, for type checking, of a module from its package, of an __init__."""
    assert {name.split(".")[0] for name in graph} == set(ORDER)
    assert {"d2f.cpu", "d2f.compile", "d2f.cache"} <= graph["d2f.model"]
    assert {"d2f.attention", "d2f.families"} <= graph["d2f.convert"]
    assert "d2f.contract" in graph["d2f"]


def test_there_is_no_circle(graph):
    TopologicalSorter(graph).prepare()  # CycleError names one


def test_each_package_uses_only_those_below_it(graph):
    level = {name: ORDER.index(name.split(".")[0]) for name in graph}
    assert not [f"{a} -> {b}" for a, used in graph.items() for b in used if level[a] < level[b]]
