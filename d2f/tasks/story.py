"""Word problems of 1 to 6 steps about a person and a number of things."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from d2f.tasks.problem import Problem, pick, pick_integer

MAX_STEPS = 6
MAX_VALUE = 99
MAX_CHANGE = 30  # the most that one sentence adds or takes away
MAX_START = 60
FACTORS = (2, 3, 4, 5)
GROUPS = range(2, 13)  # how many boxes, and how many things in each

PEOPLE = tuple((name, "He") for name in "Tom Ben Sam Max Leo Omar Ivan Raj Hugo Paul".split())
PEOPLE += tuple((name, "She") for name in "Ann Mia Eva Zoe Lily Nora Ruth Sara Aisha Mei".split())
FOODS = tuple("apples pears plums cookies cherries nuts grapes rolls lemons eggs".split())
THINGS = tuple("pens books cards coins stamps marbles balls shells beads stickers".split())
CONTAINERS = ("boxes", "bags", "baskets", "jars")

START = (
    "{name} has {n} {items}.",
    "{name} starts with {n} {items}.",
    "At first {name} has {n} {items}.",
    "{name} counts {n} {items} on the table.",
)
START_IN_GROUPS = (
    "{name} has {n} {containers} with {k} {items} in each.",
    "{name} fills {n} {containers} with {k} {items} each.",
    "{name} gets {n} {containers} of {k} {items} each.",
    "There are {n} {containers}, and {name} puts {k} {items} in each.",
)
MORE = (
    "{He} buys {n} more {items}.",
    "{He} finds {n} more {items}.",
    "{He} gets {n} more {items} from a friend.",
    "A neighbor brings {n} more {items}.",
    "Then {he} wins {n} more.",
)
LESS = (
    "{He} gives away {n} {items}.",
    "{He} loses {n} of them.",
    "{He} sells {n} {items}.",
    "{He} gives {n} {items} to a friend.",
    "Then {n} of the {items} go missing.",
)
EATEN = ("{He} eats {n} {items}.", "Then {he} eats {n} of them.")
TIMES = (
    "{He} ends up with {n} times as many {items}.",
    "Soon {he} has {n} times as many.",
    "A lucky trade leaves {n} times as many {items}.",
    "The pile grows to {n} times its size.",
)
TIMES_IN_A_WORD = {
    2: ("{He} doubles the number of {items}.", "Then {he} has twice as many."),
    3: ("{He} triples the number of {items}.", "Then the number of {items} triples."),
}
SHARE = (
    "{He} shares them equally among {n} people and keeps one share.",
    "{He} splits them into {n} equal piles and keeps one.",
    "{He} makes {n} equal shares and keeps one.",
    "Then {he} sorts them into {n} equal bags, keeping one.",
)
QUESTION = "How many {items} does {name} have now?"

# A whole number of up to nine digits: not the 12 of 12.5, nor the beginning of a longer one.
RESULT = re.compile(r"\s*(-?[0-9]{1,9})(?!\.?[0-9])")


@dataclass(frozen=True)
class Chain:
    """A starting number and the steps from it, each (operator, operand).

    in_groups: the first step, a product, is told as boxes with so many things in each.
    """

    start: int
    steps: tuple[tuple[str, int], ...]
    in_groups: bool

    @property
    def key(self) -> str:
        """Join numbers and operators, as in "12+5*2", worked from left to right."""
        return str(self.start) + "".join(f"{operator}{n}" for operator, n in self.steps)

    def write(self, rng: np.random.Generator) -> Problem:
        """Tell the story, one sentence a step; rng chooses the person, the things and the words."""
        name, pronoun = pick(rng, PEOPLE)
        edible = rng.random() < 0.5
        items = pick(rng, FOODS if edible else THINGS)
        words = {"name": name, "items": items, "He": pronoun, "he": pronoun.lower()}
        if self.in_groups:
            first = pick(rng, START_IN_GROUPS)
            containers = pick(rng, CONTAINERS)
            k = self.steps[0][1]
            sentences = [first.format(n=self.start, k=k, containers=containers, **words)]
        else:
            sentences = [pick(rng, START).format(n=self.start, **words)]
        for operator, n in self.steps[1:] if self.in_groups else self.steps:
            sentences.append(pick(rng, _wordings(operator, n, edible)).format(n=n, **words))
        sentences.append(QUESTION.format(**words))
        return Problem("story", " ".join(sentences), self._worked(), self.key)

    def _worked(self) -> str:
        lines = []
        value = self.start
        for operator, n in self.steps:
            result = apply(value, operator, n)
            lines.append(f"{value}{operator}{n}={result}")
            value = result
        return "\n".join([*lines, f"#### {value}"])


def draw(rng: np.random.Generator) -> Chain:
    """Draw 1 to MAX_STEPS steps, each number of them as likely, with all values in 1..MAX_VALUE."""
    count = pick_integer(rng, 1, MAX_STEPS)
    in_groups = rng.random() < 0.25
    steps = []
    if in_groups:
        start = pick(rng, GROUPS)
        # Boxes x things: told as the start, counted as the first step.
        steps.append(("*", pick_integer(rng, GROUPS[0], min(GROUPS[-1], MAX_VALUE // start))))
        value = start * steps[0][1]
    else:
        start = value = pick_integer(rng, 2, MAX_START)
    while len(steps) < count:
        operator, n = _draw_step(rng, value)
        value = apply(value, operator, n)
        steps.append((operator, n))
    return Chain(start, tuple(steps), in_groups)


def apply(value: int, operator: str, n: int) -> int:
    """value operator n, for one of + - * /, the last rounded down."""
    return {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[operator]


def check(problem: Problem, text: str) -> bool:
    """Check that the integer right after the first "####" is the result."""
    return answer(text) == problem.answer.rpartition("#### ")[2]


def answer(text: str) -> str | None:
    """Extract the integer right after the first "####"; None without one."""
    _, _, after = text.partition("####")
    found = RESULT.match(after)
    return None if found is None else str(int(found[1]))


def _draw_step(rng: np.random.Generator, value: int) -> tuple[str, int]:
    most = min(MAX_CHANGE, MAX_VALUE - value)
    least = min(MAX_CHANGE, value - 1)
    factors = [n for n in FACTORS if value * n <= MAX_VALUE]
    divisors = [n for n in FACTORS if value % n == 0]
    # Only what keeps the value in 1..MAX_VALUE and whole; each operator that can be is as likely.
    possible = ["+"] * (most >= 2) + ["-"] * (least >= 2)
    possible += ["*"] * bool(factors) + ["/"] * bool(divisors)
    operator = pick(rng, possible)
    if operator in "+-":
        return operator, pick_integer(rng, 2, most if operator == "+" else least)
    return operator, pick(rng, factors if operator == "*" else divisors)


def _wordings(operator: str, n: int, edible: bool) -> tuple[str, ...]:
    less = LESS + EATEN if edible else LESS
    times = TIMES + TIMES_IN_A_WORD.get(n, ())
    return {"+": MORE, "-": less, "*": times, "/": SHARE}[operator]
