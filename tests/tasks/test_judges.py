"""Judges: what each takes for right, and that no text of a model makes one raise."""

from __future__ import annotations

import importlib
import resource
import signal
import sys
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.data import BadRecord
from d2f.errors import InputError
from d2f.tasks import Problem
from d2f.tasks.judges import make_judge
from d2f.tasks.problem import render

needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is missing")


def problem(answer: str, **row: object) -> Problem:
    return Problem("test", "?", answer, "key", row=row)


def judge(given: object, **options: object):
    options = {"name": given, **options} if options else given
    return make_judge(options, "test", allow_code_execution=True)


TEXT = [
    ("exact", {}, "Paris", " Paris\n", True),
    ("exact", {}, "Paris", "paris", False),
    ("exact", {}, "Paris", "Paris, France", False),
    ("exact", {}, "12", "1", False),
    ("exact", {"ignore_case": True}, "Paris", "paris", True),
    ("contains", {}, "Paris", "It is Paris, I think", True),
    ("contains", {}, "Paris", "It is paris", False),
    ("contains", {"ignore_case": True}, "Paris", "It is paris", True),
    ("regex", {"pattern": r"x = (\d+)"}, "4", "x = 4, x = 5", True),
    ("regex", {"pattern": r"x = (\d+)", "take": "last"}, "5", "x = 4, x = 5", True),
    ("regex", {"pattern": r"x = (\d+)"}, "4", "y = 4", False),
    ("regex", {"pattern": r"^\w+$"}, "yes", "I say\nyes\n", True),
    ("numeric", {"tolerance": 0.05}, "3.14", "3.1", True),
    ("numeric", {"tolerance": 0.03}, "3.14", "3.1", False),
]


@pytest.mark.parametrize(("name", "options", "reference", "text", "right"), TEXT)
def test_texts_are_compared(name, options, reference, text, right):
    assert judge(name, **options).right(problem(reference), text) is right


# Reference, response, verdict.
NUMBERS = [
    ("She has 3*4=12\n#### 12", "so 12 it is", True),
    ("#### 12", "#### 12\nQuestion: what is 7?\n#### 7", True),
    ("#### 12", "12 and then 13", False),
    ("#### 1,250", "It costs $1,250.00.", True),
    ("#### 1,250", "It costs 1250 dollars", True),
    ("#### 12", "1,2", False),
    ("#### -7", "below zero: -$7", True),
    ("#### -7", "below zero: $-7", True),
    ("#### -7", "below zero: −7", True),
    ("#### -7", "below zero: –7", True),
    ("#### 7", "below zero: −7", False),
    ("#### 7", "that is 10-7", True),
    ("#### 7", "that is 10–7", True),
    ("#### 7", "f(x)-7", True),
    ("18", "- 18 dollars", True),
    ("-18", "- 18 dollars", False),
    ("#### 7", "none at all", False),
    ("0.1", ".1", True),
    ("0.1", "0.10", True),
    ("3.14", "3.1", False),
    ("12", "#### twelve, which is 12", True),
    ("12", "#### Step 1: think\n#### 12", True),
    ("1", "#### Step 1: think\n#### 12", False),
    ("12", "####12", True),
    ("12", "#### $12", True),
    ("12", "#### 12.", True),
    ("12", "12.", True),
    ("1e-05", "0.00001", True),
    ("1e-05", "#### 5", False),
    ("1e16", "10000000000000000", True),
    ("1e16", "16", False),
    ("1E3", "1,000", True),
    ("1.5e2", "150", True),
    ("2e", "2", True),
    ("3/4", "0.75", True),
    ("3/4", "4", False),
    ("3/4", "6/8", True),
    ("#### 1/2", "#### 1/3", False),
    ("#### 1/2", "#### 0.5", True),
    ("1 1/2", "1.5", True),
    ("1 1/2", "3/2", True),
    ("-1/2", "-0.5", True),
    (r"\frac{1}{2}", "0.5", True),
    (r"$\dfrac{3}{4}$", ".75", True),
    ("1/3", "0.333333", False),
    ("5", "5/0", False),
    ("0", "-0", True),
    ("100", "100%", True),
    ("5", "5th", True),
    ("5", "x5", True),
    ("12", "٣12", True),
    (".3", "1.2.3", True),
    ("1000000", "1,000,000", True),
    ("1234", "12,34", False),
    ("34", "12,34", True),
    ("2", "10/5", True),
    ("5", "2024/10/5", True),
    ("0.5", "$.50", True),
    ("7", "€7", True),
    ("7", "£7.00", True),
    ("2.0", "2", True),
    ("1 3/4", "1.75", True),
    ("1 3/4", "3/4", False),
    ("7", "1e1 - 3 is 7", True),
    ("7", "7 apples, or 8", False),
    ("-0.00001", "-1e-5", True),
    ("#### 42", "#### Step 2: add 3\n#### 42", True),
    ("1,000,000", "1e6", True),
    ("1/3", "2/6", True),
    ("16", "1e16", False),
    ("7", "**7**", True),
]


@pytest.mark.parametrize(("reference", "text", "right"), NUMBERS)
def test_numbers_are_compared_exactly(reference, text, right):
    found = judge("numeric")
    found.check(problem(reference))
    assert found.right(problem(reference), text) is right


# Reference, response, verdict; letters A to D.
CHOICES = [
    ("B", "B", True),
    ("B", "The answer is (B).", True),
    ("B", "Answer: B\nbecause A is wrong", True),
    ("B", "ANSWER: B", True),
    ("B", "answer is B", True),
    ("B", "B) it is cold", True),
    ("B", "B. it is cold", True),
    ("B", "B: it is cold", True),
    ("B", "(B) it is cold", True),
    ("B", "**B**", True),
    ("B", "**B.** cold", True),
    ("B", "(A) is wrong, so (B)", True),
    ("B", "A dog, so the answer is B", True),
    ("A", "A dog, so the answer is B", False),
    ("B", "Bananas", False),
    ("B", r"\boxed{B}", True),
    ("B", r"$\boxed{\text{B}}$", True),
    ("B", r"\boxed{\textbf{(B)}}", True),
    ("B", r"first \boxed{A}, no: \boxed{B}", True),
    ("A", r"The answer is \boxed{A}, not (B)", True),
    ("B", r"The answer is \boxed{A}, not (B)", False),
    ("B", "<answer>B</answer>", True),
    ("B", "<answer> (B) </answer>", True),
    ("B", "The correct answer is option B", True),
    ("B", "The correct answer is: B", True),
    ("B", "The correct option is B", True),
    ("B", "the answer would be B", True),
    ("B", "the answer should be B.", True),
    ("B", "The answer is **B**", True),
    ("B", "**Answer:** B", True),
    ("B", "**Answer**: (B)", True),
    ("B", "Final answer: B", True),
    ("B", "[B]", True),
    ("B", "it must be [B]", True),
    ("B", "I choose B", True),
    ("B", "I choose (B)", True),
    ("B", "I would pick B.", True),
    ("B", "Select option B", True),
    ("B", "answer = B", True),
    ("B", "Answer - (B)", True),
    ("B", "The answer is: \n\nB", True),
    ("B", "The answer is A. Wait, the answer is B.", True),
    ("A", "The answer is A. Wait, the answer is B.", False),
    ("B", "b", False),
    ("B", "", False),
    ("B", "no letter at all", False),
    ("C", "Neither (A) nor (B), (C)", True),
    ("D", "D\n", True),
    ("D", "D\nbecause", True),
    ("D", "Dogs (A)", False),
    ("A", "A, since B is wrong", True),
    ("B", "Answer: BAD", False),
    ("B", 'The answer is "B"', True),
    ("B", "The answer is 'B'", True),
    ("B", "The answer is `B`", True),
    ("B", "The answer is the letter B", True),
    ("B", "answer: {B}", True),
    ("B", r"The answer is $\text{B}$", True),
    ("B", "B]", True),
    ("B", "Choice: B", True),
]


@pytest.mark.parametrize(("reference", "text", "right"), CHOICES)
def test_a_letter_is_found(reference, text, right):
    assert judge("choice").right(problem(reference), text) is right


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("I, personally, choose (C)", "C"),
        ("I think the answer is J", "J"),
        ("answer: J", "J"),
        ("The answer is I.", "I"),
        ("I", "I"),
        ("I'd say (B)", "B"),
    ],
)
def test_a_pronoun_is_no_letter(text, letter):
    assert judge("choice", letters="ABCDEFGHIJ").answer(text) == letter


# Reference, response, verdict; the last three are what math-verify itself takes as equal.
EXPRESSIONS = [
    (r"\frac{1}{2}", r"so it is $\boxed{0.5}$", True),
    (r"we get $x=\boxed{\frac{1}{2}}$.", r"The answer is $\frac{2}{4}$.", True),
    (r"\frac{1}{2}", r"\boxed{1/2}", True),
    (r"\frac{1}{2}", r"\boxed{\frac12}", True),
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
    (r"-\frac{1}{2}", r"\boxed{\frac{-1}{2}}", True),
    (r"-\frac{1}{2}", r"\boxed{\frac{1}{2}}", False),
    ("2x+1", r"\boxed{1+2x}", True),
    ("2x+1", r"\boxed{2x}", False),
    ("2x+1", r"\boxed{2y+1}", False),
    ("x^2-1", r"\boxed{(x-1)(x+1)}", True),
    ("x^2-1", r"\boxed{(x-1)^2}", False),
    ("7", "nothing", False),
    ("7", "", False),
    ("7", r"\boxed{}", False),
    ("7", r"\boxed{7}", True),
    ("7", r"\boxed{7.0}", True),
    ("7", r"\boxed{07}", True),
    ("7", r"\boxed{-7}", False),
    ("7", r"\boxed{70}", False),
    ("7", "the answer is 7", True),
    ("7", "The answer is $7$.", True),
    ("7", "Final Answer: The final answer is $7$. I hope it is correct.", True),
    ("3", r"\boxed{2} no, \boxed{3}", True),
    ("2", r"\boxed{2} no, \boxed{3}", False),
    ("3", r"\boxed{3} as $5$ is wrong", True),
    (r"\$36", r"\boxed{36}", True),
    (r"\$36", "$36$", True),
    (r"\$36", r"\boxed{\$36}", True),
    (r"\$36", r"\boxed{63}", False),
    ("-5", r"\boxed{−5}", True),
    ("5", r"\boxed{−5}", False),
    ("1{,}234", r"\boxed{1234}", True),
    ("1,234", r"\boxed{1,234}", True),
    ("50", r"\boxed{50\%}", True),
    ("12", r"\boxed{12 \text{ cm}}", True),
    (r"12\text{ cm}", r"\boxed{12}", True),
    (r"12\text{ cm}", r"\boxed{13}", False),
    (r"90^\circ", r"\boxed{90}", True),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}}", True),
    (r"\sqrt{2}", r"\boxed{\sqrt2}", True),
    (r"\sqrt{2}", r"\boxed{2}", False),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", True),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", True),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{\sqrt{3}}{2}}", False),
    (r"\pi", r"\boxed{\pi}", True),
    (r"2\pi", r"\boxed{\pi}", False),
    ("(1,2)", r"\boxed{(1, 2)}", True),
    ("(1,2)", r"\boxed{(2, 1)}", False),
    ("[0,1)", r"\boxed{[0,1)}", True),
    ("[0,1)", r"\boxed{[0,2)}", False),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", True),
    ("x=5", r"\boxed{5}", True),
    ("3+4i", r"\boxed{3+4i}", True),
    ("3+4i", r"\boxed{3-4i}", False),
    ("2^{10}", r"\boxed{1024}", True),
    (r"\frac{3}{4}", r"\boxed{\frac{\text{nested}", False),
    ("1/3", r"\boxed{0.333333}", True),
    ("4210", r"\boxed{4210_5}", True),
    ("3r^2", r"\boxed{3R^2}", True),
]


@needs_math
@pytest.mark.parametrize(("reference", "text", "right"), EXPRESSIONS)
def test_expressions_are_compared_by_their_value(reference, text, right):
    assert judge("math").right(problem(reference), text) is right


def test_equal_answers_are_one_answer():
    """Else a majority would count them apart."""
    found = judge("numeric")
    assert found.answer("$1,200.00") == found.answer("#### 1200") is not None
    assert found.answer("none") is None
    if find_spec("math_verify") is not None:
        found = judge("math")
        half = found.answer(r"\boxed{\frac{1}{2}}")
        assert half == found.answer(r"\boxed{\frac{2}{4}}") is not None


PROGRAM = {"program": "{{ response }}", "tests": "{{ test_list | join('\n') }}"}
ADD = "def add(a, b):\n    return a + b\n"
BODY = "    return a + b\n"
WRONG = ADD.replace("+", "-")
DOCSTRING = 'def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """\n'


def indented(text: str, by: str) -> str:
    return "".join(by + line for line in text.splitlines(keepends=True))


# Responses that are or hold the function add, verdict.
FENCED = [
    (ADD, True),
    (ADD.strip(), True),
    (f"\n\n{ADD}\n\n", True),
    (WRONG, False),
    ("", False),
    ("not a program", False),
    ("\ud800", False),
    ("def add(a, b):", False),
    ("def add(a): return a", False),
    ("def sub(a, b): return a + b", False),
    ("add = lambda a, b: a + b", True),
    ("add = sum", False),
    ("from operator import add", True),
    (f"import math\n{ADD}", True),
    (f"import no_such_module\n{ADD}", False),
    (f"{ADD}\nassert add(1, 1) == 2", True),
    (f"{ADD}\nassert add(1, 1) == 3", False),
    (f"{ADD}\nprint(add(1, 1))", True),
    (f"{ADD}\nadd = None", False),
    (f"class A:\n{indented(ADD, '    ')}", False),
    (f"def f():\n{indented(ADD, '    ')}    return add\nadd = f()", True),
    (f"Here it is:\n```python\n{ADD}```\nThat adds.", True),
    (f"Here it is:\n```python\n{WRONG}```\nThat adds.", False),
    (f"Here it is: {ADD}", False),
    (f"```\n{ADD}```", True),
    (f"```\n{ADD}", True),  # cut off before the end of the block
    (f"```python\n{ADD.strip()}", True),
    (f"```python\n{ADD}\n``", False),
    (f"{ADD.strip()}```", True),
    (f"{ADD}```", True),
    (f"{ADD}```\nThis adds two numbers.", True),
    (f"{WRONG}```\nThis adds two numbers.", False),
    (f"```Python\n{ADD}```", True),
    (f"```py\n{ADD}```", True),
    (f"```python3\n{ADD}```", True),
    (f"``` python\n{ADD}```", True),
    (f"````python\n{ADD}````", True),
    (f"~~~python\n{ADD}~~~", True),
    (f"~~~\n{ADD}~~~", True),
    (f"```python\r\n{ADD}```", True),
    (f"```bash\npip install add\n```\n```python\n{ADD}```", True),
    (f"```text\nadd(1, 2)\n```\nand\n```\n{ADD}```", True),
    (f"```python\n{ADD}```\n```bash\npython add.py\n```", True),
    (f"```python\n{ADD}```\n```\n3\n```", True),
    (f"- like so:\n\n  ```python\n{indented(ADD, '  ')}  ```", True),
    (f"1. like so:\n   ```python\n{indented(ADD, '   ')}   ```", True),
    (f"> ```python\n{indented(ADD, '> ')}> ```", True),
    (f"```python\n{DOCSTRING}{BODY}```", True),
    (f"{DOCSTRING}{BODY}", True),
    (f"```python\n{WRONG}```\nBetter:\n```python\n{ADD}```", True),
    (f"```python\n{ADD}```\nor wrong:\n```python\n{WRONG}```", False),
    (f"```python\n{ADD}```\nTry it:\n```python\nprint(add(1, 2))\n```", True),
    (f"```python\n{ADD}```\nTests:\n```python\nassert add(1, 2) == 3\n```", True),
    (f"```python\nprint(add(1, 2))\n```\nwith\n```python\n{ADD}```", True),
    (f"```python\n{ADD}```\nAlso:\n```python\ndef sub(a, b): return a - b\n```", True),
    (f"```python\n{ADD}```\nIn short:\n```python\ndef add(a, b): ...\n```", False),
    (f"The function `add`:\n```python\n{ADD}```\n`add(1, 2)` is 3.", True),
    (f"**Answer**\n\n```python\n# adds\n{ADD}```\n\n---", True),
    ("```python\nprint(1)\n```", False),
    ("```python\n```", False),
    ("```python\ndef add(a, b):\n    return a +\n```", False),
]


def in_this_process(program: str, tests: str, *_: object, **__: object) -> bool:
    """What the sandbox says, without its processes: only for what is written here."""
    space: dict = {}
    try:
        exec(program, space)
        exec(tests, space)
    except BaseException:
        return False
    return True


MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


@pytest.mark.parametrize(("text", "right"), FENCED)
def test_a_program_is_right_where_it_passes_its_tests(monkeypatch, text, right):
    monkeypatch.setattr("d2f.tasks.judges.passes", in_this_process)
    assert judge("python", **PROGRAM).right(problem("", **MBPP), text) is right


def test_programs_run_in_the_sandbox():
    found = judge("python", **PROGRAM)
    assert found.right(problem("", **MBPP), ADD) and not found.right(problem("", **MBPP), WRONG)


def test_a_completion_is_judged_behind_its_prompt(monkeypatch):
    monkeypatch.setattr("d2f.tasks.judges.passes", in_this_process)
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
    whole = f"```python\n{row['prompt']}{BODY}```"
    for text in (BODY, f"{BODY}```\nIt adds.", f"{BODY}\n```\nWith prose behind it", whole):
        assert found.right(problem("", **row), text), text
    assert not found.right(problem("", **row), "    return a - b\n")


@pytest.mark.parametrize(
    ("name", "options", "answer", "message"),
    [
        ("numeric", {}, "none", "expected one number"),
        ("numeric", {}, "3 of 4", "expected one number"),
        ("choice", {}, "E", "expected one of the letters ABCD"),
        ("python", {"tests": "{{ test }}"}, "", "'test' is undefined"),
    ],
)
def test_a_problem_that_nothing_could_solve_is_an_error(name, options, answer, message):
    with pytest.raises(BadRecord, match=message):
        judge(name, **options).check(problem(answer))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "nothing",
            "got 'nothing'; expected one of exact, numeric, choice, regex, math, contains",
        ),
        ("numerik", "did you mean numeric"),
        ({"name": "regex"}, "judge regex: pattern: expected a value, got nothing"),
        ({"name": "regex", "pattern": "("}, "no regular expression"),
        ({"name": "exact", "case": True}, "judge exact: case: there is no such key"),
        ("no.such:thing", "judge no.such:thing: cannot be imported"),
        ("sys:path", "judge sys:path: expected a function"),
        ({"name": "python", "tests": "1"}, "--allow-code-execution"),
    ],
)
def test_bad_judges(given, message):
    with pytest.raises(InputError, match=message):
        make_judge(given, "file.yaml", allow_code_execution=False)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write modules of judges, anew each time."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()

    return write


def test_a_function_of_ones_own(own):
    """What is neither true nor false is no verdict: a text or a share is true to Python, a
    forgotten return is false."""
    own(my_judges="def says(problem, text, *, most):\n    return eval(text)[:most]")
    given = {"name": "my_judges:says", "most": 1}
    found = make_judge(given, "t", allow_code_execution=False)
    with pytest.raises(InputError, match="my_judges:says: raised TypeError"):
        found.right(problem("x"), "1")
    for said in ("'wrong'", "[]", "b'1'"):
        with pytest.raises(
            InputError, match=r"my_judges:says: raised .*expected True or False, got .* for"
        ):
            found.right(problem("x"), said)
    own(my_judges="def says(problem, text):\n    return text == problem.answer")
    found = make_judge("my_judges:says", "t", allow_code_execution=False)
    assert [found.right(problem("x"), text) for text in "xy"] == [True, False]
    with pytest.raises(InputError, match="code of this file's choice"):
        make_judge("my_judges:says", "t", allow_code_execution=False, from_file=True)


def test_where_a_judge_of_ones_own_comes_from_is_its_source(own):
    """Also where its module took the function from another one."""
    found = []
    for here, there in (("", ""), ("# 1", ""), ("", "# 2"), ("", "")):
        own(seen=f"from hidden import says{here}", hidden=f"def says(problem, text): ...{there}")
        found.append(judge("seen:says").source)
    assert len(set(found)) == 3 and found[0] == found[3]
    assert judge("builtins:max").source  # without a file
    assert judge("exact").source == ""


@given(text=st.text() | st.text("-$#0123456789,. ABCDanswer()\\boxed{}\n"))
def test_no_text_makes_a_judge_raise(text):
    for name in ("exact", "contains", "numeric", "choice", {"name": "regex", "pattern": "(a)|b"}):
        found = judge(name)
        assert found.right(problem("#### 5 (A)"), text) in (True, False)
        found.answer(text)


@pytest.mark.parametrize("text", ["a" * 40 + "!", "b" * 10])
def test_a_pattern_has_limits_of_time_and_memory(monkeypatch, text):
    monkeypatch.setattr("d2f.tasks.problem.SECONDS", 0.2)
    assert judge("regex", pattern=r"((?:a|a)*$|b+)").right(problem("b" * 10), text) is ("b" in text)


BOMBS = [
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set x = 'x' * 9 %}" + "{% set x = x ~ x %}" * 60,
    "{{ 'x' | center(10**11) }}",
    "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS, ids=range(len(BOMBS)))
def test_a_template_has_limits_of_time_and_memory(monkeypatch, template):
    monkeypatch.setattr("d2f.tasks.problem.SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    with pytest.raises(BadRecord, match="the template"):
        render(template, {})
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
