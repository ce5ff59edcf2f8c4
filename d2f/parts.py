"""What a checkpoint holds of a model. What is computed with it is in `d2f.model`, which builds on
this; what saves and adapts a model needs no more."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

import torch

from d2f.contract import Contract
from d2f.families import FAMILIES

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(eq=False, repr=False)
class ModelParts:
    """The parts of a loaded model.

    backbone: the transformers model, of which PEFT replaces layers where there is an adapter.
    contract: how its logits are to be read. tokenizer: None where the checkpoint has none. adapter:
    the PEFT model around the backbone, or None. path: the folder that it was loaded from, None for
    a model made in memory. tensor_parallel: how many processes have a part of the backbone each.
    """

    backbone: PreTrainedModel
    contract: Contract
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    adapter: PeftModel | None = None
    path: str | None = None
    tensor_parallel: int = 1

    @property
    def family(self) -> str:
        """Name of the family in `d2f.families.FAMILIES`."""
        return self.contract.family

    @property
    def mask_id(self) -> int | None:
        return self.contract.mask_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.contract.end_ids

    @property
    def logit_shift(self) -> int:
        """1 where row p-1 predicts position p, else 0."""
        return self.contract.logit_shift

    @property
    def vocab_size(self) -> int:
        return self.backbone.config.vocab_size

    @property
    def context_length(self) -> int:
        """Positions that the model was built for."""
        return self.backbone.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.dtype

    @property
    def quantized(self) -> str | None:
        """How its weights are quantised (`d2f.quantize.QUANTISATIONS`), None where they are not."""
        return getattr(self.backbone, "quantized", None)

    @property
    def precision(self) -> str:
        """As ``float32``, or with quantised weights as ``float32 int8-weight``."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.quantized}" if self.quantized else dtype

    @property
    def is_diffusion(self) -> bool:
        """Whether the family predicts masked positions (all but plain causal models)."""
        return FAMILIES[self.family].needs_mask
