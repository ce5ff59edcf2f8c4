"""Keep other libraries' notices and bars from users unless they ask for them.

Importing this imports none of those libraries and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

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
    """Show only errors of other libraries: no notices, no FutureWarning or DeprecationWarning, and
    bars only in a terminal, of what takes over five seconds. This project's own warnings stay.
    verbose: change nothing."""
    if verbose:
        yield
        return
    live = sys.stderr.isatty()
    with warnings.catch_warnings(), contextlib.ExitStack() as undo:
        for kind in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", kind)
        import transformers.utils.logging  # noqa: F401  (it sets its own level when first imported)
        from tqdm import tqdm

        for logger in map(logging.getLogger, _LOUD):
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        # Some libraries' bars have no switch of their own: the one of GGUF files, say.
        undo.callback(setattr, tqdm, "__init__", tqdm.__init__)
        chosen: dict[str, Any] = {"delay": 5} if live else {"disable": True}
        setattr(tqdm, "__init__", partialmethod(tqdm.__init__, **chosen))  # noqa: B010 (for mypy)
        with loading_bars(live, downloads=live):
            yield


@contextlib.contextmanager
def loading_bars(weights: bool, downloads: bool | None = None) -> Iterator[None]:
    """Show or hide transformers' bars while it reads weights, and the hub's for downloads (None:
    as they were)."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging as transformers

    def show(weights: bool, downloads: bool) -> None:
        # transformers' switch sets that of downloads, too.
        (transformers.enable_progress_bar if weights else transformers.disable_progress_bar)()
        (hub.enable_progress_bars if downloads else hub.disable_progress_bars)()

    before = transformers.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    show(weights, before[1] if downloads is None else downloads)
    try:
        yield
    finally:
        show(*before)
