"""Judges: what each takes for right, and that no text of a model makes one raise."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.data import BadRecord
from d2f.errors import InputError
from d2f.tasks import Problem
from d2f.tasks.judges import JUDGES, make_judge

needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is missing")


def problem(answer: str, **row: object) -> Problem:
    return Problem("test", "?", answer, "key", row=row)


def judge(given: object, **options: object):
    options = {"name": given, **options} if options else given
    return make_judge(options, "test", allow_code_execution=True)


CASES = [
    ("exact", {}, "Paris", " Paris\n", True),
    ("exact", {}, "Paris", "paris", False),
    ("exact", {"ignore_case": True}, "Paris", "paris", True),
    ("contains", {}, "Paris", "It is Paris, I think", True),
    ("contains", {}, "Paris", "It is paris", False),
    ("contains", {"ignore_case": True}, "Paris", "It is paris", True),
    ("regex", {"pattern": r"x = (\d+)"}, "4", "x = 4, x = 5", True),
    ("regex", {"pattern": r"x = (\d+)", "take": "last"}, "5", "x = 4, x = 5", True),
    ("regex", {"pattern": r"x = (\d+)"}, "4", "y = 4", False),
    ("regex", {"pattern": r"^\w+$"}, "yes", "I say\nyes\n", True),
    ("numeric", {}, "She has 3*4=12\n#### 12", "so 12 it is", True),
    ("numeric", {}, "#### 12", "#### 12\nQuestion: what is 7?\n#### 7", True),
    ("numeric", {}, "#### 12", "12 and then 13", False),
    ("numeric", {}, "#### 1,250", "It costs $1,250.00.", True),
    ("numeric", {}, "#### -7", "below zero: -$7", True),
    ("numeric", {}, "#### 7", "that is 10-7", True),
    ("numeric", {}, "#### 7", "none at all", False),
    ("numeric", {}, "0.1", ".1", True),
    ("numeric", {}, "3.14", "3.1", False),
    ("numeric", {"tolerance": 0.05}, "3.14", "3.1", True),
    ("numeric", {}, "#### 12", "#### twelve, which is 12", True),
    ("choice", {}, "B", "B", True),
    ("choice", {}, "B", "The answer is (B).", True),
    ("choice", {}, "B", "Answer: B\nbecause A is wrong", True),
    ("choice", {}, "B", "B) it is cold", True),
    ("choice", {}, "B", "**B**", True),
    ("choice", {}, "B", "(A) is wrong, so (B)", True),
    ("choice", {}, "A", "A dog, so the answer is B", False),
    ("choice", {}, "B", "Bananas", False),
    ("choice", {"letters": "ABCDEFGHIJ"}, "J", "answer: J", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "reference", "text", "right"), CASES)
def test_what_is_right(name, options, reference, text, right):
    assert judge(name, **options).right(problem(reference), text) is right


@needs_math
@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        (r"\frac{1}{2}", r"so it is $\boxed{0.5}$", True),
        (r"we get $x=\boxed{\frac{1}{2}}$.", r"The answer is $\frac{2}{4}$.", True),
        ("2x+1", r"\boxed{1+2x}", True),
        ("2x+1", r"\boxed{2x}", False),
        ("7", "nothing", False),
    ],
)
def test_expressions_are_compared_by_their_value(reference, text, right):
    assert judge("math").right(problem(reference), text) is right


@needs_math
def test_equal_expressions_are_one_answer():
    """Else a majority would count 1/2 and 0.5 apart."""
    found = judge("math")
    assert found.answer(r"\boxed{\frac{1}{2}}") == found.answer(r"\boxed{\frac{2}{4}}") is not None


def test_equal_numbers_are_one_answer():
    found = judge("numeric")
    assert found.answer("$1,200.00") == found.answer("#### 1200") is not None
    assert found.answer("none") is None


PROGRAM = {"program": "{{ response }}", "tests": "{{ test_list | join('\n') }}"}
ADD = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (ADD, True),
        (f"Here it is:\n```python\n{ADD}```\nThat adds.", True),
        (f"```\n{ADD}", True),  # cut off before the end of the block
        (ADD.replace("+", "-"), False),
        ("not a program", False),
        ("\ud800", False),
    ],
)
def test_a_program_is_right_where_it_passes_its_tests(text, right):
    mbpp = problem("", test_list=["assert add(1, 2) == 3", "assert add(0, 0) == 0"])
    assert judge("python", **PROGRAM).right(mbpp, text) is right


def test_a_completion_is_judged_behind_its_prompt():
    row = {
        "prompt": 'def add(a, b):\n    """Add."""\n',
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
        "entry_point": "add",
    }
    found = judge(
        "python",
        program="{{ prompt }}{{ response }}",
        tests="{{ test }}\ncheck({{ entry_point }})",
    )
    assert found.columns == set(row)
    assert found.right(problem("", **row), "    return a + b\n")
    assert not found.right(problem("", **row), "    return a - b\n")


@pytest.mark.parametrize(
    ("name", "options", "answer", "message"),
    [
        ("numeric", {}, "none", "no number"),
        ("choice", {}, "E", "none of the letters ABCD"),
        ("python", {"tests": "{{ test }}"}, "", "'test' is undefined"),
    ],
)
def test_a_problem_that_nothing_could_solve_is_an_error(name, options, answer, message):
    with pytest.raises(BadRecord, match=message):
        judge(name, **options).check(problem(answer))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nothing", "judge must be one of exact, numeric, choice, regex, math, contains, python"),
        ({"name": "regex"}, "judge regex: pattern: expected a value, got nothing"),
        ({"name": "regex", "pattern": "("}, "no regular expression"),
        ({"name": "exact", "case": True}, "judge exact: case: there is no such key"),
        ("no.such:thing", "judge no.such:thing: cannot be imported"),
        ("json:no", "cannot be imported: AttributeError"),
        ("sys:path", "expected a function"),
        ({"name": "python", "tests": "{{ a"}, "cannot be read"),
        ({}, "judge must be one of"),
    ],
)
def test_bad_judges(given, message):
    with pytest.raises(InputError, match=message):
        make_judge(given, "file.yaml", allow_code_execution=True)


def test_code_is_only_run_where_that_is_asked_for():
    with pytest.raises(InputError, match="--allow-code-execution"):
        make_judge({"name": "python", "tests": "1"}, "t", allow_code_execution=False)


def test_a_function_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_judges.py").write_text(
        "def length(problem, text, *, most):\n    return len(text) <= most or 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_judges", raising=False)
    found = make_judge({"name": "my_judges:length", "most": 5}, "t", allow_code_execution=False)
    assert found.right(problem("x"), "four") is True
    with pytest.raises(InputError, match="my_judges:length: raised ZeroDivisionError"):
        found.right(problem("x"), "too long")


@pytest.mark.parametrize("verdict", ["'wrong'", "0.7", "None", "[]"])
def test_what_is_neither_true_nor_false_is_no_verdict(tmp_path, monkeypatch, verdict):
    """A text or a share is true to Python, a forgotten return is false."""
    (tmp_path / "my_judges.py").write_text(f"def said(problem, text):\n    return {verdict}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_judges", raising=False)
    found = make_judge("my_judges:said", "t", allow_code_execution=False)
    with pytest.raises(InputError, match=r"my_judges:said: expected True or False, got .* for the"):
        found.right(problem("x"), "four")


def test_where_a_judge_of_ones_own_comes_from_is_its_source(tmp_path, monkeypatch):
    """Also where its module took the function from another one."""
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for here, there in (("", ""), ("# 1", ""), ("", "# 2"), ("", "")):
        (tmp_path / "seen.py").write_text(f"from hidden import says{here}\n")
        (tmp_path / "hidden.py").write_text(f"def says(problem, text): ...{there}\n")
        for name in ("seen", "hidden"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        found.append(judge("seen:says").source)
    assert len(set(found)) == 3 and found[0] == found[3]
    assert judge("builtins:max").source  # without a file
    assert judge("exact").source == ""


@given(text=st.text() | st.text("-$#0123456789,. ABCDanswer()\\boxed{}\n"))
def test_no_text_makes_a_judge_raise(text):
    for name, options in (("exact", {}), ("contains", {}), ("numeric", {}), ("choice", {}),
                          ("regex", {"pattern": "(a)|b"})):  # fmt: skip
        found = judge(name, **options)
        assert found.right(problem("#### 5 (A)"), text) in (True, False)
        found.answer(text)
    assert set(JUDGES) == {"exact", "contains", "numeric", "choice", "regex", "math", "python"}
