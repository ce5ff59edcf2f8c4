"""Save and find a run's checkpoints, and tell whether a folder holds this run or another one.

A run's folder has ``config.yaml``, its configuration; ``run.json``: ``inputs``, digests of what the
run reads, ``extended``, when it was given more steps, ``finished``, what its end wrote;
``log.jsonl``; and ``checkpoints/step-0000200/state.pt``, the step, the first sample of the next
one, weights, AdamW's state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from d2f.checkpoint import ADAPTER_WEIGHTS, fingerprint, folder_of, read_object
from d2f.config import read_mapping
from d2f.errors import CheckpointError, InputError
from d2f.files import make_folder, write_beside, writing_folder
from d2f.models import resolve
from distill.config import TrainConfig, parse_config
from distill.log import extension_text

STATE = "state.pt"


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> None:
    """Write ``step-N`` under `folder`, whole or not at all, and drop all but the newest `keep`.

    Checkpoints of later steps are dropped too: a run that saves step N began before them, because
    they are damaged. Raises CheckpointError, and leaves what was there, where it cannot be written.
    """
    place = _place(folder, step)
    try:
        folder.mkdir(exist_ok=True)  # alone: a run whose own folder was removed ends
        with writing_folder(place) as beside, (beside / STATE).open("wb") as file:
            torch.save(state, file)
            file.flush()
            # Before the folder gets its name: after a power cut it must not lead to half a file.
            os.fsync(file.fileno())
    except (InputError, OSError, RuntimeError) as error:  # torch gives RuntimeError for a full disk
        kept = f"step {steps(folder)[-1]} is kept" if steps(folder) else "there is none before it"
        raise CheckpointError(
            f"{place}: step {step} could not be written: {error}; {kept}"
        ) from error
    for old in set(steps(folder)) - set([s for s in steps(folder) if s <= step][-keep:]):
        shutil.rmtree(_place(folder, old), ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """List the steps that have a checkpoint, whole or damaged, ascending. Copies and files of other
    names are left alone."""
    found = [path.name for path in folder.glob("step-*") if path.is_dir()]
    return sorted(int(name[5:]) for name in found if re.fullmatch("step-[0-9]{7,}", name))


def newest(folder: Path) -> dict[str, Any] | None:
    """Load the newest whole checkpoint; None where there is none at all.

    A damaged one is named in a warning, and the one before it taken. Raises CheckpointError where
    all are damaged.
    """
    for step in reversed(steps(folder)):
        path = _place(folder, step) / STATE
        try:
            with zipfile.ZipFile(path) as parts:
                if parts.testzip() is not None:  # torch.load compares no CRC-32
                    raise ValueError("it is not what was written")
            # weights_only: a file that someone else wrote runs no code.
            state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
            return {key: state[key] for key in ("step", "sample", "weights", "optimizer")} | state
        except Exception as error:  # what torch raises for a damaged file has no common type
            reason = str(error).strip().split("\n")[0]
            if isinstance(error, pickle.UnpicklingError | KeyError | TypeError):
                reason = (
                    "it is no checkpoint of a training"  # torch's own tells how to run its code
                )
            warnings.warn(f"damaged checkpoint passed over: {path}: {reason}", stacklevel=2)
    if steps(folder):
        raise CheckpointError(
            f"no whole checkpoint to go on from in {folder}: remove it to begin again"
        )
    return None


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


# The keys whose value is a path or a hub name, in any section.
_PATHS = {"file", "states", "loss_file", "dataset", "init", "init_adapter", "tokenizer"}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested sections to dotted keys; lists become text."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if isinstance(value, int | float | None) else str(value)
    return found


def digests(config: TrainConfig) -> dict[str, str]:
    """Return the SHA-256 of what a run trains on by its key. Of the base it is the `fingerprint`,
    since its many gigabytes would be read at every start. What only the hub has is left out."""
    found = {}
    for key, value in flat(config.model_dump(mode="json")).items():
        match key.rpartition(".")[2]:
            case _ if value is None:
                continue
            case "file" | "states" | "loss_file":
                found[key] = file_digest(Path(value))
            case "dataset" if Path(value).is_dir():
                paths = sorted(path for path in Path(value).rglob("*") if path.is_file())
                # Files that `datasets` caches there do not count.
                data = [path for path in paths if not path.name.startswith((".", "cache-"))]
                lines = [f"{path.relative_to(value)}\0{file_digest(path)}\n" for path in data]
                found[key] = hashlib.sha256("".join(lines).encode()).hexdigest()
            case "init":
                found[key] = fingerprint(resolve(value))
            case "init_adapter":
                found[key] = file_digest(folder_of(resolve(value)) / ADAPTER_WEIGHTS)
    return found


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises InputError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


CONFIG, RECORD, LOG = "config.yaml", "run.json", "log.jsonl"
RESULTS = ("model", "adapter", "official", "best")
# Keys that may change while a run is under way. Parts and recomputation give the same sums.
_FREE = {
    "output", "tracker", "wandb_mode", "log_every", "save_every", "keep", "export_official",
    "gradient_accumulation", "gradient_checkpointing", "max_shard_size", "threads",
}  # fmt: skip


class RunFolder:
    """Look at the folder `config.output` before any work; nothing is written until `begin`.

    A run that has come to its end goes on where more steps are asked for. Raises InputError if the
    folder holds another run, or one that was trained on other data: going on from its checkpoints
    would mix the two. A folder without a checkpoint or a result holds none, whatever a run that
    failed early left there.
    """

    def __init__(self, config: TrainConfig):
        self.config, self.place = config, Path(config.output)
        self.checkpoints, self.log = self.place / "checkpoints", self.place / LOG
        self.record: dict[str, Any] = {}
        self.steps_before = config.steps  # of the run that is extended
        there = next(p for p in (self.place, *self.place.absolute().parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise InputError(f"output {self.place}: expected a folder that can be written: {there}")
        if any((self.place / name).exists() for name in RESULTS) or steps(self.checkpoints):
            if (self.place / RECORD).exists():  # a run of an earlier version has none
                self.record = read_object(self.place / RECORD)
            self._refuse_another()

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digests of what the configuration reads now."""
        return digests(self.config)

    @property
    def expected(self) -> list[str]:
        """The folders that the end of the run writes."""
        adapter = ["adapter"] if self.config.trains_adapter else []
        model = ["model"] if self.config.objective.is_merged else []
        return [*adapter, *model, *(["official"] if self.config.export_official else [])]

    @property
    def is_finished(self) -> bool:
        """Tell whether the run has come to its end and all that it was to write is there."""
        return self.record.get("finished") == self.config.steps and all(
            (self.place / name).is_dir() for name in self.expected
        )

    def begin(self, done: int) -> str | None:
        """Write configuration and record of a run that has done so many steps. Return what to say
        where it was given more."""
        self.record.pop("finished", None)
        self.record["inputs"] = self.inputs
        said = None
        if self.config.steps > self.steps_before:
            more = {"step": done, "from": self.steps_before, "to": self.config.steps}
            # An extension that begins again after a kill is reported once.
            others = [one for one in self.record.get("extended", []) if one != more]
            self.record["extended"] = [*others, more]
            said = extension_text(self.config, more)
        make_folder(self.place)
        self._write_record()
        self.config.save(self.place / CONFIG)
        return said

    def finish(self) -> None:
        """Note in the record that the result is written."""
        self.record["finished"] = self.config.steps
        self._write_record()

    def _write_record(self) -> None:
        write_beside(self.place / RECORD, json.dumps(self.record, indent=1) + "\n")

    def _refuse_another(self) -> None:
        try:
            values = read_mapping(self.place / CONFIG)
        except InputError as error:
            raise InputError(
                f"{self.place} holds a run, and {CONFIG} does not say which ({error}): put it back "
                "as it was, or give another output"
            ) from error
        with contextlib.suppress(InputError):  # a key that came since then has its default
            values = parse_config(values, str(self.place)).model_dump(mode="json")
        there, here = flat(values), flat(self.config.model_dump(mode="json"))
        # A checkpoint of its last step says that the run has come to its end.
        if there.get("steps") in steps(self.checkpoints) and self.config.steps > there["steps"]:
            self.steps_before = there["steps"]
            there["steps"] = self.config.steps
        known = self.record.get("inputs", {})
        now = self.inputs if known else {}
        differ = []
        for key in dict.fromkeys([*here, *there]):
            old, new = there.get(key), here.get(key)
            if key in known and key in now:  # whatever path leads to it
                if known[key] != now[key]:
                    digests = f"SHA-256 {known[key][:16]}..., then {now[key][:16]}..."
                    differ.append(f"{key}: {old!r} there, {new!r} now, {digests}")
            elif key not in _FREE and old != new and not _is_same_place(key, old, new):
                differ.append(f"{key}: {old!r} there, {new!r} now")
        if differ:
            longer = there.get("steps") != here["steps"]
            raise InputError(
                f"{self.place} holds another run ({'; '.join(differ)}): expected the same "
                "configuration and data, or another output"
                + "; more steps are for a run that has come to its end"
                * longer
            )


def _is_same_place(key: str, old: Any, new: Any) -> bool:
    is_path = key.rpartition(".")[2] in _PATHS and None not in (old, new)
    return is_path and os.path.realpath(old) == os.path.realpath(new)
