"""The end of a command: what went wrong is a line on standard error and an exit status."""

from __future__ import annotations

import errno
import functools
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeGuard

from d2f.errors import InputError, NonFiniteLogitsError, RankError
from d2f.out_of_memory import out_of_memory
from d2f.rank_number import rank
from d2f.unread_output import drop, unread_output

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EIO)  # of standard output, where no file is named
SECONDS_TO_SPEAK = 60.0  # that the other ranks leave the first one to say what is wrong

Arguments = ParamSpec("Arguments")


def command(
    *bad_input: type[Exception], interrupted: str, goes_on_unread: bool = False
) -> Callable[[Callable[Arguments, int | None]], Callable[Arguments, int]]:
    """Makes a command's main of what does its work, which may return an exit status of its own.

    InputError, OutputError with it, and the errors of `bad_input` are 2, logits that are not
    finite, a rank that has ended and too little memory are 1, Ctrl-C is 130 and says
    `interrupted`. A reader of standard output who left is 1 without a word, a full disk there 1
    with one; goes_on_unread: they end nothing, since what the command makes is files. Of several
    ranks the first speaks for all.
    """

    bad: tuple[type[Exception], ...] = (InputError, *bad_input)
    caught: tuple[type[Exception], ...] = (OSError, *bad)

    def decorate(work: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
        @functools.wraps(work)
        def main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            try:
                with unread_output(goes_on=goes_on_unread):
                    status = work(*args, **kwargs) or DONE
                    sys.stdout.flush()  # at Python's end it would be a traceback
                    return status
            except caught as error:
                if _is_of_standard_output(error):
                    return _end_of_output(error)
                if not isinstance(error, bad):
                    raise
                if rank() > 0:  # the first rank says it: torchrun ends all when one has ended
                    time.sleep(SECONDS_TO_SPEAK)
                return say(f"error: {error}", BAD_INPUT)
            except (NonFiniteLogitsError, RankError) as error:
                return say(f"error: {error}", FAILED)
            except KeyboardInterrupt:
                return say(interrupted, INTERRUPTED)
            except Exception as error:
                said = out_of_memory(error)
                if said is None:
                    raise
                return say(f"error: {said}", FAILED)

        return main

    return decorate


def _is_of_standard_output(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.filename is None and error.errno in UNWRITABLE


def _end_of_output(error: OSError) -> int:
    drop(sys.stdout)
    if error.errno == errno.EPIPE:
        return FAILED
    return say(f"error: standard output: {error.strerror}", FAILED)


def say(message: str, status: int = DONE) -> int:
    """A message on standard error; the exit status given."""
    print(message, file=sys.stderr, flush=True)
    return status
