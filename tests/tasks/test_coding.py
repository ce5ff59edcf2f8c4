"""The task coding: its descriptions, its references, and the small Python that judges responses."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from d2f import models
from d2f.tasks import Problem, check, coding, make_problem, make_problems
from d2f.tasks.coding import Function, Refused
from d2f.tasks.task import RESPONSE_LENGTH

PARTS = (
    *coding.CUTS, *coding.ORDERS, *coding.STEPS, *coding.RESULTS, *coding.NUMBER_ENDS,
    *coding.LIST_ENDS,
)  # fmt: skip
OTHER = {"<": ">", ">": "<", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "//": "%",
         "%": "//", "min": "max", "max": "min", "abs": "sum", "sorted": "len", "continue": "return",
         "=": "+=", "+=": "-="}  # fmt: skip
problems = st.builds(make_problem, st.just("coding"), st.just("train"), st.integers(0, 10**6))
lists = st.lists(st.integers(-40, 60), max_size=12)


def name_of(problem):
    return problem.answer.removeprefix("def ").partition("(")[0]


def passes_in_python(problem, program):
    """What Python itself says: only for what is written here."""
    reference, space = {}, {}
    exec(problem.answer, reference)
    name = name_of(problem)
    try:
        exec(program, space)
        return all(
            space[name](list(xs)) == reference[name](list(xs)) for xs in coding.tests(problem)
        )
    except Exception:
        return False


@st.composite
def programs(draw):
    """A problem, and its reference with up to three changes of a line or of a word."""
    problem = draw(problems)
    lines = problem.answer.split("\n")
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(1, len(lines) - 1))
        line = lines[place]
        words = [m for m in re.finditer(r"\d+|[a-z]+|[-+*/%<>=!]+", line) if m[0] in OTHER]
        numbers = list(re.finditer(r"\d+", line))
        match draw(st.sampled_from(["drop", "twice", "swap", "dedent", "word", "number"])):
            case "drop" if len(lines) > 3:
                del lines[place]
            case "twice":
                lines.insert(place, line)
            case "swap":
                lines[place - 1 : place + 1] = lines[place - 1 : place + 1][::-1]
            case "dedent":
                lines[place] = line.removeprefix("    ")
            case "word" if words:
                m = draw(st.sampled_from(words))
                lines[place] = line[: m.start()] + OTHER[m[0]] + line[m.end() :]
            case "number" if numbers:
                m = draw(st.sampled_from(numbers))
                changed = draw(st.sampled_from(["0", "1", "99", "-2", "1000"]))
                lines[place] = line[: m.start()] + changed + line[m.end() :]
    return problem, "\n".join(lines)


# The descriptions


@settings(derandomize=True, deadline=None, max_examples=60)
@given(problems, lists)
def test_a_reference_means_to_asteval_what_it_means_to_python(problem, numbers):
    space = {}
    exec(problem.answer, space)
    expected = space[name_of(problem)](list(numbers))
    assert Function(problem.answer, name_of(problem))(numbers) == expected


def test_the_words_tell_what_the_lines_do():
    """Any words of a part name the constants of its lines, and no others."""
    for part in PARTS:
        used = {c for c in ("{k}", "{m}") if c in part.lines + part.add}
        assert used == set(["{k}", "{m}"][: len(part.among)]), part.name
        for words in part.words:
            assert {c for c in ("{k}", "{m}") if c in words} == used, part.name


def test_what_is_written_stays_what_it_was():
    problem = make_problem("coding", "train", 1)
    assert problem == Problem(
        "coding",
        "In Python, define gather(ages) for a list of whole numbers. Stop after the first 4. "
        "Divide each by 2 and round down. Multiply multiples of 4 by 6. "
        "Keep only those below 18. Take how many are above 2. Return that subtracted from 10.",
        "def gather(ages):\n"
        '    """Count of what is left of the ages."""\n'
        "    ages = ages[:4]\n"
        "    count = 0\n"
        "    for age in ages:\n"
        "        age = age // 2\n"
        "        if age % 4 == 0:\n"
        "            age = age * 6\n"
        "        if age >= 18:\n"
        "            continue\n"
        "        if age > 2:\n"
        "            count += 1\n"
        "    return 10 - count",
        "only 4, divide 2, grow 4 6, below 18, count 2, from 10",
    )


def test_there_are_enough_problems_and_every_part_comes_up():
    rng = np.random.default_rng(0)
    keys = [coding.draw(rng).key for _ in range(800)]
    assert len(set(keys)) == len(keys)  # of 1e6, about one pair would be equal
    parts = [[re.sub(r"( \d+)+$", "", part) for part in key.split(", ")] for key in keys]
    assert {name for names in parts for name in names} == {part.name for part in PARTS}
    assert {len(names) - 3 for names in parts} == {3, 4, 5, 6}


def test_responses_fit_and_are_several_blocks_long():
    tokenizer = AutoTokenizer.from_pretrained(models.HERE / "tiny-code-d2f")
    answers = [make_problem("coding", "train", index).answer for index in range(200)]
    lengths = sorted(len(tokenizer(answer).input_ids) + 1 for answer in answers)
    assert lengths[-1] <= RESPONSE_LENGTH["coding"]
    assert lengths[50] >= 100 and lengths[190] <= 200


# The judge


def test_a_program_without_a_step_is_wrong():
    for problem in make_problems("coding", "train", 25):
        lines = problem.answer.split("\n")
        body = [i for i, line in enumerate(lines) if re.match(r" {8}(?!else)\S", line)]
        steps = len(problem.key.split(", ")) - 3
        for start, end in pairwise(body[: steps + 1]):
            without = "\n".join(lines[:start] + lines[end:])
            assert not check(problem, without), (problem.key, lines[start])


def test_nothing_else_may_be_there():
    problem = make_problem("coding", "train", 1)
    assert check(problem, problem.answer)
    assert not check(problem, problem.answer.replace(f"def {name_of(problem)}(", "def other("))
    for text in ("{}\nprint(1)", "import os\n{}", "```python\n{}\n```"):
        assert not check(problem, text.format(problem.answer))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(programs())
def test_the_verdict_is_that_of_python(drawn):
    problem, program = drawn
    assert check(problem, program) == passes_in_python(problem, program)


# The small Python


def value(program, numbers=(3, 1, 2)):
    return Function(program, "f")(numbers)


def body(*lines):
    return "\n".join(["def f(xs):", *(f"    {line}" for line in lines)])


MEANT = [
    ["ys = xs", "ys += [][:]", "ys.append(7)", "return xs"],  # the same list
    ["ys = xs", "ys = ys + xs", "return xs"],  # another list
    ["return xs[0] - xs[-1] + len(xs[1:]) * sum(xs[::2])"],
    ["return not xs[5:]"],
    ["for x in xs:", "    if x == 1:", "        return x", "return 0"],
    ["for x in xs:", "    for y in xs:", "        if y == x:", "            continue",
     "        x += y", "    xs.append(x)", "    if len(xs) > 9:", "        return xs"],
    ["sum = 1", "return sum"],
    ["'''words'''", "if xs[0] < 0:", "    x = 1", "else:", "    x = 2", "return x"],
    ["x = -xs[0] // 2", "x %= 5", "return max(x, min(xs))"],
    ["x = 0"],
    ["return sorted(xs) == xs"],
]  # fmt: skip


def test_it_means_what_python_means():
    for lines in MEANT:
        space = {}
        exec(body(*lines), space)
        assert value(body(*lines)) == space["f"]([3, 1, 2]), lines


REFUSED = [
    "", "return 1", "f = 1", "def g(xs):\n    return 1", "def f(xs, ys):\n    return 1",
    "def f(*xs):\n    return 1", "def f(xs=1):\n    return 1", "def f():\n    return 1",
    "def f(xs: int):\n    return 1", "def f(xs) -> int:\n    return 1",
    "@abs\ndef f(xs):\n    return 1", "async def f(xs):\n    return 1",
    body("return 1") + "\n" + body("return 1"), body("return 1") + "\nx = 1",
    body("return missing"), body("return xs[9]"), body("return 1 // 0"), body("return xs + 1"),
    body("return sum(xs)", "sum = 1"),  # local already
    body("continue"), body("return open('x')"), body("return xs.__class__"), body("import os"),
    body("return (lambda: 1)()"), body("return [x for x in xs]"), body("xs.clear()"),
    body("return 2 ** 9"), body("return 1.5"), body("return 'a'"), body("return f(xs)"),
    body("while 1:", "    x = 1"), body("return max(xs, key=abs)"), body("global x"),
    # Beyond the limits, each at once.
    body("for x in xs:", "    xs.append(x)"), body("return [] * 9"), body("return xs * 10**9"),
    body("x = 9", "for a in xs:", *["    x = x * x"] * 60, "return x"),
    body("for x in xs:", "    xs += xs", "return 1"), body("return " + "9" * 5000),
    body("return " + "-" * 3000 + "1"), body("return " + "(" * 300 + "1" + ")" * 300),
    body("xs.append(xs)"), body("return '\ud800'"), body("return 1\0"),
    f"def f(xs={'1+' * 500}1):\n    return 1", f"def f(xs={'-' * 700}1):\n    return 1",
    f"def f(xs: a{'[1]' * 500}):\n    return 1",
]  # fmt: skip


def test_anything_else_is_refused():
    for program in REFUSED:
        with pytest.raises(Refused):
            value(program)
            pytest.fail(program)
