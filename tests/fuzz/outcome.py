"""What a fuzzer counts as a failure, and how long it looks.

To add a fuzzer, write ``tests/fuzz/test_fuzz_NAME.py``: a hypothesis strategy for the input, and

    @budget()
    @given(inputs())
    def test_any_input_is_taken_or_refused(value):
        attempt(lambda: read(value))

`attempt` gives what the call gave, or None where it refused in the project's own way. A failure is
any other exception, a call that takes longer than its limit, and with ``nonsense=True`` a call that
accepts: say so where the input is from a list of values that nobody can mean. Keep what one example
does under a few hundredths of a second; ``budget(share)`` with a share below 1 is for slower ones.

``D2F_FUZZ_EXAMPLES`` is how many examples a share of 1 is (default 60: all of tests/fuzz is to take
about a minute). Draws repeat from run to run unless ``D2F_FUZZ_SEED`` gives a seed;
``random`` draws one, and the run ends by saying which (`make fuzz`).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, seed, settings

from d2f.errors import CompileError, InputError, NonFiniteLogitsError

OWN = (InputError, CompileError, NonFiniteLogitsError)  # a CheckpointError is an InputError
SECONDS = 20.0  # far above what any input should take on a slow machine
LONGEST = 2000  # characters that an error may have
T = TypeVar("T")
OUTCOMES: Counter[str] = Counter()  # of the attempts of the running test: taken, refused


class Failure(AssertionError):
    """An outcome that is neither a result nor an error of this project's own."""


class _Hang(BaseException):
    """Raised in the main thread when the time is over; no `except Exception` swallows it."""


def budget(share: float = 1.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a hypothesis test with the number of examples and the seed of this run."""
    examples = max(1, int(share * int(os.environ.get("D2F_FUZZ_EXAMPLES", "60"))))
    given_seed = os.environ.get("D2F_FUZZ_SEED")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        test = settings(
            max_examples=examples,
            derandomize=given_seed is None,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],  # to shrink a slow example takes minutes
            suppress_health_check=list(HealthCheck),
        )(test)
        return test if given_seed is None else seed(int(given_seed))(test)

    return decorate


def attempt(call: Callable[[], T], *, seconds: float = SECONDS, nonsense: bool = False) -> T | None:
    """The result of a call, None where it refused with an error of this project's own: one line
    that can be printed, raised, or printed by a command that ends with it.

    Raises Failure for anything else."""
    said = io.StringIO()
    try:
        with _limit(seconds), contextlib.redirect_stderr(said):
            result = call()
    except OWN as error:
        return _refused(str(error))
    except SystemExit as end:
        if end.code in (0, None):
            OUTCOMES["taken"] += 1
            return None
        return _refused(end.code if isinstance(end.code, str) else said.getvalue(), "error: ")
    except _Hang as error:
        raise Failure(f"a hang: more than {seconds:g} s") from error
    except Exception as error:
        raise Failure(f"a traceback: {type(error).__name__}: {error!s:.300}") from error
    if nonsense:
        raise Failure(f"nonsense was accepted: {result!r:.300}")
    OUTCOMES["taken"] += 1
    return result


def _refused(text: str, mark: str = "") -> None:
    OUTCOMES["refused"] += 1
    lines = text.strip().splitlines()
    if not lines or mark not in lines[-1]:
        raise Failure(f"an error that says nothing: expected {mark!r}, got {text!r:.300}")
    if not mark and len(lines) > 1:
        raise Failure(f"an error of {len(lines)} lines: {text!r:.300}")
    if len(lines[-1]) > LONGEST:
        raise Failure(f"an error of {len(lines[-1])} characters: {text!r:.300}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Failure(f"an error that cannot be printed: {text!r:.300}") from error


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Interrupt what runs too long, where the interpreter is reached again."""

    def over(signum: int, frame: Any) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
