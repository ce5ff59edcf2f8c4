r"""The judge of Countdown as the WINO papers pose it: ``\boxed{(3 + 4) * 5}`` for the numbers 3,4,5
and the target 35. A task file names it `d2f.tasks.boxed_expression:reaches`."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

from d2f.tasks.problem import Problem

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv}  # fmt: skip
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/"}
_LONGEST = 200  # characters of an expression


def reaches(problem: Problem, text: str) -> bool:
    """Whether the last boxed expression of a response uses each number of the row's `input`
    ("3,4,5") exactly once and comes to its `output`. What stands from an equals sign on is passed
    over, as in the official code."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return False
    expression = text[start + len("\\boxed{") :].partition("}")[0].partition("=")[0]
    for latex, sign in _LATEX.items():
        expression = expression.replace(latex, sign)
    wanted = sorted(int(number) for number in str(problem.row["input"]).split(","))
    if len(expression) > _LONGEST or sorted(map(int, re.findall("[0-9]+", expression))) != wanted:
        return False
    try:
        found = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return found == int(problem.row["output"])


def _value(node: ast.expr) -> Fraction:
    """Exactly. Raises ValueError for anything but whole numbers and + - * /, ZeroDivisionError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found: Fraction = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return found
    raise ValueError("no arithmetic")
