"""Writing a model's weights: what is not finite is not written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from d2f.errors import CheckpointError


def weights_of(backbone: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """A model's weights by transformers' names, on the CPU in `dtype`; output weights that are the
    embeddings are left out."""
    tied = backbone.config.tie_word_embeddings
    return {
        name: value.detach().to("cpu", dtype).contiguous()
        for name, value in backbone.state_dict().items()
        # One tensor under two names, which safetensors does not write; loading ties them again.
        if not (tied and name == "lm_head.weight")
    }


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name as safetensors. Raises CheckpointError, before anything is written, for
    values that are not finite, as training gone wrong leaves them or a dtype without room."""
    # In the dtype that is written: what fp32 holds may be infinity in fp16.
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{path}: expected finite weights, got NaN or infinity in {len(broken)} of "
            f"{len(weights)} tensors in {dtype}, first {broken[0]}; nothing was written"
        )
    save_file(dict(weights), path, metadata={"format": "pt"})
