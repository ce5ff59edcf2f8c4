"""`DiffusionModel.save`: a folder that `d2f.load` reads back, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from d2f.adapter_base import base_name, fingerprint
from d2f.adapters import save_adapter
from d2f.contract import FILE_NAME
from d2f.errors import InputError
from d2f.files import make_folder, writing_folder
from d2f.model_parts import ModelParts
from d2f.save_tokenizer import CODE
from d2f.save_transformers import save_model
from d2f.weight_files import is_weight_file
from d2f.write_shards import MAX_SHARD_SIZE


def save(model: ModelParts, folder: str | Path, max_shard_size: int | str = MAX_SHARD_SIZE) -> None:
    """See `DiffusionModel.save`."""
    if model.device.type == "meta":
        raise InputError("a model on the meta device has no weights to save")
    if model.adapter is None and model.quantized:
        raise InputError(
            f"{model.quantized} weights cannot be saved: save the model as it is without quantize, "
            "it is quantised again whenever it is loaded"
        )
    if model.adapter is not None and model.path is None:
        raise InputError(
            "the adapter's base is in no folder, so nothing could load the adapter: "
            "save the base first and load it, or merge_adapter()"
        )
    with replaced(Path(folder)) as beside:
        if model.adapter is None:
            # All of it is written, so it belongs to no base any more.
            save_model(
                model,
                beside,
                dtype=model.dtype,
                max_shard_size=max_shard_size,
                base=None,
                base_hash=None,
            )
        else:
            assert model.path is not None
            # The base as it is named here and now: by its hub or bundled name, which another
            # machine finds too, else by its folder.
            contract = dataclasses.replace(
                model.contract,
                base=base_name(model.path) or str(Path(model.path).resolve()),
                base_hash=model.contract.base_hash or fingerprint(model.path),
            )
            named = ModelParts(model.backbone, contract, adapter=model.adapter)
            save_adapter(named, beside)


@contextlib.contextmanager
def replaced(place: Path) -> Iterator[Path]:
    """An empty folder beside `place`, to be filled in the body, that takes its place afterwards.

    Raises InputError where `place` is there and is neither empty nor a model of the same files, so
    that no file is removed that is not written again. Raises OutputError where it cannot be
    written.
    """
    place = place.resolve()
    if place.exists() and not place.is_dir():
        raise InputError(f"{place}: expected a folder to save to, this is a file")
    # Before anything is written. What else a save holds is known only once it is: the check below
    # raises within `writing_folder`, which then leaves the place as it was.
    there = _names(place)
    if there and FILE_NAME not in there:
        raise InputError(
            f"{place} holds {_some(there)}: expected an empty folder, or a saved model"
        )
    make_folder(place.parent)
    with writing_folder(place) as new:
        yield new
        # Ours, and not beside every model: a tokenizer's code, and weights in other files.
        others = {name for name in _names(place) - _names(new) if not is_weight_file(name)}
        others -= {CODE.name}
        if others:
            raise InputError(f"{place} holds {_some(others)}, which a saved model does not have")


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + f" and {len(names) - 3} more" * (len(names) > 3)
