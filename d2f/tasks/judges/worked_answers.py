"""Judges that find the answer in a worked response: `numeric`, `choice`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, ClassVar

from pydantic import Field

from d2f.data_records import BadRecord
from d2f.tasks.judges.judge import Judge
from d2f.tasks.problem import Problem

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
