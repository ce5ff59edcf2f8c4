"""Spans made on the host, in numpy: the one place where a decoder's step and a training mask get
theirs (`d2f.spans` has the latter as tensors). Importing it does not import torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def block_ends(length: int, prompt_length: int, block_size: int) -> Ints:
    """End of each position's D2F block, ``[length]``: the prompt is block 0, then blocks of
    `block_size` from the prompt's end, the last one possibly short (D2F, section 3)::

        block_ends(9, prompt_length=2, block_size=4)

        position    0 1 | 2 3 4 5 | 6 7 8
        end         2 2 | 6 6 6 6 | 9 9 9
    """
    at_least(1, block_size=block_size)
    if not 0 <= prompt_length <= length:
        raise ValueError(f"prompt_length must lie in [0, {length}], got {prompt_length}")
    position = np.arange(length)
    after = position - prompt_length
    ends = np.minimum(prompt_length + (after // block_size + 1) * block_size, length)
    return np.where(after < 0, prompt_length, ends)


def at_least(least: int, **values: int) -> None:
    """Raise ValueError, which names the value, for one below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
