"""Keep other libraries' notices and bars from users unless they ask for them.

Importing this imports none of those libraries and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

# Libraries' loggers; that of torch speaks when torchao is imported.
_LOUD = (
    "bitsandbytes",
    "transformers",
    "torchao",
    "accelerate",
    "peft",
    "torch.utils._pytree",
)


@contextlib.contextmanager
def quiet(verbose: bool = False) -> Iterator[None]:
    """Show only errors of other libraries: no notices, no FutureWarning or DeprecationWarning, no
    bars while weights are read; downloads have a bar in a terminal. This project's own warnings
    stay. verbose: change nothing."""
    if verbose:
        yield
        return
    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        import transformers.utils.logging  # noqa: F401  (it sets its own level when first imported)

        for logger in map(logging.getLogger, _LOUD):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        with loading_bars(False, downloads=sys.stderr.isatty()):
            yield


@contextlib.contextmanager
def loading_bars(weights: bool, downloads: bool | None = None) -> Iterator[None]:
    """Show or hide transformers' bars while it reads weights, and the hub's for downloads (None:
    as they were)."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils.logging import is_progress_bar_enabled

    before = is_progress_bar_enabled(), not are_progress_bars_disabled()
    _show_bars(weights, before[1] if downloads is None else downloads)
    try:
        yield
    finally:
        _show_bars(*before)


def _show_bars(weights: bool, downloads: bool) -> None:
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    (enable_progress_bar if weights else disable_progress_bar)()  # sets those of downloads, too
    (enable_progress_bars if downloads else disable_progress_bars)()


# Standard output and error that nobody reads any more: a pipe whose reader left, a lost terminal,
# a full disk, a closed stream. What has files for its results goes on without them.


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
