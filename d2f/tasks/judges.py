"""Judges by name: what says whether a response solves a problem of a file or data set."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from d2f.config import Section, Switch, Text, check
from d2f.data import BadRecord
from d2f.errors import InputError, repr_of
from d2f.tasks.execution.run_tests import Limits, passes, protection
from d2f.tasks.problem import Problem, columns_of, render

# What every judge is: options that are checked, and a verdict on a response.


class Judge(Section):
    """Says whether a response solves a problem. Its fields are its options in a task file."""

    name: ClassVar[str]

    @abstractmethod
    def right(self, problem: Problem, text: str) -> bool:
        """Whether text, a decoded response, solves the problem. No text makes it raise."""

    def answer(self, text: str) -> str | None:
        """What a response answers, so that equal answers of several responses can be counted (the
        majority vote); None where it has no answer, or none that could be compared."""
        return None

    def check(self, problem: Problem) -> None:
        """Raise BadRecord for a problem that no response could solve."""

    @property
    def columns(self) -> set[str]:
        """Columns of the data that it reads."""
        return set()

    @property
    def judging_seconds(self) -> float | None:
        """As `d2f.tasks.Task` has it: a time after which no verdict will come."""
        return None

    @property
    def source(self) -> str:
        """A digest of what decides its verdicts beside its options; empty where that is this
        version of the toolkit."""
        return ""

    @property
    def notice(self) -> str | None:
        """What a user should know before it judges."""
        return None


# The judge `math`: whether two mathematical expressions are equal, by math-verify.


class Math(Judge):
    r"""The expression that the response ends with equals that of the reference: LaTeX in
    ``\boxed{}`` or ``$...$``, or a plain number or formula. Needs math-verify (the extra
    `evaluation`)."""

    name: ClassVar[str] = "math"

    @model_validator(mode="after")
    def _installed(self) -> Math:
        if find_spec("math_verify") is None:
            raise ValueError(
                "the judge math needs math-verify: pip install 'd2f-toolkit[evaluation]'"
            )
        return self

    def right(self, problem: Problem, text: str) -> bool:
        from math_verify import verify

        wanted, found = _parsed(_marked(problem.answer)), _parsed(text)
        return bool(wanted and found and verify(wanted, found))

    def check(self, problem: Problem) -> None:
        if not _parsed(_marked(problem.answer)):
            raise BadRecord(f"the reference is no expression: {problem.answer[-60:]!r}")

    @property
    def judging_seconds(self) -> float:
        """Above math-verify's own limits, 5 s each to read two texts and to compare them, which do
        not end what sympy computes in one long operation."""
        return 60.0

    def answer(self, text: str) -> str | None:
        found = _parsed(text)
        return str(found[0]) if found else None


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # It logs each text that it cannot read, which responses are full of.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return list(parse(text))


def _marked(reference: str) -> str:
    """A reference that is the expression alone as LaTeX that says so."""
    is_marked = "\\boxed" in reference or "$" in reference
    return reference if is_marked else f"\\boxed{{{reference}}}"


# A judge of the user's own: a function at ``module:function``.


class Own(Judge):
    """The function says so, which is called as ``function(problem, text, **options)`` with a
    `d2f.tasks.Problem` (its `answer` is the reference, its `row` the row of data) and the
    response, and returns True or False. The files of the module and of the function are part of a
    run's identity, what they import is not."""

    name: ClassVar[str] = "module:function"
    _place: str = PrivateAttr()
    _function: Callable[..., object] = PrivateAttr()
    _options: dict[str, Any] = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr(default="")

    @classmethod
    def of(cls, place: str, options: Mapping[str, Any]) -> Own:
        """The judge at ``module:function``. Raises InputError."""
        module, _, name = place.partition(":")
        if "" not in sys.path:
            sys.path.append("")  # the working folder, after all that is installed
        try:
            found = getattr(import_module(module), name)
        except Exception as error:  # whatever the module raises
            raise InputError(
                f"judge {place}: cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not callable(found):
            raise InputError(f"judge {place}: expected a function, got {repr_of(found)}")
        judge = cls()
        judge._place, judge._function, judge._options = place, found, dict(options)
        judge._source = _digest(module, found)
        return judge

    @property
    def source(self) -> str:
        return self._source

    def right(self, problem: Problem, text: str) -> bool:
        try:
            verdict = self._function(problem, text, **self._options)
            is_one = verdict in (True, False)
        except Exception as error:  # of the user's own: theirs to repair, so it ends the command
            raise InputError(
                f"judge {self._place}: raised {type(error).__name__}: {error} for the response "
                f"{text[:60]!r}"
            ) from error
        if not is_one:  # a text or a share would count as right, a forgotten return as wrong
            raise InputError(
                f"judge {self._place}: expected True or False, got {repr_of(verdict)} for the "
                f"response {text[:60]!r}"
            )
        return bool(verdict)


def _digest(module: str, function: object) -> str:
    """Of the files that a judge is written in: its module's, and that of the module that its
    function comes from. One without a file (a builtin) has none."""
    names = dict.fromkeys((module, getattr(function, "__module__", module)))
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    found = hashlib.sha256()
    for file in files:
        if file is not None and Path(file).is_file():
            found.update(Path(file).read_bytes())
    return found.hexdigest()


# Judges that compare text: `exact`, `contains`, `regex`.


class Exact(Judge):
    """The response is the reference, but for blanks around it."""

    name: ClassVar[str] = "exact"
    ignore_case: Switch = False
    """Upper and lower case are one."""

    def right(self, problem: Problem, text: str) -> bool:
        return self.answer(text) == self.answer(problem.answer)

    def answer(self, text: str) -> str | None:
        text = text.strip()
        return text.casefold() if self.ignore_case else text


class Contains(Judge):
    """The reference, without blanks around it, is somewhere in the response."""

    name: ClassVar[str] = "contains"
    ignore_case: Switch = False
    """Upper and lower case are one."""

    def right(self, problem: Problem, text: str) -> bool:
        wanted = problem.answer.strip()
        if self.ignore_case:
            return wanted.casefold() in text.casefold()
        return wanted in text


class Regex(Judge):
    """What the pattern finds in the response (its first group, or all of it) is the reference."""

    name: ClassVar[str] = "regex"
    pattern: Text
    """As Python's `re` reads it, with ^ and $ at the ends of lines."""
    take: Literal["first", "last"] = "first"
    """Of several finds."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern, re.MULTILINE)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern[:60]!r} is no regular expression: {error}") from error
        return pattern

    def right(self, problem: Problem, text: str) -> bool:
        return self.answer(text) == problem.answer.strip()

    def answer(self, text: str) -> str | None:
        found = list(re.finditer(self.pattern, text, re.MULTILINE))
        if not found:
            return None
        chosen = found[0 if self.take == "first" else -1]
        value: str | None = chosen[1 if chosen.re.groups else 0]
        return None if value is None else value.strip()


# The judge `python`: runs what the model wrote, and then the problem's own tests.

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


class Python(Judge):
    """The program passes the tests: both are templates of the row, and the program of `response`
    too. HumanEval: ``program: "{{ prompt }}{{ response }}"``, ``tests: "{{ test }}\\n
    check({{ entry_point }})"``. MBPP: ``tests: "{{ test_list | join('\\n') }}"``. Only with
    `--allow-code-execution` (`d2f.tasks.execution` says what holds the code back)."""

    name: ClassVar[str] = "python"
    program: Text = "{{ response }}"
    """What is loaded."""
    tests: Annotated[str, Field(min_length=1, max_length=10_000)]
    """What runs then; it passes if nothing is raised."""
    fenced: Switch = True
    """Take the first block of code between ``` where the response has one."""
    seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """That a program with its tests may take."""
    memory_mb: Annotated[int, Field(ge=64, le=2**20)] = 1024
    """Address space of each of its processes."""

    @field_validator("program", "tests")
    @classmethod
    def _readable(cls, template: str) -> str:
        columns_of(template)
        return template

    def right(self, problem: Problem, text: str) -> bool:
        block = _FENCE.search(text) if self.fenced else None
        row = {**problem.row, "response": block[1] if block else text}
        limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb)
        try:
            row["response"].encode()
        except UnicodeEncodeError:  # half a surrogate pair, which no program has
            return False
        return passes(render(self.program, row), render(self.tests, problem.row), limits)

    def check(self, problem: Problem) -> None:
        render(self.program, {**problem.row, "response": ""})
        render(self.tests, problem.row)

    @property
    def columns(self) -> set[str]:
        return (columns_of(self.program) | columns_of(self.tests)) - {"response"}

    @property
    def judging_seconds(self) -> float:
        """Above its own limit, which ends a program."""
        return self.seconds + 60.0

    @property
    def notice(self) -> str:
        return f"the code that the model writes is run here, in {protection()}"


def refuse_unasked() -> InputError:
    """What a task with this judge is told where it was not asked for."""
    return InputError(
        "the judge python runs what the model wrote on this machine: give "
        "--allow-code-execution (allow_code_execution: true in a configuration) if that is meant"
    )


# Judges that find the answer in a worked response: `numeric`, `choice`.

# 1,234.50 and -$7 and .5; the 3 of 10-3 and of 1.2.3 as they stand, and no digits of other scripts.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)])-\s?)?[$€£]?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


class Numeric(Judge):
    """The number of the response is that of the reference: the first one after ``####`` (as in
    GSM8K's answers), where there is none the last one. Commas and signs of currency do not count:
    ``$1,250.00`` is 1250."""

    name: ClassVar[str] = "numeric"
    tolerance: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """How far the two may lie apart."""

    def right(self, problem: Problem, text: str) -> bool:
        found, wanted = _number(text), _number(problem.answer)
        if found is None or wanted is None:
            return False
        # Without a subtraction, which would round, where none is asked for.
        if not self.tolerance:
            return found == wanted
        return abs(found - wanted) <= Decimal(str(self.tolerance))

    def check(self, problem: Problem) -> None:
        if _number(problem.answer) is None:
            raise BadRecord(f"the reference has no number: {problem.answer[-60:]!r}")

    def answer(self, text: str) -> str | None:
        found = _number(text)
        return None if found is None else str(found.normalize())


def _number(text: str) -> Decimal | None:
    _, marked, after = text.partition("####")
    found = _NUMBER.search(after) if marked else None
    if found is None:
        found = next(reversed(list(_NUMBER.finditer(text))), None)
    if found is None:
        return None
    return Decimal(("-" if found["sign"] else "") + found["digits"].replace(",", ""))


class Choice(Judge):
    """The letter that the response chooses is that of the reference: the last one after "answer"
    or "answer is", else one that the response begins with, else the last one in brackets."""

    name: ClassVar[str] = "choice"
    letters: Annotated[str, Field(pattern="^[A-Z]{2,26}$")] = "ABCD"
    """Those that there are."""

    def right(self, problem: Problem, text: str) -> bool:
        chosen = self.answer(text)
        return chosen is not None and chosen == self.answer(problem.answer)

    def check(self, problem: Problem) -> None:
        if self.answer(problem.answer) is None:
            raise BadRecord(
                f"the reference names none of the letters {self.letters}: {problem.answer[:60]!r}"
            )

    def answer(self, text: str) -> str | None:
        letter = f"([{self.letters}])"
        said = re.findall(rf"[Aa]nswer\s*(?:is)?\s*:?[\s*($]*{letter}(?![A-Za-z])", text)
        begins = re.match(rf"\s*\**{letter}\**\s*(?:[).:,]|\n|$)", text)
        if said:
            return str(said[-1])
        if begins:
            return begins[1]
        bracketed = re.findall(rf"\({letter}\)", text)
        return str(bracketed[-1]) if bracketed else None


JUDGES: dict[str, type[Judge]] = {
    judge.name: judge for judge in (Exact, Numeric, Choice, Regex, Math, Contains, Python)
}


def make_judge(given: str | dict[str, Any], where: str, *, allow_code_execution: bool) -> Judge:
    """The judge of a name, or of a mapping of `name` and its options. where: said first in errors.
    Raises InputError."""
    options: dict[str, Any] = {"name": given} if isinstance(given, str) else dict(given)
    name = options.pop("name", None)
    try:
        if isinstance(name, str) and name.count(":") == 1:
            return Own.of(name, options)
        if name not in JUDGES:
            raise InputError(
                f"judge must be one of {', '.join(JUDGES)}, or a function of your own as "
                f"module:function, got {name!r:.60}"
            )
        if name == Python.name and not allow_code_execution:
            raise refuse_unasked()
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    return check(JUDGES[name], options, f"{where}: judge {name}")
