"""Errors that a user can act on. Each says what was expected and what came."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator

LONGEST = 1500  # characters of an error


class InputError(ValueError):
    """A prompt, option or file that the toolkit cannot work with. Its message quotes what came and
    is kept to one printable line."""

    def __init__(self, message: object):
        super().__init__(brief(str(message)))


class CheckpointError(InputError):
    """A checkpoint or adapter that does not fit: weights missing, unexpected, misshapen, damaged,
    or made for another base."""


class OutputError(InputError):
    """A file or folder that could not be written; says what became of what was there."""


class CompileError(InputError):
    """The model cannot be compiled here."""


class RequestError(RuntimeError):
    """Report that a request failed while it was decoded; others go on. `__cause__` says why."""


class NonFiniteLogitsError(RequestError):
    """The model gave NaN or infinite logits; no token was chosen from them."""


class QueueFullError(RuntimeError):
    """A request was refused because too many wait already: `waiting` of them."""

    def __init__(self, waiting: int):
        super().__init__(f"the queue is full: {waiting} requests wait, which is the most that may")
        self.waiting = waiting


class EngineClosedError(RuntimeError):
    """A request met an engine that is closed, or was closed while it ran; what the engine failed of
    is the cause, where it did."""


class RankError(RuntimeError):
    """Report which of the processes that hold a model together failed or ended, and why: the others
    cannot go on without it."""


class UnverifiedBaseWarning(UserWarning):
    """An adapter was put on a base that may not be its own: neither a hash nor a name tells."""


class SupposedWarning(UserWarning):
    """A checkpoint leaves something open, such as its mask id, for which a default was taken."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest known name, whatever its case; "" where none is
    near."""
    names = {one.lower(): one for one in known}
    given = name[:100].lower() if isinstance(name, str) else ""
    found = difflib.get_close_matches(given, names, n=1)
    return f"; did you mean {names[found[0]]}?" if found else ""


def not_one_of(value: object, known: Iterable[str]) -> str:
    """Say what came and what was expected: the nearest name before the list of all."""
    known = list(known)
    return f"got {repr_of(value)}{did_you_mean(value, known)}; expected one of {', '.join(known)}"


def brief(text: str) -> str:
    """Put a text on one line, and leave out its middle where it is too long to read."""
    if len(text) > 2 * LONGEST:
        text = text[:LONGEST] + text[-LONGEST:]
    line = one_line(text)
    if len(line) <= LONGEST:
        return line
    return f"{line[: 2 * LONGEST // 3]} ... {line[-LONGEST // 4 :]}"


def one_line(text: str) -> str:
    """Write out what is no printable character: a line break, an escape sequence to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def repr_of(value: object) -> str:
    """Quote the beginning of a value for an error."""
    return f"{value!r:.60}"


# On a CPU torch raises a plain RuntimeError.
_OF_A_CPU = re.compile(r"DefaultCPUAllocator: (can't allocate memory: [^\n]*?bytes)")


def out_of_memory(error: BaseException) -> str | None:
    """Say what was out of memory; None where the error is another one."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
        return f"out of memory: {str(error).splitlines()[0]}"
    found = _OF_A_CPU.search(str(error)) if isinstance(error, RuntimeError) else None
    return f"out of memory: {found[1]}" if found else None


class RustPanicError(RuntimeError):
    """The tokenizer panicked in Rust, which ends one request."""


@contextlib.contextmanager
def panics_are_errors() -> Iterator[None]:
    """Raise a panic of the tokenizer, which is no `Exception`, as RustPanicError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RustPanicError(f"the tokenizer failed: {error}") from error
