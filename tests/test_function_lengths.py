"""A function of distill/ can be read at once: none has more than 60 lines without its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

MOST = 60
FOLDER = Path(__file__).parent.parent / "distill"


def lengths(source: str) -> dict[str, int]:
    """Lines of each function, decorators and signature counted, by ``name:line``."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines = node.end_lineno - first + 1
            if ast.get_docstring(node) is not None:
                lines -= node.body[0].end_lineno - node.body[0].lineno + 1
            found[f"{node.name}:{node.lineno}"] = lines
    return found


def test_what_is_counted():
    source = '@a\ndef f(\n    b,\n):\n    """Of\n    two."""\n    return b\n\n\ndef g(): ...\n'
    assert lengths(source) == {"f:2": 5, "g:10": 1}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda p: str(p.name))
def test_no_function_is_longer_than_a_reader_can_hold(path):
    found = lengths(path.read_text(encoding="utf-8"))
    assert {name: lines for name, lines in found.items() if lines > MOST} == {}
