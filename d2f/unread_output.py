"""Standard output and error that nobody reads any more: a pipe whose reader left, a lost terminal,
a full disk, a closed stream. What has files for its results goes on without them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def drop(stream: TextIO) -> None:
    """Let what waits in a stream and what comes go nowhere: Python's own flush at its end would
    fail as the last one did."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Lenient:
    """A stream that drops what cannot be written."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        drop(self._stream)
        if not isinstance(error, BrokenPipeError) and self is sys.stdout:
            lost = f"standard output: {error.strerror}: the rest of it is lost"
            print(f"notice: {lost}", file=sys.stderr)


@contextlib.contextmanager
def unread_output(*, goes_on: bool = True) -> Iterator[None]:
    """Within it standard output and error may be closed. goes_on: they may fail, too, and what is
    written there is dropped; of a standard output that fails for another reason than its reader
    standard error has a notice."""
    before = sys.stdout, sys.stderr
    with contextlib.ExitStack() as opened:
        # Also so that no file which is opened later gets the number of a closed stream, into which
        # a library may write.
        sys.stdout, sys.stderr = (
            stream or opened.enter_context(open(os.devnull, "w", encoding="utf-8"))
            for stream in before
        )
        if goes_on:
            sys.stdout = _Lenient(sys.stdout)
            sys.stderr = _Lenient(sys.stderr)
        try:
            yield
        finally:
            if goes_on:
                sys.stdout.flush()
                sys.stderr.flush()
            sys.stdout, sys.stderr = before
