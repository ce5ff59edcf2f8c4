"""Let an adapter change some rows of a forward and leave the others to the base.

A self-drafting model (`distill.objectives.self_draft`) feeds rows of two kinds. Clean rows hold
tokens of the text: they are the base's, to the bit, as the gate takes the adapter's part of them
away. Draft rows hold no token yet, and the adapter changes them. A draft row is fed as an id that
no text can contain (`d2f.contract.DRAFT`); its embedding is that of `draft_id`.

    fed         7 8 -1 -1      draft_id 5
    embedded    7 8  5  5
    rows        - -  x  x      where the adapter's part counts
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from d2f.contract import DRAFT
from d2f.errors import CheckpointError


class Gate:
    """Keep the adapter's part of draft rows, and take that of other rows away.

    rows: bool ``[B, T]`` of the forward that runs; None leaves the adapter as it is.
    """

    def __init__(self, adapter: nn.Module, draft_id: int):
        """Hook the layers of a LoRA. Raises CheckpointError for an adapter that does more than add
        to its layers' outputs."""
        from peft.tuners.lora import Linear

        self.draft_id = draft_id
        self.rows: Tensor | None = None
        for name, module in adapter.named_modules():
            if not hasattr(module, "lora_B"):
                continue
            if not isinstance(module, Linear) or any(module.use_dora.values()):
                raise CheckpointError(
                    f"{name}: expected a plain LoRA of linear layers, as only what it adds to a "
                    f"row can be left out, got {type(module).__name__}"
                )
            for last in module.lora_B.values():
                last.register_forward_hook(self._of_drafts)

    def open(self, tokens: Tensor) -> Tensor:
        """Take the ids ``[B, T]`` of a forward; returns those to embed."""
        self.rows = tokens == DRAFT
        return torch.where(self.rows, self.draft_id, tokens)

    def _of_drafts(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return out if self.rows is None else out.masked_fill(~self.rows[..., None], 0.0)
