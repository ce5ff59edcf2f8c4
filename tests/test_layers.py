"""Imports point one way: no circle of files, and no package knows one above it. All imports count,
those in functions and for type checking too: who reads a file has to read what it names."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Each may use those before it: decode never distill, distill decode (rollouts, evaluation).
ORDER = ("triton_kernels", "d2f", "decode", "distill", "benchmarks")
Graph = dict[str, set[str]]


def imports(root: Path) -> Graph:
    """Of each module below `root` in the packages of `ORDER`, the modules there that it imports."""
    files = {}
    for package in ORDER:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: _imported(name, path, files) - {name} for name, path in files.items()}


def _imported(name: str, path: Path, files: dict[str, Path]) -> set[str]:
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


def circles(graph: Graph) -> list[str]:
    """Circles as ``a -> b -> a``, each without an edge of those before it."""
    left, found = {name: set(used) for name, used in graph.items()}, []
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            path = error.args[1][::-1]  # of what is imported before what imports it
            found.append(" -> ".join(path))
            left[path[0]].discard(path[1])
        else:
            return found


def wrong_ways(graph: Graph) -> list[str]:
    """Imports of a package from one below it."""
    level = {name: ORDER.index(name.split(".")[0]) for name in graph}
    return [f"{a} -> {b}" for a, used in graph.items() for b in used if level[a] < level[b]]


def test_there_is_no_circle():
    graph = imports(ROOT)
    assert {name.split(".")[0] for name in graph} == set(ORDER)
    found = circles(graph)
    assert not found, "\n".join(["circles of imports:", *found])


def test_each_package_uses_only_those_below_it():
    found = wrong_ways(imports(ROOT))
    assert not found, "\n".join(["imports from below:", *found])


def planted(root: Path, **sources: str) -> Graph:
    """The graph of a tree of files, ``package__module`` by source."""
    for name, source in sources.items():
        path = (root / name.replace("__", "/")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source)
    return imports(root)


def test_planted_circles_are_found(tmp_path):
    """Through a function, for type checking only, by a relative import, through an __init__."""
    graph = planted(
        tmp_path,
        d2f__a="from d2f import b",
        d2f__b="def f():\n    import d2f.c",
        d2f__c="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from d2f.a import A",
        decode__x__low="from .high import y",
        decode__x__high="from ..x import low",
        distill__free="from d2f.a import A\nimport torch",
        distill__user="from distill import run",
    )
    found = [set(circle.split(" -> ")) for circle in circles(graph)]
    assert len(found) == 2
    assert {"d2f.a", "d2f.b", "d2f.c"} in found
    assert {"decode.x.low", "decode.x.high"} in found
    (tmp_path / "distill" / "__init__.py").write_text("from distill.user import U")
    assert {"distill", "distill.user"} in [
        set(circle.split(" -> ")) for circle in circles(imports(tmp_path))
    ]


def test_planted_wrong_ways_are_found(tmp_path):
    graph = planted(
        tmp_path,
        triton_kernels__k="import d2f.a",
        d2f__a="def f():\n    from decode.b import B",
        decode__b="from distill import c",
        distill__c="from decode import b",
        benchmarks__d="import distill.c, decode.b, d2f.a, triton_kernels.k",
    )
    wrong = {"triton_kernels.k -> d2f.a", "d2f.a -> decode.b", "decode.b -> distill.c"}
    assert set(wrong_ways(graph)) == wrong
