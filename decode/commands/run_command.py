"""The end of a command: what went wrong is a line on standard error and an exit status."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

from d2f.errors import InputError, NonFiniteLogitsError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

Arguments = ParamSpec("Arguments")


def command(
    *bad_input: type[Exception], interrupted: str
) -> Callable[[Callable[Arguments, int | None]], Callable[Arguments, int]]:
    """Makes a command's main of what does its work, which may return an exit status of its own.

    InputError, OutputError with it, and the errors of `bad_input` are 2, logits that are not finite
    are 1, Ctrl-C is 130 and says `interrupted`; a reader of standard output who left is 1 without
    a word.
    """

    bad: tuple[type[Exception], ...] = (InputError, *bad_input)

    def decorate(work: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
        @functools.wraps(work)
        def main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            try:
                return work(*args, **kwargs) or DONE
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return FAILED
            except bad as error:
                return say(f"error: {error}", BAD_INPUT)
            except NonFiniteLogitsError as error:
                return say(f"error: {error}", FAILED)
            except KeyboardInterrupt:
                return say(interrupted, INTERRUPTED)

        return main

    return decorate


def say(message: str, status: int = DONE) -> int:
    """A message on standard error; the exit status given."""
    print(message, file=sys.stderr, flush=True)
    return status
