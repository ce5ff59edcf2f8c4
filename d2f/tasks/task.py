"""Define a task, and the tiny ones whose problems are generated from a seed: story, countdown and
sudoku here, coding in a file of its own."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b

import numpy as np

from d2f.errors import InputError, not_one_of
from d2f.tasks import coding
from d2f.tasks.problem import Draft, Problem, pick, pick_integer

SPLITS: tuple[str, ...] = ("train", "tuning", "heldout")
ALL = "all"
"""In place of a split: every row of a task's data, where its splits are shares of it."""
MAX_REPEATS = 500  # repeated keys in a row after which a split counts as exhausted
MAX_COUNT = 100_000  # distinct problems at a time: about a minute and a half of drawing


class Task(ABC):
    """Problems in disjoint splits, and a judge of responses.

    name: unique within a run. response_length: most tokens of a response. stop: strings that end
    one. identity: what decides its problems and verdicts; a run that goes on must have the same.
    default_count: problems that are evaluated where nobody says how many, None for all. notice:
    what a user should know before anything is judged. words: how a command line names it.
    judging_seconds: how long a judgement in a process of its own may take, beside others; None: it
    is made in this one.
    """

    name: str
    response_length: int
    stop: tuple[str, ...] = ()
    identity: str
    default_count: int | None = None
    notice: str | None = None
    words: tuple[str, ...]
    judging_seconds: float | None = None

    @abstractmethod
    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        """Return the first `count` problems of a split (None: all), in the order of the seed.

        Fewer are the beginning of more. Raises InputError for an unknown split or missing data,
        ValueError for more problems than there are.
        """

    @abstractmethod
    def right(self, problem: Problem, text: str) -> bool:
        """Judge a decoded response."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """Extract the answer, so that equal ones can be counted; None without one."""

    def kept_back(self, split: str) -> int:
        """Count the problems outside a split that could be evaluated too."""
        return 0


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """Cut a text at the first stop string."""
    cuts = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(cuts)] if cuts else text


MAX_VALUE = 99  # of a story and of Countdown, at any step

# Story: a word problem of 1 to 6 steps about a person and a number of things.

MAX_STEPS = 6
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


def draw_story(rng: np.random.Generator) -> Draft:
    """Draw 1 to MAX_STEPS steps, each number of them as likely, with all values in 1..MAX_VALUE.

    The key is the chain, worked from left to right: "12+5*2".
    """
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
        value = _apply(value, operator, n)
        steps.append((operator, n))
    key = str(start) + "".join(f"{operator}{n}" for operator, n in steps)
    return Draft(key, lambda rng: (_tell(rng, start, steps, in_groups), _work(start, steps)))


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


def _apply(value: int, operator: str, n: int) -> int:
    return {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[operator]


def _tell(
    rng: np.random.Generator, start: int, steps: Sequence[tuple[str, int]], in_groups: bool
) -> str:
    """Tell the story, one sentence a step; rng chooses the person, the things and the words.

    in_groups: the first step, a product, is told as boxes with so many things in each.
    """
    name, pronoun = pick(rng, PEOPLE)
    edible = rng.random() < 0.5
    items = pick(rng, FOODS if edible else THINGS)
    words = {"name": name, "items": items, "He": pronoun, "he": pronoun.lower()}
    if in_groups:
        first = pick(rng, START_IN_GROUPS)
        words |= {"containers": pick(rng, CONTAINERS)}
        sentences = [first.format(n=start, k=steps[0][1], **words)]
    else:
        sentences = [pick(rng, START).format(n=start, **words)]
    for operator, n in steps[in_groups:]:
        less, times = LESS + EATEN * edible, TIMES + TIMES_IN_A_WORD.get(n, ())
        wordings = {"+": MORE, "-": less, "*": times, "/": SHARE}[operator]
        sentences.append(pick(rng, wordings).format(n=n, **words))
    return " ".join([*sentences, QUESTION.format(**words)])


def _work(value: int, steps: Sequence[tuple[str, int]]) -> str:
    lines = []
    for operator, n in steps:
        result = _apply(value, operator, n)
        lines.append(f"{value}{operator}{n}={result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def check_story(problem: Problem, text: str) -> bool:
    """Check that the integer right after the first "####" is the result, whatever else is said."""
    return story_answer(text) == problem.answer.rpartition("#### ")[2]


def story_answer(text: str) -> str | None:
    """Extract the integer right after the first "####"; None without one."""
    _, _, after = text.partition("####")
    found = RESULT.match(after)
    return None if found is None else str(int(found[1]))


# Countdown: reach a target with every one of 3 or 4 numbers, one operation a line.

COUNTS = (3, 4)
MAX_NUMBER = 12
MIN_TARGET = 10
# Bounded, so that what a model writes cannot be a number of a thousand digits.
POSITIVE = "([1-9][0-9]{0,4})"
STEP = re.compile(f"{POSITIVE} *([-+*/]) *{POSITIVE} *= *{POSITIVE}")


def draw_countdown(rng: np.random.Generator) -> Draft:
    """Combine numbers of 1..MAX_NUMBER at random until the result is MIN_TARGET..MAX_VALUE.

    The key is the sorted numbers and the target: "2,3,7,8=45".
    """
    count, target = pick(rng, COUNTS), 0
    while target < MIN_TARGET:
        numbers = [pick_integer(rng, 1, MAX_NUMBER) for _ in range(count)]
        steps, target = _combine(rng, numbers.copy())
    *others, last = map(str, numbers)
    question = f"Use {', '.join(others)} and {last} to make {target}."
    key = f"{','.join(map(str, sorted(numbers)))}={target}"
    return Draft(key, lambda _: (question, "\n".join(steps)))


def _combine(rng: np.random.Generator, available: list[int]) -> tuple[list[str], int]:
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
            return [], 0
        operator, result = pick(rng, possible)
        steps.append(f"{a}{operator}{b}={result}")
        available.append(result)
    return steps, available[0]


def check_countdown(problem: Problem, text: str) -> bool:
    """Check that the non-empty lines of text are right steps from the numbers to the target.

    Each step takes two numbers still there and puts back their result, a positive integer;
    there is one step fewer than numbers, and nothing but blanks after the last.
    """
    numbers, _, target = problem.key.partition("=")
    available = [int(number) for number in numbers.split(",")]
    lines = _lines(text)
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


# Sudoku: 4x4, with 6 to 10 blanks and one solution.

SIDE = 4
MIN_BLANKS, MAX_BLANKS = 6, 10


def draw_sudoku(rng: np.random.Generator) -> Draft:
    """Draw a puzzle with one solution; each number of blanks is as likely. The key is the puzzle,
    row by row."""
    blanks = pick_integer(rng, MIN_BLANKS, MAX_BLANKS)
    grids = _solved_grids()
    while True:
        solution = grids[pick_integer(rng, 0, len(grids) - 1)]
        # Blanks at random, and another grid where they leave more than one solution: an answer is
        # compared with the one that is kept.
        order = rng.permutation(SIDE * SIDE)
        given = order[blanks:]
        if (grids[:, given] == solution[given]).all(axis=1).sum() == 1:
            break
    puzzle = solution.astype(str)
    solved = "".join(puzzle)
    puzzle[order[:blanks]] = "_"
    key = "".join(puzzle)
    return Draft(key, lambda _: (f"Sudoku:\n{_rows(key)}", _rows(solved)))


@cache
def _solved_grids() -> np.ndarray:  # [288, 16]
    """Enumerate the solved grids, in order, cell by cell."""
    units = (lambda c: c // SIDE, lambda c: c % SIDE, lambda c: (c // 8, c % SIDE // 2))
    grids: list[list[int]] = [[]]
    for cell in range(SIDE * SIDE):
        # Earlier cells of its row, its column and its box.
        rivals = [c for c in range(cell) if any(unit(c) == unit(cell) for unit in units)]
        grids = [
            [*grid, digit]
            for grid in grids
            for digit in range(1, SIDE + 1)
            if digit not in [grid[c] for c in rivals]
        ]
    return np.array(grids)


def _rows(grid: str) -> str:
    return "\n".join(grid[i : i + SIDE] for i in range(0, SIDE * SIDE, SIDE))


def check_sudoku(problem: Problem, text: str) -> bool:
    """Check that the non-empty lines of text are the four rows of the solution."""
    return sudoku_answer(text) == problem.answer


def sudoku_answer(text: str) -> str:
    """Extract the non-empty lines."""
    return "\n".join(_lines(text))


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]


# All of them.


class GeneratedTask(Task):
    """Make the problems of a tiny task from a seed.

    draw: of a problem that is not yet in words. check, extract: `right` and `answer` of it.
    """

    default_count = 500

    def __init__(
        self,
        name: str,
        response_length: int,
        draw: Callable[[np.random.Generator], Draft],
        check: Callable[[Problem, str], bool],
        extract: Callable[[str], str | None] | None = None,
    ):
        self.name = self.identity = name
        self.words = ("--tasks", name)
        self.response_length = response_length
        self.draw, self.check, self.extract = draw, check, extract

    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        if split == ALL:
            raise InputError(f"{self.name} has no split {ALL}, it has {', '.join(SPLITS)}")
        if count is None:
            raise ValueError(f"{self.name} has no last problem: expected a number of them")
        return make_problems(self.name, split, count, seed)

    def right(self, problem: Problem, text: str) -> bool:
        return check(problem, text)

    def answer(self, text: str) -> str | None:
        return self.extract(text) if self.extract else None


GENERATED = {
    task.name: task
    for task in (
        GeneratedTask("story", 64, draw_story, check_story, story_answer),
        GeneratedTask("countdown", 32, draw_countdown, check_countdown),
        GeneratedTask("sudoku", 32, draw_sudoku, check_sudoku, sudoku_answer),
        GeneratedTask("coding", 224, coding.draw, coding.check),
    )
}
TASKS: tuple[str, ...] = tuple(GENERATED)
DEFAULT_TASKS = ("story", "countdown", "sudoku")
"""The tasks that the bundled models were trained on; a command takes them where none is named."""
RESPONSE_LENGTH = {name: task.response_length for name, task in GENERATED.items()}
"""Tokens that hold any response of a task, with its end: what a benchmark of it decodes."""


def check(problem: Problem, text: str) -> bool:
    """Check that a decoded response solves the problem. No text makes it raise.

    story: the integer after the first "####" counts, whatever the steps and the rest say.
    countdown: every line is checked, and nothing may follow the last step.
    sudoku: the grid must be the solution, and nothing may follow it.
    coding: a function of the asked name must pass the tests, and nothing may follow it.

    Raises ValueError if the problem's task is none of TASKS.
    """
    _number_of("task", problem.task, TASKS)
    return GENERATED[problem.task].check(problem, text)


def split_of(key: str) -> str:
    """Return the split of every problem with this key: 5% heldout, 5% tuning, 90% train.

    It depends on the key alone, so splits stay disjoint whatever seeds they are drawn with.
    """
    # A digest, since Python's own hash() of text differs from one process to the next.
    bucket = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") % 100
    if bucket < 5:
        return "heldout"
    return "tuning" if bucket < 10 else "train"


def make_problem(task: str, split: str, index: int, seed: int = 0) -> Problem:
    """Make the problem at index from the arguments alone; other indexes may repeat its key.

    Raises ValueError for an unknown task or split, and for a negative index or seed.
    """
    task_number, split_number = _number_of("task", task, TASKS), _number_of("split", split, SPLITS)
    rng = np.random.default_rng([seed, task_number, split_number, index])
    draft = GENERATED[task].draw(rng)
    while split_of(draft.key) != split:  # one in twenty is heldout
        draft = GENERATED[task].draw(rng)
    return Problem(task, *draft.write(rng), draft.key)


def make_problems(task: str, split: str, count: int, seed: int = 0) -> list[Problem]:
    """Make the first count problems with distinct keys, walking the indexes from 0.

    Raises ValueError as make_problem does, and for a count above MAX_COUNT or beyond what the split
    holds (MAX_REPEATS repeats in a row).
    """
    if count > MAX_COUNT:
        raise ValueError(f"count must be at most {MAX_COUNT}, got {count}")
    found: dict[str, Problem] = {}
    index = repeats = 0
    while len(found) < count:
        problem = make_problem(task, split, index, seed)
        index += 1
        repeats = repeats + 1 if problem.key in found else 0
        found.setdefault(problem.key, problem)
        if repeats == MAX_REPEATS:
            raise ValueError(
                f"count must be at most about {len(found)}, the distinct problems found in "
                f"the {split} split of {task}, got {count}"
            )
    return list(found.values())


def _number_of(kind: str, name: str, names: Sequence[str]) -> int:
    if name not in names:
        raise InputError(f"{kind}: {not_one_of(name, names)}")
    return names.index(name)
