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
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from d2f.checkpoint import ADAPTER_WEIGHTS, folder_of, parse
from d2f.config import read_mapping
from d2f.errors import CheckpointError, InputError
from d2f.files import says_what_is_kept, write_beside
from d2f.models import resolve
from distill.config import TrainConfig, parse_config
from distill.log import extension_text, keep_lines

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


# What a run reads: its paths, which may be spelled in several ways, and digests of their content,
# so that a resume knows whether it is still the same.

_FILES = ("data.file", "objective.noise.states", "evaluation.loss_file")
# Keys whose value is a place. All but the files may be hub names too.
PATHS = (*_FILES, "data.dataset", "init", "init_adapter", "tokenizer")


def same_place(one: str, other: str) -> bool:
    """Whether two spellings (relative, absolute, through a link) are of one file or folder."""
    return os.path.realpath(one) == os.path.realpath(other)


def digests(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of what a run trains on, by its key: of files and saved data sets the content, of the
    base its weights' `fingerprint`. What only the hub has is left out. Raises InputError."""
    from d2f.checkpoint import fingerprint

    found = {}
    for key in _FILES:
        path: Any = config
        for name in key.split("."):
            path = getattr(path, name, None)
        if path is not None:
            found[key] = file_digest(Path(path))
    if config.data.dataset is not None and Path(config.data.dataset).is_dir():
        found["data.dataset"] = _folder_digest(Path(config.data.dataset))
    if config.init is not None:
        # Not a digest of the whole: base weights are many gigabytes, and every start would read
        # them.
        found["init"] = fingerprint(resolve(config.init))
    if config.init_adapter is not None:
        found["init_adapter"] = file_digest(
            folder_of(resolve(config.init_adapter)) / ADAPTER_WEIGHTS
        )
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file, which is read in pieces. Raises InputError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _folder_digest(folder: Path) -> str:
    """Of the names and contents of a data set's files, without what `datasets` caches there."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith((".", "cache-")):
            digest.update(f"{path.relative_to(folder)}\0{file_digest(path)}\n".encode())
    return digest.hexdigest()


# The folder of a run: whether it holds this run, another or none, what the run was trained on, and
# what it has made.
#
# ``config.yaml`` is the resolved configuration, ``run.json`` beside it: ``inputs``, digests of what
# the run reads; ``extended``, when it was given more steps; ``finished``, what its end wrote.

CONFIG, RECORD, LOG = "config.yaml", "run.json", "log.jsonl"
RESULTS = ("model", "adapter", "official", "best")
# Keys that may change while a run is under way. Parts and recomputation give the same sums.
_FREE = {
    "output", "tracker", "wandb_mode", "log_every", "save_every", "keep", "export_official",
    "gradient_accumulation", "gradient_checkpointing", "max_shard_size", "threads",
}  # fmt: skip


class RunFolder:
    """`config.output`, looked at before any work; nothing is written until `begin`.

    extend: whether a run that has come to its end goes on where more steps are asked for. Raises
    InputError if the folder holds another run: going on from its checkpoints would mix the two. A
    folder without a checkpoint or a result holds none, whatever a run that failed early left there.
    """

    def __init__(self, config: TrainConfig, *, extend: bool = True):
        self.config, self.place = config, Path(config.output)
        self.record: dict[str, Any] = {}
        self.steps_there = config.steps
        self._check_place()
        # Only then is there something that another run's steps could be mixed with.
        if self.holds_work:
            self.record = self._read_record()
            self._refuse_another(extend)

    @property
    def holds_work(self) -> bool:
        """Whether a run has kept anything here."""
        made = any((self.place / name).exists() for name in RESULTS)
        return made or bool(steps(self.checkpoints))

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def log(self) -> Path:
        return self.place / LOG

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digests of what the configuration reads now."""
        return digests(self.config)

    @property
    def expected(self) -> list[str]:
        """The folders that the end of the run writes."""
        config = self.config
        adapter = ["adapter"] if config.trains_adapter else []
        return [*adapter, "model", *(["official"] if config.export_official else [])]

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end and all that it was to write is there."""
        said = self.record.get("finished", {})
        return (
            said.get("steps") == self.config.steps
            and set(self.expected) <= set(said.get("folders", ()))
            and all((self.place / name).is_dir() for name in self.expected)
        )

    def _check_place(self) -> None:
        """Raise InputError where no folder can be made or written."""
        there = next(p for p in (self.place, *self.place.absolute().parents) if p.exists())
        if not there.is_dir():
            raise InputError(f"output {self.place}: expected a folder, {there} is a file")
        if not os.access(there, os.W_OK):
            raise InputError(f"output {self.place}: the folder {there} cannot be written")

    def check_inputs(self) -> None:
        """Raise InputError, with both digests, where something that the run reads has changed."""
        changed = self.changed_inputs(self.record.get("inputs", {}))
        if changed:
            raise InputError(
                f"{self.place} holds a run that was trained on something else "
                f"({'; '.join(changed)}): expected what it began with, or another output"
            )

    def changed_inputs(self, inputs: Mapping[str, str]) -> list[str]:
        """What a run with these digests read and this configuration would not: a phrase for each,
        with both digests."""
        return [
            f"{key} had SHA-256 {there[:16]}..., has {self.inputs.get(key, 'none')[:16]}... now"
            for key, there in inputs.items()
            if self.inputs.get(key) != there
        ]

    def differences(self, config: dict[str, Any], inputs: Mapping[str, str]) -> dict[str, str]:
        """In what another run's configuration, with the digests of what it read, is another than
        this: a phrase for each key. Keys that may change under way do not count."""
        theirs, ours = flat(self._up_to_date(config)), flat(self.config.model_dump(mode="json"))
        same = set(_FREE)
        same |= {key for key in ours if theirs.get(key) == ours[key]}
        # Another spelling of a path is the same run if it leads to the same content.
        same |= {key for key in PATHS if self._is_same_input(key, theirs, ours, inputs)}
        return {
            key: f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now"
            for key in dict.fromkeys([*ours, *theirs])
            if key not in same
        }

    def begin(self, done: int) -> str | None:
        """Write the configuration and the record; from the log drop what a killed run wrote after
        step `done`, as those steps come again. What there is to say of more steps."""
        with says_what_is_kept(self.place, "nothing was changed in it"):
            return self._begin(done)

    def _begin(self, done: int) -> str | None:
        self.place.mkdir(parents=True, exist_ok=True)
        config, said = self.config, None
        # A run that goes on is not finished, until `finish` says so again.
        record = {key: value for key, value in self.record.items() if key != "finished"}
        record["inputs"] = self.inputs
        if config.steps > self.steps_there:
            more = {"step": done, "from": self.steps_there, "to": config.steps}
            # The same extension, begun again after a kill, is told once.
            known = [e for e in record.get("extended", []) if e != more]
            record["extended"] = [*known, more]
            said = extension_text(config, more)
        self._write_record(record)
        config.save(self.place / CONFIG)
        keep_lines(self.log, done)
        return said

    def finish(self) -> None:
        """Say in the record that the result is written."""
        done = {"steps": self.config.steps, "folders": self.expected}
        with says_what_is_kept(self.place / RECORD, "the result is written"):
            self._write_record(self.record | {"finished": done})

    def _write_record(self, record: dict[str, Any]) -> None:
        self.record = record
        write_beside(self.place / RECORD, json.dumps(record, indent=1) + "\n")

    def _read_record(self) -> dict[str, Any]:
        """What lies in run.json; runs of earlier versions have none."""
        path = self.place / RECORD
        try:
            found = parse(path.read_text(encoding="utf-8"), nan=True)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}): {_REMEDY}") from error
        if not isinstance(found, dict):
            raise InputError(f"{path} is not the record of a run: {_REMEDY}")
        return found

    def _read_config(self) -> dict[str, Any]:
        path = self.place / CONFIG
        try:
            return read_mapping(path)
        except InputError as error:
            why = "missing" if not path.exists() else "no mapping of keys"
            raise InputError(
                f"{self.place} holds checkpoints or a result, but its {CONFIG}, which says of "
                f"which run, is {why}: {_REMEDY}"
            ) from error

    def _up_to_date(self, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration of an earlier version as it would be written now."""
        try:  # a key that came since then has its default
            return parse_config(config, str(self.place)).model_dump(mode="json")
        except InputError:
            return config

    def _refuse_another(self, extend: bool) -> None:
        theirs = self._read_config()
        differ = self.differences(theirs, self.record.get("inputs", {}))
        their_steps = theirs.get("steps")
        # A checkpoint of its last step says that the run has come to its end.
        ended = their_steps in steps(self.checkpoints)
        if extend and ended and isinstance(their_steps, int) and self.config.steps > their_steps:
            self.steps_there = their_steps
            differ.pop("steps", None)
        if differ:
            more = "; more steps are for a run that has come to its end" * ("steps" in differ)
            raise InputError(
                f"{self.place} holds another run ({'; '.join(differ.values())}): "
                f"expected the same configuration, or another output{more}"
            )

    def _is_same_input(
        self, key: str, theirs: dict[str, Any], ours: dict[str, Any], inputs: Mapping[str, str]
    ) -> bool:
        """Whether a path, however it is spelled, leads to what the run began with."""
        there, here = theirs.get(key), ours.get(key)
        # `flat` has made text of None.
        if there == here or {there, here} & {None, "None"}:  # not given
            return there == here
        known = inputs.get(key)
        same = known is not None and self.inputs.get(key) == known
        return same or same_place(str(there), str(here))


_REMEDY = "put it back as it was, or give another output"


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys, lists as text."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, int | float) else str(value)
    return found
