"""Checkpoints of a run: written beside and renamed, so that a killed run leaves whole ones; with a
checksum, so that a damaged one is known and the one before it is used."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from d2f.errors import CheckpointError
from d2f.json_file import parse

STATE, CHECKSUM = "state.pt", "checksum.json"


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write ``step-N`` under `folder` and drop all but the newest `keep` up to it.

    Checkpoints of later steps are dropped too: a run that saves step N began before it, because
    they are damaged. Raises CheckpointError, and leaves what was there, where it cannot be written.
    """
    place = _place(folder, step)
    beside = place.with_suffix(".writing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What a killed run left: neither name is taken for a checkpoint.
        for left in (*folder.glob("*.writing"), *folder.glob("*.dropped")):
            shutil.rmtree(left, ignore_errors=True)
        beside.mkdir()
        # Until the rename the older checkpoints are what a resume finds, after it this one is there
        # whole.
        _write(beside, state)
        if place.exists():
            # A damaged one of the same step: it was passed over, and the step was taken again.
            _drop(place)
        beside.rename(place)
    except (OSError, RuntimeError) as error:  # torch gives RuntimeError for a full disk
        shutil.rmtree(beside, ignore_errors=True)
        kept = f"step {steps(folder)[-1]} is kept" if steps(folder) else "there is none before it"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(
            f"{place}: the checkpoint of step {step} could not be written: {reason}; {kept}, "
            "and the same command goes on from there"
        ) from error
    # Only now that the new one is in place may old ones go.
    present = steps(folder)
    kept_steps = [s for s in present if s <= step][-keep:]
    for old in set(present) - set(kept_steps):
        _drop(_place(folder, old))


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint, whole or damaged, ascending. What is called otherwise than
    `save` calls them (a copy, a file) is none, and is left alone."""
    found = folder.glob("step-*") if folder.is_dir() else []
    numbers = [(path, path.name.removeprefix("step-")) for path in found if path.is_dir()]
    return sorted(
        int(number)
        for path, number in numbers
        if re.fullmatch("[0-9]{7,}", number) and path == _place(folder, int(number))
    )


def newest(folder: Path) -> dict[str, Any] | None:
    """The state of the newest whole checkpoint, None where there is none at all.

    A damaged one is named in a warning, and the one before it taken. Raises CheckpointError where
    all are damaged.
    """
    problems = []
    for step in reversed(steps(folder)):
        place = _place(folder, step)
        problem = damage(place)
        if problem is None:
            # weights_only: a file that someone else wrote runs no code.
            return torch.load(place / STATE, weights_only=True, map_location="cpu")
        problems.append(f"{place}: {problem}")
        warnings.warn(f"damaged checkpoint passed over: {problems[-1]}", stacklevel=2)
    if problems:
        raise CheckpointError(
            f"no whole checkpoint to go on from ({'; '.join(problems)}): "
            f"remove {folder} to begin again"
        )
    return None


def damage(place: Path) -> str | None:
    """What is wrong with a checkpoint's files, None where nothing is."""
    try:
        expected = parse((place / CHECKSUM).read_text(encoding="utf-8"))["sha256"]
        with (place / STATE).open("rb") as file:
            came = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{Path(error.filename or place).name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        return f"{CHECKSUM} is not a checksum"
    return None if came == expected else f"{STATE} is not what was written (sha256)"


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class _Hashing(io.RawIOBase):
    """A file that hashes what is written to it, so that damage on its way to disk shows too."""

    def __init__(self, file: IO[bytes]):
        self.file = file
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _write(folder: Path, state: dict[str, Any]) -> None:
    with (folder / STATE).open("wb") as file:
        hashing = _Hashing(file)
        torch.save(state, hashing)  # type: ignore[arg-type]
        file.flush()
        # On disk before the folder is renamed, else a power cut may leave the name and not the
        # data.
        os.fsync(file.fileno())
    # Last, so that a state that was cut short has none.
    with (folder / CHECKSUM).open("w", encoding="utf-8") as text:
        text.write(json.dumps({"sha256": hashing.digest.hexdigest()}) + "\n")
        text.flush()
        os.fsync(text.fileno())


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def _drop(place: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in between leaves it whole or under
    a name that nobody takes for a checkpoint."""
    dropped = place.with_suffix(".dropped")
    place.rename(dropped)
    shutil.rmtree(dropped, ignore_errors=True)
