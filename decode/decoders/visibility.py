"""What a position of a request sees, by the mask that its model was trained under."""

from __future__ import annotations

from typing import Literal

import numpy as np

from d2f.contract import Contract
from d2f.span_makers import block_ends
from decode.engine.step import Ints

MaskKind = Literal["bidirectional", "block-causal", "absolute block-causal", "causal"]

SDAR_BLOCK_SIZE = 4


def mask_kind(contract: Contract) -> MaskKind:
    """The mask that a model of this contract decodes under. Block-causal blocks begin at the
    prompt's end, absolute ones at position 0."""
    # A D2F student's mask is that of its training, whatever its family's.
    if contract.objective == "d2f" and contract.block_size is not None:
        return "block-causal"
    # SDAR, TraDo: the prompt is cut into blocks too.
    if contract.prompt_rule == "block_causal":
        return "absolute block-causal"
    return "causal" if contract.prompt_rule == "causal" else "bidirectional"


def visible_ends(length: int, prompt_length: int, contract: Contract) -> Ints:
    """Where what each position sees ends, int64 ``[length]``: position p sees ``[0, ends[p])``."""
    kind = mask_kind(contract)
    if kind == "causal":
        return np.arange(1, length + 1)
    if kind == "bidirectional":
        return np.full(length, length, dtype=np.int64)
    if kind == "block-causal":
        assert contract.block_size is not None
        return block_ends(length, prompt_length, contract.block_size)
    return block_ends(length, 0, contract.block_size or SDAR_BLOCK_SIZE)
