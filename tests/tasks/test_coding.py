"""The task coding: its descriptions, its reference functions, and the small Python that judges."""

import ast
import dataclasses
import random
import re
import time

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from d2f.tasks import check, coding, find_task, make_problem, make_problems
from d2f.tasks import mini_python as mini
from d2f.tasks.coding_grammar import CUTS, ENDS, ORDERS, RESULTS, STEPS
from d2f.tasks.judges import make_judge

repeatable = settings(derandomize=True, deadline=None)
problems = st.builds(make_problem, st.just("coding"), st.just("train"), st.integers(0, 10**9))
lists = st.lists(st.integers(-30, 60), max_size=12)
KEPT = "    if {0} {1} {2}:\n        continue\n"


def named(problem):
    return problem.answer.removeprefix("def ").partition("(")[0]


def in_python(program, name, numbers):
    """What Python makes of it. Only for what the grammar wrote, with small changes."""
    space = {}
    exec(compile(program, "program", "exec", dont_inherit=True), space)
    return space[name](list(numbers))


def passes_in_python(problem, program):
    name = named(problem)
    try:
        return all(
            in_python(program, name, numbers) == in_python(problem.answer, name, numbers)
            for numbers in coding.tests(problem)
        )
    except Exception:
        return False


# What a description means, told once more and without any code: to hold the reference against.
STARTS = {
    "none": lambda xs, k: xs, "skip": lambda xs, k: xs[k:], "only": lambda xs, k: xs[:k],
    "second": lambda xs, k: xs[::2], "back": lambda xs, k: xs[::-1], "sort": lambda xs, k: sorted(xs),
}  # fmt: skip
PUT_TOGETHER = {
    "sum": lambda xs, k: sum(xs),
    "count": lambda xs, k: len(xs),
    "largest": lambda xs, k: max([k, *xs]),
    "smallest": lambda xs, k: min([k, *xs]),
    "turns": lambda xs, k: sum(xs[::2]) - sum(xs[1::2]),
    "rises": lambda xs, k: sum(b > a for a, b in zip([k, *xs], xs, strict=False)),
    "list": lambda xs, k: xs,
    "totals": lambda xs, k: [sum(xs[: i + 1]) for i in range(len(xs))],
    "records": lambda xs, k: [max([k, *xs[: i + 1]]) for i in range(len(xs))],
}
RETURNED = {
    "as it is": lambda x, k: x, "times": lambda x, k: k * x, "plus": lambda x, k: k + x,
    "from": lambda x, k: k - x, "end": lambda x, k: x[-k:], "turned": lambda x, k: x[::-1],
}  # fmt: skip
EFFECTS = {
    "multiple": lambda n, k: [n] * (n % k == 0), "indivisible": lambda n, k: [n] * (n % k != 0),
    "above": lambda n, k: [n] * (n > k), "below": lambda n, k: [n] * (n < k),
    "least": lambda n, k: [n] * (n >= k), "most": lambda n, k: [n] * (n <= k),
    "add": lambda n, k: [n + k], "subtract": lambda n, k: [n - k], "multiply": lambda n, k: [n * k],
    "square": lambda n: [n**2], "divide": lambda n, k: [n // k], "remainder": lambda n, k: [n % k],
    "absolute": lambda n: [max(n, -n)], "distance": lambda n, k: [max(n - k, k - n)],
    "raise": lambda n, k: [sorted([n, k])[1]], "cap": lambda n, k: [sorted([n, k])[0]],
    "lower above": lambda n, k, m: [n - m * (n > k)],
    "lift below": lambda n, k, m: [n + m * (n < k)],
    "grow": lambda n, k, m: [n * (m if n % k == 0 else 1)],
    "fork": lambda n, k, m: [n - m if n % 2 else n + k],
}  # fmt: skip


def meant(key, numbers):
    """What the function of a key returns."""
    cut, *steps, result, end = (
        re.fullmatch("([a-z ]+?)((?: [0-9]+)*)", part).groups() for part in key.split(", ")
    )

    def constants(part):
        return [int(number) for number in part[1].split()]

    numbers = STARTS[cut[0]](numbers, *constants(cut) or [0])
    for step in steps:
        numbers = [n for number in numbers for n in EFFECTS[step[0]](number, *constants(step))]
    found = PUT_TOGETHER[result[0]](numbers, *constants(result) or [0])
    return RETURNED[end[0]](found, *constants(end) or [0])


@repeatable
@given(problems, lists)
def test_a_reference_does_what_its_key_says_in_both_pythons(problem, numbers):
    expected = meant(problem.key, numbers)
    assert mini.Function(problem.answer, named(problem))(numbers) == expected
    assert in_python(problem.answer, named(problem), numbers) == expected


def test_every_part_comes_up():
    seen = " ".join(f", {p.key}," for p in make_problems("coding", "train", 600))
    for part in (*STEPS, *CUTS, *ORDERS, *RESULTS, *ENDS[False], *ENDS[True]):
        assert re.search(f", {part.name}[ ,0-9]", seen.replace(" , ", ", ")) or part.name in seen


@pytest.mark.parametrize("part", (*STEPS, *CUTS, *ORDERS, *RESULTS, *ENDS[False], *ENDS[True]))
def test_words_tell_every_constant_that_the_lines_have(part):
    """Else the question would not say what is asked for."""
    lines = " ".join((*part.lines, *getattr(part, "add", ())))
    for words in part.words:
        for constant, among in (("{k}", part.k), ("{m}", part.m)):
            assert (constant in words) == (constant in lines) == (len(among) > 1)


# The judge


def judged(problem, program):
    return check(problem, program)


def test_a_program_without_one_of_the_steps_is_wrong():
    """Nearly always: what the tests do not tell apart may still be told apart by other lists."""
    right = total = 0
    for problem in make_problems("coding", "train", 150):
        lines = problem.answer.split("\n")
        loop = next(i for i, line in enumerate(lines) if line.startswith("    for "))
        # A step is a line of the loop's body with what is indented under it and its else.
        starts = [
            i for i in range(loop + 1, len(lines) - 1)
            if re.match(" {8}[a-df-z]", lines[i]) and not lines[i].startswith("        else")
        ]  # fmt: skip
        for start, end in zip(starts, [*starts[1:], len(lines) - 1], strict=True):
            total += 1
            right += check(problem, "\n".join(lines[:start] + lines[end:]))
    assert total > 800
    assert right <= 0.02 * total


def test_two_steps_in_the_other_order_or_another_name_are_wrong():
    problem = make_problems("coding", "train", 1)[0]
    assert check(problem, problem.answer)
    assert not check(problem, problem.answer.replace(f"def {named(problem)}", "def other"))
    assert not check(problem, problem.answer + "\nprint(1)")
    assert not check(problem, f"Here it is:\n{problem.answer}")
    print(problem)
