"""Hold the facts and parts of a model; `d2f.model` computes with them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from d2f.contract import DRAFT, Contract
from d2f.errors import CheckpointError
from d2f.families import FAMILIES

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class _Facts:
    """Read off a contract and a configuration what decoders and trainers ask for."""

    contract: Contract
    config: Any

    @property
    def family(self) -> str:
        return self.contract.family

    @property
    def mask_id(self) -> int | None:
        return self.contract.mask_id

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.contract.end_ids

    @property
    def logit_shift(self) -> int:
        """Return 1 where row p-1 predicts position p, else 0."""
        return self.contract.logit_shift

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        """Return the number of positions that the model was built for."""
        return self.config.max_position_embeddings

    @property
    def is_diffusion(self) -> bool:
        """Say whether the family predicts masked positions (all but plain causal models)."""
        return FAMILIES[self.family].needs_mask


@dataclass(eq=False)
class Outline(_Facts):
    """Describe a checkpoint without its weights (`d2f.loading.describe`); `d2f.load` accepts it.

    config: of transformers. tokenizer: None where the checkpoint has none. path: the folder.
    adapter: name or folder of the adapter that goes onto it. contract: the adapter's, if it has
    one, else the model's. base_contract: the model's without the adapter.
    """

    config: PretrainedConfig
    contract: Contract
    tokenizer: PreTrainedTokenizerBase | None
    path: str
    adapter: str | None
    base_contract: Contract


@dataclass(eq=False, repr=False)
class ModelParts(_Facts):
    """Hold the parts of a loaded model.

    backbone: the transformers model, in which PEFT replaces layers where there is an adapter.
    contract: how to read its logits. tokenizer: None where the checkpoint has none. adapter: the
    PEFT model around the backbone, or None. gate: the rows that it changes, of a self-drafting one;
    None: all. path: the folder that it was loaded from, None for a
    model made in memory. tensor_parallel: how many processes have a part of the backbone each.
    is_merged: an adapter was folded into the weights. threads: of a forward on a CPU.
    """

    backbone: PreTrainedModel
    contract: Contract
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    adapter: PeftModel | None = None
    gate: Gate | None = None
    path: str | None = None
    tensor_parallel: int = 1
    is_merged: bool = False
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def config(self) -> PretrainedConfig:
        return self.backbone.config

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.dtype

    @property
    def is_adapted(self) -> bool:
        """Say whether it has an adapter, beside the weights or merged into them."""
        return self.adapter is not None or self.is_merged

    @property
    def quantized(self) -> str | None:
        """Return the name of its quantisation (`d2f.quantize.QUANTISATIONS`), or None."""
        return getattr(self.backbone, "quantized", None)

    @property
    def precision(self) -> str:
        """Name the dtype, such as ``float32``, or ``float32 int8-weight`` where quantised."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.quantized}" if self.quantized else dtype


class Gate:
    """Let an adapter change some rows of a forward and leave the others to the base, to the bit.

    A self-drafting model (`distill.objectives.self_draft`) feeds rows of two kinds. Clean rows hold
    tokens of the text: the gate takes the adapter's part of them away. Draft rows hold no token
    yet, and the adapter changes them. A draft row is fed as an id that no text can contain
    (`d2f.contract.DRAFT`); its embedding is that of `draft_id`::

        fed         7 8 -1 -1      draft_id 5
        embedded    7 8  5  5
        rows        - -  x  x      where the adapter's part counts

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
