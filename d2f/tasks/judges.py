"""Judges by name: they say whether a response solves a problem of a file or data set."""

from __future__ import annotations

import ast
import hashlib
import logging
import operator
import re
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import regex
from pydantic import Field, PrivateAttr, field_validator, model_validator

from d2f.config import Section, Switch, Text, check, find_attribute
from d2f.data import BadRecord
from d2f.errors import InputError, not_one_of, repr_of
from d2f.tasks.problem import Problem, bounded, columns_of, render
from d2f.tasks.sandbox import Limits, passes, protection


class Judge(Section):
    """Base of all judges. The fields are the judge's options in a task file.

    columns: of the data that it reads. judging_seconds: after which no verdict will come, None
    where one comes at once. source: a digest of the code behind the verdicts, empty where that is
    this toolkit. notice: a sentence that the user should read before anything is judged.
    """

    name: ClassVar[str]
    columns: ClassVar[set[str]] = set()
    judging_seconds: ClassVar[float | None] = None
    source: ClassVar[str] = ""
    notice: ClassVar[str | None] = None

    def right(self, problem: Problem, text: str) -> bool:
        """Say whether a decoded response solves the problem. Never raises for any text."""
        found = self.answer(text)
        return found is not None and found == self.answer(problem.answer)

    def answer(self, text: str) -> str | None:
        """Extract the answer, so that a majority vote can count equal ones; None without one."""
        return None

    def check(self, problem: Problem) -> None:
        """Raise BadRecord for a problem that no response could solve."""


class Exact(Judge):
    """The response is the reference, apart from blanks around it."""

    name: ClassVar[str] = "exact"
    ignore_case: Switch = False
    """Ignore upper and lower case."""

    def answer(self, text: str) -> str | None:
        return text.strip().casefold() if self.ignore_case else text.strip()


class Contains(Judge):
    """The reference, without blanks around it, is somewhere in the response."""

    name: ClassVar[str] = "contains"
    ignore_case: Switch = False
    """Ignore upper and lower case."""

    def right(self, problem: Problem, text: str) -> bool:
        wanted = problem.answer.strip()
        if self.ignore_case:
            wanted, text = wanted.casefold(), text.casefold()
        return wanted in text


class Regex(Judge):
    """Compare what the pattern finds (its first group, or all of it) with the reference."""

    name: ClassVar[str] = "regex"
    pattern: Text
    """Python's `re` syntax; ^ and $ match at the ends of lines."""
    take: Literal["first", "last"] = "first"
    """The match that counts, of several."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            with bounded():
                regex.compile(pattern, regex.MULTILINE)
        except (regex.error, RecursionError, OverflowError, TimeoutError, MemoryError) as error:
            raise ValueError(f"{pattern[:60]!r} is no regular expression: {error}") from error
        return pattern

    def right(self, problem: Problem, text: str) -> bool:
        return self.answer(text) == problem.answer.strip()

    def answer(self, text: str) -> str | None:
        try:
            with bounded() as seconds:
                every = regex.finditer(self.pattern, text, regex.MULTILINE, timeout=seconds)
                found = list(islice(every, 1) if self.take == "first" else every)
        except (TimeoutError, MemoryError):
            return None
        if not found:
            return None
        value: str | None = found[-1][1 if found[-1].re.groups else 0]
        return value and value.strip()


def _unlike(wanted: str, reference: str) -> BadRecord:
    return BadRecord(f"expected {wanted}, got {reference[-60:]!r}")


# Numbers: 1,234.50, -$7, .5, 1e-05, 3/4, 1 3/4, \frac{3}{4}. A minus is a sign where no number or
# word stands before it and the number follows at once: not in 10-3, nor in the list item "- 18".
_SIGN = r"(?<![0-9A-Za-z).])[-−–]"
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?[$€£]?(?P<inner>(?<=[$€£])[-−–])?"
    r"(?:\\[dt]?frac\{(?P<top>[0-9]+)\}\{(?P<bottom>[0-9]+)\}"
    r"|(?:(?P<whole>[0-9]+) +)?(?<![0-9/])(?P<over>[0-9]+)/(?P<under>[0-9]+)(?![0-9/.])"
    rf"|(?P<digits>{_PLAIN})(?:[eE](?P<power>[-+−]?[0-9]{{1,3}})(?![0-9A-Za-z]))?)"
)
_MARK = re.compile(r"####(?:\\boxed\{|\\?\$|[\s*])*")


class Numeric(Judge):
    """The number of the response is that of the reference: the first one right behind ``####`` (as
    in GSM8K's answers), else the last one. Both are compared as exact rationals: ``$1,250.00`` is
    1250, ``1/2`` is 0.5, ``1e-05`` is 0.00001."""

    name: ClassVar[str] = "numeric"
    tolerance: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Largest distance of two numbers that count as equal."""

    def right(self, problem: Problem, text: str) -> bool:
        found, wanted = _number(text), _number(problem.answer)
        if found is None or wanted is None:
            return False
        return abs(found - wanted) <= Fraction(str(self.tolerance))

    def check(self, problem: Problem) -> None:
        reference = problem.answer
        if _marked_number(reference) is None and len(_values(_NUMBER.finditer(reference))) != 1:
            raise _unlike("one number as the reference, or one behind ####", reference)

    def answer(self, text: str) -> str | None:
        found = _number(text)
        return None if found is None else str(found)


def _number(text: str) -> Fraction | None:
    marked = _marked_number(text)
    return marked if marked is not None else next(reversed(_values(_NUMBER.finditer(text))), None)


def _marked_number(text: str) -> Fraction | None:
    """Find the first number that stands right behind a mark."""
    behind = (_NUMBER.match(text, mark.end()) for mark in _MARK.finditer(text))
    return next(iter(_values(filter(None, behind))), None)


def _values(found: Iterable[re.Match[str]]) -> list[Fraction]:
    return [value for match in found if (value := _value(match)) is not None]


def _value(found: re.Match[str]) -> Fraction | None:
    part = found.groupdict()
    top, bottom = part["top"] or part["over"], part["bottom"] or part["under"]
    if top is not None and bottom is not None:
        if not int(bottom):
            return None
        value = int(part["whole"] or 0) + Fraction(int(top), int(bottom))
    else:
        power = int((part["power"] or "0").replace("−", "-"))
        value = Fraction(part["digits"].replace(",", "")) * Fraction(10) ** power
    return -value if part["sign"] or part["inner"] else value


class Choice(Judge):
    r"""The letter that the response chooses is that of the reference: the last one in ``\boxed{}``
    or ``<answer>``, else the last one that "answer" leads to, else one that the response begins
    with, else one behind "option" or "choose", else the last one in brackets, else the last one
    that stands alone (as MMLU-Pro's own code ends)."""

    name: ClassVar[str] = "choice"
    letters: Annotated[str, Field(pattern="^[A-Z]{2,26}$")] = "ABCD"
    """The letters to choose from."""

    def check(self, problem: Problem) -> None:
        if self.answer(problem.answer) is None:
            raise _unlike(f"one of the letters {self.letters} as the reference", problem.answer)

    def answer(self, text: str) -> str | None:
        # I is a word where another one follows; A letter within a word is none.
        pronoun = r"(?!(?<=I)(?:,?\s+[a-z]|'))"
        letter = rf"([{self.letters}])(?![A-Za-z]){pronoun}"
        opens = r"(?:\\[a-z]+\{|[\s*_$({\[\"'`])*"
        leads = r"(?i:\s*(?:is|are|would be|should be|must be|will be|could be|[:=]))*"
        named = r"(?i:\s*(?:the\s+)?(?:correct\s+)?(?:option|choice|letter|answer)\s*:?)?"
        patterns = (
            rf"\\boxed\s*\{{{opens}{letter}|(?i:<answer>){opens}{letter}",
            rf"(?i:answer)[*_\s]*{leads}[*_]*{named}{opens}{letter}",
            rf"\A[\s*_$\"'`]*{letter}[*_$\"'`]*\s*(?:[).:,\]\n]|\Z)",
            rf"(?i:option|choice|choose|chose|pick|select){leads}{opens}{letter}",
            rf"[(\[]{letter}[)\]]",
            rf"(?<![A-Za-z]){letter}(?!(?<=A)\s+(?!is\b)[a-z])",  # A dog: an article
        )
        for pattern in patterns:
            found = [next(filter(None, match.groups())) for match in re.finditer(pattern, text)]
            if found:
                return found[-1]
        return None


class Math(Judge):
    r"""The expression that the response ends with equals that of the reference, by math-verify (the
    extra `evaluation`): LaTeX in the last ``\boxed{}`` or in ``$...$``, or a plain formula. As in
    math-verify, 0.333333 is 1/3, 4210_5 is 4210 and 3r^2 is 3R^2."""

    name: ClassVar[str] = "math"
    # More than math-verify's own limits, 5 s each to read two texts and to compare them, which do
    # not end what sympy computes in one long operation.
    judging_seconds: ClassVar[float | None] = 60.0

    @model_validator(mode="after")
    def _installed(self) -> Math:
        if find_spec("math_verify") is None:
            raise ValueError(
                "the judge math needs math-verify: pip install 'd2f-toolkit[evaluation]'"
            )
        return self

    def right(self, problem: Problem, text: str) -> bool:
        from math_verify import verify

        wanted, found = _expressions(_marked(problem.answer)), _expressions(text)
        return bool(wanted and found and verify(wanted, found))

    def check(self, problem: Problem) -> None:
        if not _expressions(_marked(problem.answer)):
            raise _unlike("an expression as the reference", problem.answer)

    def answer(self, text: str) -> str | None:
        found = _expressions(text)
        return str(found[0]) if found else None


def _expressions(text: str) -> list[Any]:
    from math_verify import parse

    # It logs each text that it cannot read, which responses are full of.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    text = text.replace("−", "-").replace("\\fbox{", "\\boxed{")
    return list(parse(_last_box(text) or text))


def _last_box(text: str) -> str | None:
    r"""Find the last ``\boxed{...}`` whose braces close."""
    for start in reversed([found.start() for found in re.finditer(r"\\boxed\{", text)]):
        depth = 0
        for brace in re.finditer("[{}]", text[start:]):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[start : start + brace.end()]
    return None


def _marked(reference: str) -> str:
    """Put a bare expression into a box, so that it is read as LaTeX."""
    reference = reference.replace("\\$", "")
    is_marked = "\\boxed" in reference or "$" in reference
    return reference if is_marked else f"\\boxed{{{reference}}}"


class Countdown(Judge):
    r"""The last ``\boxed{(3 + 4) * 5}`` of the response uses each number of the row's column
    `input` ("3,4,5") once and comes to its `output`, as the WINO papers pose Countdown. As in the
    official code, an equals sign and what follows it is ignored."""

    name: ClassVar[str] = "countdown"
    columns: ClassVar[set[str]] = {"input", "output"}

    def right(self, problem: Problem, text: str) -> bool:
        numbers, target = _countdown(problem)
        _, box, after = text.rpartition("\\boxed{")
        expression = after.partition("}")[0].partition("=")[0]
        for latex, sign in {r"\times": "*", r"\cdot": "*", r"\div": "/"}.items():
            expression = expression.replace(latex, sign)
        used = sorted(map(int, re.findall("[0-9]+", expression[: _LONGEST + 1])))
        if not box or len(expression) > _LONGEST or used != numbers:
            return False
        try:
            return _arithmetic(ast.parse(expression.strip(), mode="eval").body) == target
        except (SyntaxError, ValueError, ZeroDivisionError):
            return False

    def check(self, problem: Problem) -> None:
        try:
            _countdown(problem)
        except (KeyError, ValueError) as error:
            raise BadRecord("expected whole numbers as input (3,4,5) and output (35)") from error


_LONGEST = 200  # characters of an expression
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
              ast.Div: operator.truediv}  # fmt: skip


def _countdown(problem: Problem) -> tuple[list[int], int]:
    row = problem.row
    return sorted(map(int, str(row["input"]).split(","))), int(row["output"])


def _arithmetic(node: ast.expr) -> Fraction:
    """Evaluate exactly. Raises ValueError for anything but whole numbers and + - * /."""
    match node:
        case ast.Constant(value=value) if type(value) is int:
            return Fraction(value)
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            found: Fraction = _OPERATORS[type(op)](_arithmetic(left), _arithmetic(right))
            return found
    raise ValueError("no arithmetic")


class Python(Judge):
    """The program passes the tests: both are templates of the row, and the program of `response`
    too. HumanEval: ``program: "{{ prompt }}{{ response }}"``, ``tests: "{{ test }}\\n
    check({{ entry_point }})"``. MBPP: ``tests: "{{ test_list | join('\\n') }}"``. Only with
    `--allow-code-execution` (`d2f.tasks.sandbox` says what holds the code back)."""

    name: ClassVar[str] = "python"
    program: Text = "{{ response }}"
    """Code that is loaded first."""
    tests: Annotated[str, Field(min_length=1, max_length=10_000)]
    """Code that runs then; it passes if nothing is raised."""
    fenced: Switch = True
    """Take a Markdown block of code where the response has one: the last one that defines what the
    tests call."""
    seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """Time limit of a program with its tests."""
    memory_mb: Annotated[int, Field(ge=64, le=2**20)] = 1024
    """Memory of its processes together."""
    _unsafe: bool = PrivateAttr(default=False)

    @field_validator("program", "tests")
    @classmethod
    def _readable(cls, template: str) -> str:
        columns_of(template)
        return template

    def right(self, problem: Problem, text: str) -> bool:
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which no program has
            return False
        tests = render(self.tests, problem.row)
        programs = [
            render(self.program, {**problem.row, "response": response})
            for response in (_codes(text, tests) if self.fenced else [text])
        ]
        program = next(filter(_parses, programs), programs[0])
        limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb)
        return passes(program, tests, limits, unsafe=self._unsafe)

    def check(self, problem: Problem) -> None:
        render(self.program, {**problem.row, "response": ""})
        render(self.tests, problem.row)

    @property
    def columns(self) -> set[str]:  # type: ignore[override]
        return (columns_of(self.program) | columns_of(self.tests)) - {"response"}

    @property
    def judging_seconds(self) -> float:  # type: ignore[override]
        return self.seconds + 60.0  # its own limit ends a program

    @property
    def notice(self) -> str:  # type: ignore[override]
        return f"the code that the model writes is run here, in {protection(self._unsafe)}"


def _codes(text: str, tests: str) -> list[str]:
    """List the parts of a response that may be the code, the likeliest first.

    The last block that defines what the tests call; what stands before a fence, as a function's
    body does that goes on with prose; the last block; all of it.
    """
    from markdown_it import MarkdownIt

    blocks = [
        token.content
        for token in MarkdownIt().disable("html_block").parse(text)  # <think> would hide a fence
        if token.type == "fence"
        and token.info.lower().split()[:1] in ([], ["python"], ["py"], ["python3"])
    ]
    called = set(re.findall(r"[A-Za-z_]\w*", tests))
    defining = [block for block in reversed(blocks) if _defined(block) & called]
    before = text.split("```")[0]
    return [*defining, *([before] if before.strip() else []), *blocks[::-1], text]


def _defined(program: str) -> set[str]:
    """List the names that a program, perhaps cut off, defines at its top level."""
    found = re.findall(r"^(?:(?:async )?(?:def|class) (\w+)|(\w+)\s*=)", program, re.MULTILINE)
    return {function or variable for function, variable in found}


def _parses(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class Own(Judge):
    """A function of your own says so: it is called as ``function(problem, text, **options)`` with a
    `d2f.tasks.Problem` (its `answer` is the reference, its `row` the row of data) and the response,
    and returns True or False. The files of the module and of the function are part of a run's
    identity, what they import is not."""

    name: ClassVar[str] = "module:function"
    place: str
    function: Callable[..., object]
    options: dict[str, Any]

    @property
    def source(self) -> str:  # type: ignore[override]
        module = self.place.partition(":")[0]
        names = dict.fromkeys((module, getattr(self.function, "__module__", module)))
        files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
        read = b"".join(Path(file).read_bytes() for file in files if file)
        return hashlib.sha256(read).hexdigest()

    def right(self, problem: Problem, text: str) -> bool:
        try:
            verdict = self.function(problem, text, **self.options)
            # A text or a share would count as right, a forgotten return as wrong.
            if verdict not in (True, False):
                raise TypeError(f"expected True or False, got {repr_of(verdict)}")
        except Exception as error:  # theirs to repair, so it ends the command
            raise InputError(
                f"judge {self.place}: raised {type(error).__name__}: {error} for the response "
                f"{text[:60]!r}"
            ) from error
        return bool(verdict)


JUDGES: dict[str, type[Judge]] = {
    judge.name: judge
    for judge in (Exact, Numeric, Choice, Regex, Math, Contains, Countdown, Python)
}
CodeExecution = bool | Literal["unsafe"]
"""May code that a model wrote be run; "unsafe": also where it cannot be kept from the network and
the files."""


def make_judge(
    given: str | dict[str, Any],
    where: str,
    *,
    allow_code_execution: CodeExecution,
    from_file: bool = False,
) -> Judge:
    """Make the judge of a name, or of a mapping of `name` and its options.

    where: said first in errors. allow_code_execution: may it run what a model wrote, or code that
    a task file names? from_file: a task file names it, which may be somebody else's. Raises
    InputError.
    """
    options: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    if name == "d2f.tasks.countdown:reaches":  # as older task files call it
        name = Countdown.name
    if isinstance(name, str) and name.count(":") == 1:
        if from_file and not allow_code_execution:
            raise InputError(
                f"{where}: the judge {name} is code of this file's choice: give "
                "--allow-code-execution if you trust it"
            )
        function = find_attribute(name, f"{where}: judge")
        if not callable(function):
            raise InputError(f"{where}: judge {name}: expected a function, got {repr_of(function)}")
        return Own(place=name, function=function, options=options)
    if name not in JUDGES:
        raise InputError(
            f"{where}: no such judge: {not_one_of(name, JUDGES)}, or a function of your own as "
            "module:function"
        )
    if name == Python.name and not allow_code_execution:
        raise InputError(
            f"{where}: the judge python runs what the model wrote on this machine: give "
            "--allow-code-execution (allow_code_execution: true in a configuration) if that is "
            "meant"
        )
    judge = check(JUDGES[name], options, f"{where}: judge {name}")
    if isinstance(judge, Python):
        judge._unsafe = allow_code_execution == "unsafe"
    return judge
