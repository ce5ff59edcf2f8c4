"""Problems of tasks as prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task
from decode.commands.run_command import say
from decode.decoders import Decoder
from decode.engine.prompts import check, encode


def draw_problems(
    task: Task, split: str, count: int | None, seed: int = 0, option: str = "--problems"
) -> list[Problem]:
    """`count` problems of a split, None for all. Raises InputError, naming the option that they
    were asked for with, for more than there are."""
    try:
        return task.problems(split, count, seed)
    except InputError:
        raise  # of the data, or of the split
    except ValueError as error:
        raise InputError(f"{option} {count}: {error}") from error


def give_notices(tasks: Iterable[Task]) -> None:
    """Say on standard error what a user should know before anything is judged."""
    for task in tasks:
        if task.notice is not None:
            say(f"notice: {task.notice}")


def encode_problems(
    model: DiffusionModel, problems: Sequence[Problem], decoder: Decoder, of: str = ""
) -> list[list[int]]:
    """The prompts' ids; no weights are needed for it. of: said after a problem's number. Raises
    InputError for the first that the decoder cannot decode."""
    found = []
    for number, problem in enumerate(problems, 1):
        where = f"{problem.task} {number}{of}"
        found.append(encode(model, problem.prompt, where, raw=True))
        check(model, found[-1], decoder, where)
    return found
