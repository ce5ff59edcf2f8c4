"""What libraries say of themselves while a training command runs, and nobody can act on."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries() -> None:
    """Leave out transformers' bars of weight loading, the deprecations that PEFT meets in it, and
    bitsandbytes' message that this machine has no GPU. For commands: it holds for the process."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", r"`\w+` is deprecated and will be removed", FutureWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
