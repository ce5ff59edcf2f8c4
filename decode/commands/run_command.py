"""The end of a command: what went wrong is a line on standard error and an exit status."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import ParamSpec

from d2f.errors import InputError, NonFiniteLogitsError, RankError
from d2f.rank_number import rank

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
SECONDS_TO_SPEAK = 60.0  # that the other ranks leave the first one to say what is wrong

Arguments = ParamSpec("Arguments")


def command(
    *bad_input: type[Exception], interrupted: str
) -> Callable[[Callable[Arguments, int | None]], Callable[Arguments, int]]:
    """Makes a command's main of what does its work, which may return an exit status of its own.

    InputError, OutputError with it, and the errors of `bad_input` are 2, logits that are not finite
    and a rank that has ended are 1, Ctrl-C is 130 and says `interrupted`; a reader of standard
    output who left is 1 without a word. Of several ranks the first speaks for all.
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
                if rank() > 0:  # the first rank says it: torchrun ends all when one has ended
                    time.sleep(SECONDS_TO_SPEAK)
                return say(f"error: {error}", BAD_INPUT)
            except (NonFiniteLogitsError, RankError) as error:
                return say(f"error: {error}", FAILED)
            except KeyboardInterrupt:
                return say(interrupted, INTERRUPTED)

        return main

    return decorate


def say(message: str, status: int = DONE) -> int:
    """A message on standard error; the exit status given."""
    print(message, file=sys.stderr, flush=True)
    return status
