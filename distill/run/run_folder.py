"""The folder of a run: whether it holds this run, another or none, what the run was trained on, and
what it has made.

``config.yaml`` is the resolved configuration, ``run.json`` beside it: ``inputs``, digests of what
the run reads; ``extended``, when it was given more steps; ``finished``, what its end wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

from d2f.configuration import read_mapping
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.json_file import parse
from d2f.write_errors import says_what_is_kept
from distill.config import TrainConfig, parse_config
from distill.run import checkpoint, identity
from distill.run.log import keep_lines
from distill.run.progress import extension_text
from distill.unread_keys import unread

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
        return made or bool(checkpoint.steps(self.checkpoints))

    @property
    def checkpoints(self) -> Path:
        return self.place / "checkpoints"

    @property
    def log(self) -> Path:
        return self.place / LOG

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digests of what the configuration reads now."""
        return identity.digests(self.config)

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
        same = _FREE | unread(self.config).keys()
        same |= {key for key in ours if theirs.get(key) == ours[key]}
        # Another spelling of a path is the same run if it leads to the same content.
        same |= {key for key in identity.PATHS if self._is_same_input(key, theirs, ours, inputs)}
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
        there = deepcopy(config)
        for key in unread(self.config):  # an earlier version took them
            section, _, name = key.rpartition(".")
            inside = there.get(section) if section else there
            if isinstance(inside, dict):
                inside.pop(name, None)
        with contextlib.suppress(InputError):  # a key that came since then has its default
            there = parse_config(there, str(self.place)).model_dump(mode="json")
        return there

    def _refuse_another(self, extend: bool) -> None:
        theirs = self._read_config()
        differ = self.differences(theirs, self.record.get("inputs", {}))
        steps = theirs.get("steps")
        # A checkpoint of its last step says that the run has come to its end.
        ended = steps in checkpoint.steps(self.checkpoints)
        if extend and ended and isinstance(steps, int) and self.config.steps > steps:
            self.steps_there = steps
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
        return same or identity.same_place(str(there), str(here))


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
