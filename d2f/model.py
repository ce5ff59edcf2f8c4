"""A diffusion language model: a transformers model, its contract, and forwards over spans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from d2f.attention import SpanPlan
from d2f.cache import SlotCache
from d2f.device import as_current
from d2f.errors import CompileError, InputError
from d2f.parts import ModelParts
from d2f.saving import MAX_SHARD_SIZE, save

if TYPE_CHECKING:
    from d2f.compile import CompiledRows
    from d2f.cpu import NativeRows


class Fp32Rotary(nn.Module):
    """Compute a model's rotary tables (cos, sin) in fp32 whatever the model's dtype. Type promotion
    then rotates queries and keys in fp32, as LLaDA does (its ``rope_full_precision``); rotated in
    bf16 its logits differ visibly. `SpanPlan.attend` converts them back to the model's dtype."""

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # The rotary module reads only the device and dtype of x; its tables have that dtype.
        return self.rotary(x.new_empty((), dtype=torch.float32), position_ids)


@dataclass(eq=False, repr=False)
class DiffusionModel(ModelParts):
    """Run a transformers model over spans, for decoding and training. Made by `d2f.load`."""

    def __post_init__(self) -> None:
        self.compiled_rows: CompiledRows | NativeRows | None = None
        self.scores_natively = False  # `d2f.cpu.scored` reads its logits
        decoder = self.backbone.model
        # A converted model keeps its backbone, which may be wrapped already.
        if self.contract.rope_fp32 and not isinstance(decoder.rotary_emb, Fp32Rotary):
            decoder.rotary_emb = Fp32Rotary(decoder.rotary_emb)

    def __repr__(self) -> str:
        contract = self.contract
        facts = [
            f"{self.family} in {type(self.backbone).__name__}",
            f"{self.backbone.num_parameters():,} parameters",
            f"{self.precision} on {self.device}",
            f"objective={contract.objective}",
            f"block_size={contract.block_size}",
            f"mask_id={self.mask_id}",
            f"end_ids={self.end_ids}",
            *(["adapter"] if self.adapter is not None else []),
            *(["compiled"] if self.is_compiled else []),
            *([f"in {self.tensor_parallel} parts"] if self.tensor_parallel > 1 else []),
            *(["no tokenizer"] if self.tokenizer is None else []),
        ]
        return f"DiffusionModel({self.path or 'in memory'}: {', '.join(facts)})"

    @property
    def is_compiled(self) -> bool:
        return self.compiled_rows is not None

    def forward(
        self, input_ids: Tensor, spans: Tensor | SpanPlan, positions: Tensor | None = None
    ) -> Tensor:
        """Compute unshifted logits ``[B, L, V]`` of input_ids ``[B, L]``.

        spans: int32 ``[L, K, 2]`` or ``[B, L, K, 2]``; positions default to ``0..L-1``.
        """
        return self.head(self.hidden(input_ids, spans, positions))

    def hidden(
        self, input_ids: Tensor, spans: Tensor | SpanPlan, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the last hidden states ``[B, L, C]``, which `head` reads."""
        if isinstance(spans, Tensor):
            spans = SpanPlan(spans.to(input_ids.device))
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # [1, L]
        # The model without its head: in training only the masked rows meet the vocabulary.
        with as_current(self.device):
            return self.backbone.model(
                input_ids=input_ids, position_ids=positions, spans=spans, use_cache=False
            ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits ``[..., V]`` of hidden states ``[..., C]``."""
        return self.backbone.lm_head(hidden)

    def decode_rows(
        self, tokens: Tensor, positions: Tensor, plan: SpanPlan, cache: SlotCache, read: Tensor
    ) -> Tensor:
        """Feed flat rows ``[T]`` through the cache (its `slots` set); return logits ``[N, V]`` of
        the rows `read` ``[N]``."""
        if self.compiled_rows is not None:
            return self.compiled_rows(tokens, positions, plan, cache, read)
        fed = tokens[None] if self.gate is None else self.gate.open(tokens[None])
        # A batch of 1 with all requests in its row; the plan says which slots each row sees.
        hidden = self.backbone.model(
            input_ids=fed,
            position_ids=positions[None],
            spans=plan,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0]
        # Only the rows that are read meet the head, the widest product of a forward.
        return self.head(hidden.index_select(0, read))

    def compile(self) -> None:
        """Compile what `decode_rows` runs, the adapter merged: in C++ where `d2f.cpu` can, else by
        `torch.compile`. The same function to rounding, for any number of rows. Takes some seconds.

        Raises CompileError where `torch.compile` cannot.
        """
        from d2f import cpu
        from d2f.compile import CompiledRows

        if self.is_compiled:
            return
        self.merge_adapter()  # beside the weights it is two more products a layer
        native = cpu.compiled_rows(self.backbone, self.new_cache, self.gate)
        self.compiled_rows, self.scores_natively = native, native is not None
        if native is None and self.gate is not None:
            raise CompileError(
                "a self-drafting model is compiled as one call of C++ on a CPU alone, which this "
                "one cannot be: leave compile out"
            )
        if native is None:
            with as_current(self.device):
                self.compiled_rows = CompiledRows(self.backbone, self.new_cache)

    def new_cache(self, slots: int) -> SlotCache:
        """Make an empty cache of `slots` slots in the model's dtype, on its device."""
        config = self.backbone.config
        heads = config.num_key_value_heads // self.tensor_parallel
        return SlotCache(config, slots, dtype=self.dtype, device=self.device, heads=heads)

    @contextlib.contextmanager
    def adapter_disabled(self) -> Iterator[None]:
        """Switch the adapter off, if there is one: D2F's teacher is the student's own weights with
        the LoRA off, so one copy of them serves both."""
        if self.adapter is None:
            yield
        else:
            with self.adapter.disable_adapter():
                yield

    def save(self, folder: str | Path, *, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
        """Write `folder`, whole or not at all, for `d2f.load` to read.

        It has the config, weights in the model's dtype (safetensors), tokenizer and contract. A
        model with an adapter saves the adapter alone, with the name and hash of its base; call
        `merge_adapter` first to save all in one. max_shard_size: most bytes of a file of weights,
        a number or as ``5GB``.

        Raises InputError for a folder that holds anything but an earlier save, for quantised
        weights, for a bad size, and where it cannot be written.
        """
        save(self, Path(folder), max_shard_size)

    def merge_adapter(self) -> None:
        """Fold the adapter into the weights; a self-drafting one, which changes some rows only,
        stays beside them. Raises InputError where these are quantised: it would be rounded away."""
        if self.adapter is not None and self.gate is None:
            if self.quantized:
                raise InputError(
                    f"an adapter cannot be merged into {self.quantized} weights: expected it with "
                    "the model in d2f.load, which merges before it quantises"
                )
            merged: Any = self.adapter.merge_and_unload()  # in place: W += scale * B A
            self.backbone, self.adapter, self.is_merged = merged, None, True
