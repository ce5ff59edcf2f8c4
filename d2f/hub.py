"""Where a checkpoint is: a folder here, or one that the hub has."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from d2f.errors import CheckpointError
from d2f.json_file import read_object
from d2f.models import resolve


def folder_of(place: str, *, weights: bool = True) -> Path:
    """The folder that `place` names, fetched from the hub where it is not one here; without
    `weights` all but the weight files.

    Raises CheckpointError where there is neither.
    """
    try:
        if Path(place).is_dir():
            return Path(place)
        # Formats that are never read here (`d2f.weight_files`) are not worth their download.
        ignored = ["*.bin", "*.pth", "*.gguf", *([] if weights else ["*.safetensors"])]
        return Path(snapshot_download(place, ignore_patterns=ignored))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{place}: no such folder or hub name: {error}") from error


def base_of_adapter(place: str) -> str | None:
    """The base that the adapter in a folder names, None where the folder holds no adapter alone.
    Raises CheckpointError where it names none."""
    path = Path(place) / "adapter_config.json"
    # Beside a model it is no adapter alone: `weight_files` refuses the pair by name.
    if path.with_name("config.json").is_file() or not path.is_file():
        return None
    base = read_object(path, CheckpointError).get("base_model_name_or_path")
    if not isinstance(base, str) or not base or resolve(base) == place:
        raise CheckpointError(f"{path} names no base: give the base as model, and this as adapter")
    return base
