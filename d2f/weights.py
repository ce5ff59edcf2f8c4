"""Writing a weight file: what is not finite is not written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from d2f.errors import CheckpointError


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors by name as safetensors. Raises CheckpointError, before anything is written, for
    values that are not finite, as training gone wrong leaves them or a dtype without room."""
    broken = [name for name, value in weights.items() if not value.isfinite().all()]
    if broken:
        dtype = str(weights[broken[0]].dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{path}: expected finite weights, got NaN or infinity in {len(broken)} of "
            f"{len(weights)} tensors in {dtype}, first {broken[0]}; nothing was written"
        )
    save_file(dict(weights), path, metadata={"format": "pt"})
