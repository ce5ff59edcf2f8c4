"""Write a short Python function that is described in words; unit tests judge it.

    Write a Python function rate(sizes) of a list of whole numbers. Leave out those of 3 or less.
    Square each. Make each at most 20. Add them up. Return that plus 4.

The tests compare what the response returns with what the reference returns, both in the small
Python of `d2f.tasks.mini_python`: what a model wrote is not run as code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from d2f.tasks import coding_grammar as grammar
from d2f.tasks.mini_python import Function, Refused
from d2f.tasks.problem import Problem, pick, pick_integer

MIN_STEPS, MAX_STEPS = 3, 6
NUMBERS = range(-20, 41)  # in the tests
RANDOM_TESTS, LONGEST_TEST = 30, 10
# Lists on which no step may be in vain.
PROBES = ([7, -12, 31, 4, 18, -3, 25], [40, 3, -20, 14, 9, 22, -7], [-1, 16, 2, 28, 33, 11, 6])
LEAST_LEFT = 7  # of the numbers of PROBES, after any step


@dataclass(frozen=True)
class Filled:
    """A part of the grammar with its constants."""

    part: grammar.Part
    constants: tuple[int, ...]

    @property
    def key(self) -> str:
        """As "lower above 3 5"."""
        return " ".join([self.part.name, *map(str, self.constants)])

    def fill(self, text: str, **names: str) -> str:
        """Words or a line with the constants and the names."""
        return text.format(**dict(zip("km", self.constants, strict=False)), **names)

    def apply(self, value: Any) -> Any:
        """What it makes of a list or number."""
        return self.part.effect(value, *self.constants)


@dataclass(frozen=True)
class Description:
    """What a function does: with the list, with each number, with those that are left, and with
    what comes of them."""

    cut: Filled
    steps: tuple[Filled, ...]
    result: Filled
    end: Filled

    @property
    def key(self) -> str:
        """The parts in order, as "skip 2, above 3, square, add 4, sum, times 2"."""
        return ", ".join(part.key for part in (self.cut, *self.steps, self.result, self.end))

    def write(self, rng: np.random.Generator) -> Problem:
        """The problem, with the names and the wording from rng."""
        items, n = pick(rng, grammar.ITEMS)
        names = {"name": pick(rng, grammar.NAMES), "items": items, "n": n}
        sentences = [pick(rng, grammar.OPENINGS).format(**names)]
        for part in (self.cut, *self.steps, self.result, self.end):
            sentences.append(part.fill(pick(rng, part.part.words), **names))
        question = " ".join(filter(None, sentences))
        return Problem("coding", question, self._code(names), self.key)

    def _code(self, names: dict[str, str]) -> str:
        result = self.result.part
        assert isinstance(result, grammar.Result)
        names = {**names, "variable": result.variable}
        before = [(self.cut, self.cut.part.lines), (self.result, result.lines)]
        each = [*((step, step.part.lines) for step in self.steps), (self.result, result.add)]
        after = [(self.end, self.end.part.lines)]

        def block(parts: list[tuple[Filled, tuple[str, ...]]], indent: str = "    ") -> list[str]:
            return [indent + part.fill(line, **names) for part, lines in parts for line in lines]

        lines = [
            "def {name}({items}):".format(**names),
            f'    """{result.title} of what is left of the {names["items"]}."""',
            *block(before),
            "    for {n} in {items}:".format(**names),
            *block(each, " " * 8),
            *block(after),
        ]
        return "\n".join(lines)

    def apply(self, numbers: list[int]) -> Any:
        """What the function returns."""
        left = _apply(self.steps, self.cut.apply(numbers))
        return self.end.apply(self.result.apply(left))


def draw(rng: np.random.Generator) -> Description:
    """A description of MIN_STEPS to MAX_STEPS different steps, none of them in vain."""
    result = pick(rng, grammar.RESULTS)
    cuts = grammar.CUTS + grammar.ORDERS if result.is_ordered else grammar.CUTS
    cut = _fill(rng, pick(rng, cuts))
    end = _fill(rng, pick(rng, grammar.LIST_ENDS if result.is_list else grammar.NUMBER_ENDS))
    while True:
        found = Description(cut, _draw_steps(rng), _fill(rng, result), end)
        if _all_matter(found):
            return found


def check(problem: Problem, text: str) -> bool:
    """Whether text is a function of the asked name that returns what the reference returns for each
    list of `tests`, and nothing else."""
    name = problem.answer.removeprefix("def ").partition("(")[0]
    reference = Function(problem.answer, name)
    try:
        response = Function(text, name)
        return all(response(numbers) == reference(numbers) for numbers in tests(problem))
    except Refused:
        return False


def tests(problem: Problem) -> list[list[int]]:
    """The lists that a response is tried with, a function of the key: none, one number, PROBES,
    random ones and all of NUMBERS."""
    rng = np.random.default_rng(list(problem.key.encode()))
    lengths = [pick_integer(rng, 1, LONGEST_TEST) for _ in range(RANDOM_TESTS)]
    drawn = [[pick(rng, NUMBERS) for _ in range(length)] for length in lengths]
    return [[], [0], *PROBES, *drawn, [NUMBERS[i] for i in rng.permutation(len(NUMBERS)).tolist()]]


def _fill(rng: np.random.Generator, part: grammar.Part) -> Filled:
    return Filled(part, tuple(pick(rng, among) for among in part.among))


def _draw_steps(rng: np.random.Generator) -> tuple[Filled, ...]:
    """Each does something with what the ones before have left, and leaves enough."""
    count = pick_integer(rng, MIN_STEPS, MAX_STEPS)
    steps: list[Filled] = []
    numbers = [number for probe in PROBES for number in probe]
    for place in rng.permutation(len(grammar.STEPS)).tolist():
        step = _fill(rng, grammar.STEPS[place])
        after = _apply([step], numbers)
        if after != numbers and len(after) >= LEAST_LEFT:
            steps.append(step)
            numbers = after
        if len(steps) == count:
            break
    return tuple(steps)


def _all_matter(found: Description) -> bool:
    """Whether something else is returned for one of PROBES without any one of the steps."""
    expected = [found.apply(probe) for probe in PROBES]
    for place in range(len(found.steps)):
        others = (*found.steps[:place], *found.steps[place + 1 :])
        other = Description(found.cut, others, found.result, found.end)
        if all(other.apply(p) == e for p, e in zip(PROBES, expected, strict=True)):
            return False
    return True


def _apply(steps: Sequence[Filled], numbers: list[int]) -> list[int]:
    for step in steps:
        effect, constants = step.part.effect, step.constants
        numbers = [made for n in numbers if (made := effect(n, *constants)) is not None]
    return numbers
