"""Judges: what each takes for right, and that no text of a model makes one raise."""

from __future__ import annotations

import importlib
import resource
import sys
import threading
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


def misjudged(found, rows, **row: object) -> list[tuple[str, str]]:
    """The rows of reference, response and verdict that a judge gets wrong."""
    return [
        (reference, text)
        for reference, text, right in rows
        if found.right(problem(reference, **row), text) is not right
    ]


def pairs(table) -> list[tuple[str, str, bool]]:
    """The rows of a table that has right and wrong responses by reference."""
    return [
        (reference, text, texts is right)
        for reference, (right, wrong) in table.items()
        for texts in (right, wrong)
        for text in texts
    ]


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


def test_texts_are_compared():
    wrong = [row for row in TEXT if misjudged(judge(row[0], **row[1]), [row[2:]])]
    assert wrong == []


# Right and wrong responses by reference.
NUMBERS = {
    "She has 3*4=12\n#### 12": (["so 12 it is"], []),
    "#### 12": (["#### 12\nQuestion: what is 7?\n#### 7"], ["12 and then 13", "1,2"]),
    "#### 1,250": (["It costs $1,250.00.", "It costs 1250 dollars"], []),
    "#### -7": (["below zero: -$7", "below zero: $-7", "below zero: −7", "below zero: –7"], []),
    "#### 7": (["that is 10-7", "that is 10–7", "f(x)-7"], ["below zero: −7", "none at all"]),
    "-18": ([], ["- 18 dollars"]),
    "0.1": ([".1", "0.10"], []),
    "3.14": ([], ["3.1"]),
    "12": (
        [
            "#### twelve, which is 12", "#### Step 1: think\n#### 12", "####12", "#### $12",
            "#### 12.", "12.", "٣12",
        ],
        [],
    ),
    "1": ([], ["#### Step 1: think\n#### 12"]),
    "1e-05": (["0.00001"], ["#### 5"]),
    "1e16": (["10000000000000000"], ["16"]),
    "1E3": (["1,000"], []),
    "1.5e2": (["150"], []),
    "2e": (["2"], []),
    "3/4": (["0.75", "6/8"], ["4"]),
    "#### 1/2": (["#### 0.5"], ["#### 1/3"]),
    "1 1/2": (["1.5", "3/2"], []),
    "-1/2": (["-0.5"], []),
    r"\frac{1}{2}": (["0.5"], []),
    r"$\dfrac{3}{4}$": ([".75"], []),
    "1/3": (["2/6"], ["0.333333"]),
    "5": (["5th", "x5", "2024/10/5"], ["5/0"]),
    "0": (["-0"], []),
    "100": (["100%"], []),
    ".3": (["1.2.3"], []),
    "1000000": (["1,000,000"], []),
    "1234": ([], ["12,34"]),
    "34": (["12,34"], []),
    "2": (["10/5"], []),
    "0.5": (["$.50"], []),
    "7": (["€7", "£7.00", "1e1 - 3 is 7", "**7**"], ["7 apples, or 8"]),
    "2.0": (["2"], []),
    "1 3/4": (["1.75"], ["3/4"]),
    "-0.00001": (["-1e-5"], []),
    "#### 42": (["#### Step 2: add 3\n#### 42"], []),
    "1,000,000": (["1e6"], []),
    "16": ([], ["1e16"]),
    "460": (
        [
            "#### **460**\nQuestion: what is 7?", r"#### \$460 of 500",
            "#### $\\boxed{460}$\nQuestion: what is 7?",
        ],
        [],
    ),
    "18": (["- 18 dollars", r"\[ 9 \times 2 = 18 \]", "**Answer: 18**"], ["#### 18.5", "#### -18"]),
}  # fmt: skip


def test_numbers_are_compared_exactly():
    assert misjudged(judge("numeric"), pairs(NUMBERS)) == []
    for reference in NUMBERS:
        judge("numeric").check(problem(reference))


# Letters A to D.
CHOICES = {
    "B": (
        [
            "B", "The answer is (B).", "Answer: B\nbecause A is wrong", "ANSWER: B", "answer is B",
            "B) it is cold", "B. it is cold", "B: it is cold", "(B) it is cold", "**B**",
            "**B.** cold", "(A) is wrong, so (B)", "A dog, so the answer is B", r"\boxed{B}",
            r"$\boxed{\text{B}}$", r"\boxed{\textbf{(B)}}", r"first \boxed{A}, no: \boxed{B}",
            "<answer>B</answer>", "<answer> (B) </answer>", "The correct answer is option B",
            "The correct answer is: B", "The correct option is B", "the answer would be B",
            "the answer should be B.", "The answer is **B**", "**Answer:** B", "**Answer**: (B)",
            "Final answer: B", "[B]", "it must be [B]", "I choose B", "I choose (B)",
            "I would pick B.", "Select option B", "answer = B", "Answer - (B)",
            "The answer is: \n\nB", "The answer is A. Wait, the answer is B.", 'The answer is "B"',
            "The answer is 'B'", "The answer is `B`", "The answer is the letter B", "answer: {B}",
            r"The answer is $\text{B}$", "B]", "Choice: B", "B is correct.", "So B is correct.",
            "B is the correct answer.", "Therefore, B.", "It's B.", "B - Paris", "### B", "- B",
            "The answer is therefore B", "the answer is clearly B.", "B</s>", "B;", "ans: B",
            "The answer to this question is B.", "The statement is true, hence B", "答案是B",
            "The answer is not A; it's B.", "Both A and C are false. Hence B.",
            "The answer is\n**B**", r"\boxed{\mathrm{B}}", r"\boxed{B. Paris}",
        ],
        [
            "Bananas", r"The answer is \boxed{A}, not (B)", "b", "", "no letter at all",
            "Answer: BAD", "A is correct", r"\boxed{Bats}",
        ],
    ),
    "A": (
        [r"The answer is \boxed{A}, not (B)", "A, since B is wrong", "A is correct"],
        ["A dog", "A dog, so the answer is B", "The answer is A. Wait, the answer is B."],
    ),
    "C": (["Neither (A) nor (B), (C)"], []),
    "D": (["D\n", "D\nbecause"], ["Dogs (A)"]),
}  # fmt: skip


def test_a_letter_is_found():
    assert misjudged(judge("choice"), pairs(CHOICES)) == []


def test_a_pronoun_is_no_letter():
    letters = {
        "I, personally, choose (C)": "C", "I think the answer is J": "J", "answer: J": "J",
        "The answer is I.": "I", "I": "I", "I'd say (B)": "B",
    }  # fmt: skip
    found = judge("choice", letters="ABCDEFGHIJ")
    assert {text: found.answer(text) for text in letters} == letters


# The last three are what math-verify itself takes as equal.
EXPRESSIONS = {
    r"\frac{1}{2}": (
        [r"so it is $\boxed{0.5}$", r"\boxed{1/2}", r"\boxed{\frac12}", r"\boxed{\dfrac{1}{2}}"],
        [r"\boxed{\frac{1}{3}}"],
    ),
    r"we get $x=\boxed{\frac{1}{2}}$.": ([r"The answer is $\frac{2}{4}$."], []),
    r"-\frac{1}{2}": ([r"\boxed{\frac{-1}{2}}"], [r"\boxed{\frac{1}{2}}"]),
    "2x+1": ([r"\boxed{1+2x}"], [r"\boxed{2x}", r"\boxed{2y+1}"]),
    "x^2-1": ([r"\boxed{(x-1)(x+1)}"], [r"\boxed{(x-1)^2}"]),
    "7": (
        [
            r"\boxed{7}", r"\boxed{7.0}", r"\boxed{07}", "the answer is 7", "The answer is $7$.",
            "Final Answer: The final answer is $7$. I hope it is correct.",
            r"so it is $\boxed 7$.", r"\fbox{7}", r"The answer is \(7\).", r"\[x = 7\]",
        ],
        ["nothing", "", r"\boxed{}", r"\boxed{-7}", r"\boxed{70}"],
    ),
    "3": ([r"\boxed{2} no, \boxed{3}", r"\boxed{3} as $5$ is wrong"], []),
    "2": ([], [r"\boxed{2} no, \boxed{3}"]),
    r"\$36": ([r"\boxed{36}", "$36$", r"\boxed{\$36}"], [r"\boxed{63}"]),
    "-5": ([r"\boxed{−5}"], []),
    "5": ([], [r"\boxed{−5}"]),
    "1{,}234": ([r"\boxed{1234}"], []),
    "1,234": ([r"\boxed{1,234}"], []),
    "50": ([r"\boxed{50\%}"], []),
    "12": ([r"\boxed{12 \text{ cm}}"], []),
    r"12\text{ cm}": ([r"\boxed{12}"], [r"\boxed{13}"]),
    r"90^\circ": ([r"\boxed{90}"], []),
    r"\sqrt{2}": ([r"\boxed{\sqrt{2}}", r"\boxed{\sqrt2}"], [r"\boxed{2}"]),
    r"\sqrt{8}": ([r"\boxed{2\sqrt{2}}"], []),
    r"\frac{\sqrt{2}}{2}": ([r"\boxed{\frac{1}{\sqrt{2}}}"], [r"\boxed{\frac{\sqrt{3}}{2}}"]),
    r"\pi": ([r"\boxed{\pi}"], []),
    r"2\pi": ([], [r"\boxed{\pi}"]),
    "(1,2)": ([r"\boxed{(1, 2)}"], [r"\boxed{(2, 1)}"]),
    "[0,1)": ([r"\boxed{[0,1)}"], [r"\boxed{[0,2)}"]),
    r"\{1,2\}": ([r"\boxed{\{2,1\}}"], []),
    "x=5": ([r"\boxed{5}"], []),
    "3+4i": ([r"\boxed{3+4i}"], [r"\boxed{3-4i}"]),
    "2^{10}": ([r"\boxed{1024}"], []),
    r"\frac{3}{4}": ([], [r"\boxed{\frac{\text{nested}"]),
    "1/3": ([r"\boxed{0.333333}"], []),
    "4210": ([r"\boxed{4210_5}"], []),
    "3r^2": ([r"\boxed{3R^2}"], []),
}  # fmt: skip


@needs_math
def test_expressions_are_compared_by_their_value():
    assert misjudged(judge("math"), pairs(EXPRESSIONS)) == []


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


# Responses that are or hold the function add, also where the block is cut off before its end.
RIGHT = [
    ADD, ADD.strip(), f"\n\n{ADD}\n\n", "add = lambda a, b: a + b", "from operator import add",
    f"import math\n{ADD}", f"{ADD}\nassert add(1, 1) == 2", f"{ADD}\nprint(add(1, 1))",
    f"def f():\n{indented(ADD, '    ')}    return add\nadd = f()",
    f"Here it is:\n```python\n{ADD}```\nThat adds.", f"```\n{ADD}```", f"```\n{ADD}",
    f"```python\n{ADD.strip()}", f"{ADD.strip()}```", f"{ADD}```",
    f"{ADD}```\nThis adds two numbers.", f"```Python\n{ADD}```", f"```py\n{ADD}```",
    f"```python3\n{ADD}```", f"``` python\n{ADD}```", f"````python\n{ADD}````",
    f"~~~python\n{ADD}~~~", f"~~~\n{ADD}~~~", f"```python\r\n{ADD}```",
    f"```bash\npip install add\n```\n```python\n{ADD}```",
    f"```text\nadd(1, 2)\n```\nand\n```\n{ADD}```",
    f"```python\n{ADD}```\n```bash\npython add.py\n```", f"```python\n{ADD}```\n```\n3\n```",
    f"- like so:\n\n  ```python\n{indented(ADD, '  ')}  ```",
    f"1. like so:\n   ```python\n{indented(ADD, '   ')}   ```",
    f"> ```python\n{indented(ADD, '> ')}> ```", f"```python\n{DOCSTRING}{BODY}```",
    f"{DOCSTRING}{BODY}", f"```python\n{WRONG}```\nBetter:\n```python\n{ADD}```",
    f"```python\n{ADD}```\nTry it:\n```python\nprint(add(1, 2))\n```",
    f"```python\n{ADD}```\nTests:\n```python\nassert add(1, 2) == 3\n```",
    f"```python\nprint(add(1, 2))\n```\nwith\n```python\n{ADD}```",
    f"```python\n{ADD}```\nAlso:\n```python\ndef sub(a, b): return a - b\n```",
    f"The function `add`:\n```python\n{ADD}```\n`add(1, 2)` is 3.",
    f"**Answer**\n\n```python\n# adds\n{ADD}```\n\n---", f"```python {{.lines}}\n{ADD}```",
    f'```python title="add.py"\n{ADD}```',
    f"<think>\n```python\n{WRONG}```\n</think>\n```python\n{ADD}```",
]  # fmt: skip
NOT_RIGHT = [
    WRONG, "", "not a program", "\ud800", "def add(a, b):", "def add(a): return a",
    "def sub(a, b): return a + b", "add = sum", f"import no_such_module\n{ADD}",
    f"{ADD}\nassert add(1, 1) == 3", f"{ADD}\nadd = None", f"class A:\n{indented(ADD, '    ')}",
    f"Here it is:\n```python\n{WRONG}```\nThat adds.", f"Here it is: {ADD}",
    f"```python\n{ADD}\n``", f"{WRONG}```\nThis adds two numbers.",
    f"```python\n{ADD}```\nor wrong:\n```python\n{WRONG}```",
    f"```python\n{ADD}```\nIn short:\n```python\ndef add(a, b): ...\n```",
    "```python\nprint(1)\n```", "```python\n```", "```python\ndef add(a, b):\n    return a +\n```",
]  # fmt: skip


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


def test_a_program_is_right_where_it_passes_its_tests(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("d2f.tasks.judges.passes", in_this_process)
        rows = pairs({"": (RIGHT, NOT_RIGHT)})
        assert misjudged(judge("python", **PROGRAM), rows, **MBPP) == []
    # In the sandbox:
    assert (
        misjudged(judge("python", **PROGRAM), [("", ADD, True), ("", WRONG, False)], **MBPP) == []
    )


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
        ("python", {"tests": "{{ test }}"}, "", "'test' is undefined, there are other"),
        ("countdown", {}, "", "expected whole numbers as input"),
    ],
)
def test_a_problem_that_nothing_could_solve_is_an_error(name, options, answer, message):
    with pytest.raises(BadRecord, match=message):
        judge(name, **options).check(problem(answer, other=1))


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


@pytest.mark.parametrize("name", ["my_judges:says", "d2f.files:locked", "d2f.tasks:check"])
def test_a_task_file_may_name_the_documented_judges_alone(name):
    """A function of the toolkit's own is no judge either."""
    with pytest.raises(InputError, match="code of this file's choice"):
        make_judge(name, "t", allow_code_execution=False, from_file=True)
    for name in ("countdown", "d2f.tasks.countdown:reaches"):  # as older files call it
        assert make_judge(name, "t", allow_code_execution=False, from_file=True).name == "countdown"


def test_where_a_judge_of_ones_own_comes_from_is_its_source(own):
    """Also where its module took the function from another one."""
    found = []
    for here, there in (("", ""), ("# 1", ""), ("", "# 2"), ("", "")):
        own(seen=f"from hidden import says{here}", hidden=f"def says(problem, text): ...{there}")
        found.append(judge("seen:says").source)
    assert len(set(found)) == 3 and found[0] == found[3]
    assert judge("builtins:max").source  # without a file
    assert judge("exact").source == ""


COUNTDOWN = [
    ("3 + 4", False), ("3 + 4 + 5", False), ("(3+4)*5", True), ("(3 + 4) \\times 5 = 35", True),
    ("(3+4)*5*1", False), ("(3+4)*5/0", False), ("(3+4)**5", False), ("__import__('os')", False),
    ("(" * 90, False), ("3*(4", False), ("", False), ("35", False),
]  # fmt: skip


def test_countdown_takes_only_arithmetic_with_each_number_once():
    rows = [("", f"so \\boxed{{1}} or \\boxed{{{text}}}", right) for text, right in COUNTDOWN]
    assert misjudged(judge("countdown"), rows, input="3,4,5", output="35") == []
    assert misjudged(judge("countdown"), [("", "(3+4)*5", False)], input="3,4,5", output="35") == []


@given(text=st.text() | st.text("-$#0123456789,. ABCDanswer()\\boxed{}\n"))
def test_no_text_makes_a_judge_raise(text):
    for found in EVERY:
        assert found.right(problem("#### 5 (A)", input="5", output=5), text) in (True, False)
        found.answer(text)


EVERY = [
    judge(name)
    for name in (
        "exact", "contains", "numeric", "choice", "countdown", {"name": "regex", "pattern": "(a)|b"}
    )
]  # fmt: skip


def in_a_thread(act):
    """What it returned or raised there."""
    done = []

    def run() -> None:
        try:
            done.append(act())
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return done[0]


BOMBS = [
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set x = 'x' * 9 %}" + "{% set x = x ~ x %}" * 60,
    "{{ 'x' | center(10**11) }}",
    "{% for i in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
]


def test_templates_and_patterns_have_limits_of_time_and_memory_in_any_thread(monkeypatch):
    monkeypatch.setattr("d2f.tasks.problem.SECONDS", 0.2)
    before = resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()
    slow = judge("regex", pattern=r"((?:a|a)*$|b+)")
    for call in (in_a_thread, lambda act: act()):
        for text, right in (("a" * 40 + "!", False), ("b" * 10, True)):
            assert call(lambda: slow.right(problem("b" * 10), text)) is right  # noqa: B023
    for number, template in enumerate(BOMBS):
        found = in_a_thread(lambda: render(template, {}))  # noqa: B023
        assert isinstance(found, BadRecord) and "the template" in str(found), (number, found)
    with pytest.raises(BadRecord, match=r"takes more than 0\.2 seconds"):
        render(BOMBS[0], {})
    assert (resource.getrlimit(resource.RLIMIT_AS), sys.gettrace()) == before
