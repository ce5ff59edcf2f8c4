"""Problems of the tiny tasks as prompts."""

from __future__ import annotations

from collections.abc import Sequence

from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import Problem, make_problems
from decode.decoders import Decoder
from decode.engine.prompts import Message, check, encode


def draw_problems(task: str, split: str, count: int, seed: int = 0) -> list[Problem]:
    """`count` distinct problems. Raises InputError, naming --problems, for more than there are."""
    try:
        return make_problems(task, split, count, seed)
    except ValueError as error:
        raise InputError(f"--problems {count}: {error}") from error


def as_chat(problem: Problem) -> list[Message]:
    """The question as a user's message."""
    return [{"role": "user", "content": problem.question}]


def encode_problems(
    model: DiffusionModel, problems: Sequence[Problem], decoder: Decoder, of: str = ""
) -> list[list[int]]:
    """The questions' ids; no weights are needed for it. of: said after a problem's number. Raises
    InputError for the first that the decoder cannot decode."""
    found = []
    for number, problem in enumerate(problems, 1):
        where = f"{problem.task} {number}{of}"
        found.append(encode(model, as_chat(problem), where))
        check(model, found[-1], decoder, where)
    return found
