"""Reach a target with every one of 3 or 4 numbers, one operation a line."""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from d2f.tasks.problem import Problem, pick, pick_integer

COUNTS = (3, 4)
MAX_NUMBER = 12
MAX_VALUE = 99
MIN_TARGET = 10

# Bounded, so that what a model writes cannot be a number of a thousand digits.
POSITIVE = "([1-9][0-9]{0,4})"
STEP = re.compile(f"{POSITIVE} *([-+*/]) *{POSITIVE} *= *{POSITIVE}")


@dataclass(frozen=True)
class Combination:
    """Hold numbers as the question lists them, and the steps that use them up to the target."""

    numbers: tuple[int, ...]
    steps: tuple[str, ...]
    target: int

    @property
    def key(self) -> str:
        """Join the sorted numbers and the target, as in "2,3,7,8=45"."""
        return f"{','.join(map(str, sorted(self.numbers)))}={self.target}"

    def write(self, rng: np.random.Generator) -> Problem:
        """Put it into words; there is one wording."""
        *others, last = map(str, self.numbers)
        question = f"Use {', '.join(others)} and {last} to make {self.target}."
        return Problem("countdown", question, "\n".join(self.steps), self.key)


def draw(rng: np.random.Generator) -> Combination:
    """Combine numbers of 1..MAX_NUMBER at random until the result is MIN_TARGET..MAX_VALUE."""
    count = pick(rng, COUNTS)
    while True:
        numbers = tuple(pick_integer(rng, 1, MAX_NUMBER) for _ in range(count))
        steps, target = _combine(rng, list(numbers))
        if target >= MIN_TARGET:
            return Combination(numbers, steps, target)


def check(problem: Problem, text: str) -> bool:
    """Check that the non-empty lines of text are right steps from the numbers to the target.

    Each step takes two numbers still there and puts back their result, a positive integer;
    there is one step fewer than numbers, and nothing but blanks after the last.
    """
    numbers, _, target = problem.key.partition("=")
    available = [int(number) for number in numbers.split(",")]
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if len(lines) != len(available) - 1:
        return False
    return all(_take_step(line, available) for line in lines) and available == [int(target)]


def _take_step(line: str, available: list[int]) -> bool:
    """Check a step; where it is right, put its result into available for its operands."""
    found = STEP.fullmatch(line)
    if found is None:
        return False
    a, b, result = int(found[1]), int(found[3]), int(found[4])
    for operand in (a, b):
        if operand not in available:
            return False
        available.remove(operand)
    available.append(result)
    # Division is checked as a product, which is exact.
    return {"+": a + b == result, "-": a - b == result, "*": a * b == result, "/": b * result == a}[
        found[2]
    ]


def _combine(rng: np.random.Generator, available: list[int]) -> tuple[tuple[str, ...], int]:
    """Draw steps until one number is left; return them and it, 0 if a step had no result."""
    steps = []
    while len(available) > 1:
        a = available.pop(int(rng.random() * len(available)))
        b = available.pop(int(rng.random() * len(available)))
        if a < b:  # neither negative differences nor fractions
            a, b = b, a
        results = [("+", a + b), ("-", a - b)]
        if b > 1:
            results.append(("*", a * b))
            if a % b == 0:
                results.append(("/", a // b))
        possible = [pair for pair in results if 1 <= pair[1] <= MAX_VALUE]
        if not possible:
            return (), 0
        operator, result = pick(rng, possible)
        steps.append(f"{a}{operator}{b}={result}")
        available.append(result)
    return tuple(steps), available[0]


# The judge of Countdown as the WINO papers pose it: ``\boxed{(3 + 4) * 5}`` for the numbers 3,4,5
# and the target 35. A task file names it `d2f.tasks.countdown:reaches`.

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv}  # fmt: skip
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/"}
_LONGEST = 200  # characters of an expression


def reaches(problem: Problem, text: str) -> bool:
    """Check that the last boxed expression uses each number of the row's `input` ("3,4,5") exactly
    once and comes to its `output`. As in the official code, an equals sign and what follows it is
    ignored."""
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
    """Evaluate exactly. Raises ValueError for anything but whole numbers and + - * /."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found: Fraction = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return found
    raise ValueError("no arithmetic")
