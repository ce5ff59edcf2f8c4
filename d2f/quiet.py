"""What other libraries say beside the point (notices at their import, warnings to each other, bars
while weights are read), and how commands keep it from their users unless they ask for it.

Importing this imports none of those libraries and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

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
    """Within it other libraries show errors alone: no notices, no FutureWarning or
    DeprecationWarning, no bars while weights are read; downloads have a bar in a terminal only.
    This project's own warnings and every error stay. verbose: it does nothing. What was set before
    is set again at its end."""
    if verbose:
        yield
        return
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        import transformers.utils.logging  # noqa: F401  (it sets its own level when first imported)

        loggers = [logging.getLogger(name) for name in _LOUD]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            with _bars(weights=False, downloads=sys.stderr.isatty()):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def loading_bars(shown: bool) -> contextlib.AbstractContextManager[None]:
    """Within it transformers shows, or does not show, bars while it reads weights; downloads are
    as they were."""
    return _bars(weights=shown, downloads=None)


@contextlib.contextmanager
def _bars(*, weights: bool, downloads: bool | None) -> Iterator[None]:
    """Within it bars are shown where asked for. downloads: None leaves them as they are."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils.logging import is_progress_bar_enabled

    before = is_progress_bar_enabled(), not are_progress_bars_disabled()
    _show(weights, before[1] if downloads is None else downloads)
    try:
        yield
    finally:
        _show(*before)


def _show(weights: bool, downloads: bool) -> None:
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar

    (enable_progress_bar if weights else disable_progress_bar)()  # sets those of downloads, too
    (enable_progress_bars if downloads else disable_progress_bars)()
