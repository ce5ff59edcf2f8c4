"""The ledger: a JSONL file of every measurement, so that a run that was cut short goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from d2f.errors import InputError
from d2f.files import GrowingFile, write_beside
from d2f.json_file import parse
from decode.reporting.output_file import NOT_OURS, json_line, refuse_another_run
from decode.reporting.places import check_place
from decode.tuning.measurements import Measurements
from decode.tuning.space import Setting


@dataclass(frozen=True)
class Job:
    """Problems ``[first, stop)`` of a split to decode with a setting, as (option, value) pairs.
    repetition: the same again, for its timing."""

    task: str
    split: Literal["tuning", "heldout"]
    setting: tuple[tuple[str, int | float], ...]
    first: int
    stop: int
    repetition: int = 0


def job(task: str, split: Literal["tuning", "heldout"], setting: Setting, *place: int) -> Job:
    """The job of a setting. place: first, stop and, if not 0, the repetition."""
    return Job(task, split, tuple(sorted(setting.items())), *place)


@dataclass(frozen=True)
class Measurement:
    """A job done. wall: seconds that it took with everything around the decoding."""

    job: Job
    evidence: Measurements
    wall: float

    def to_json(self) -> dict[str, Any]:
        """A line of the ledger; lists have a value a problem."""
        return {
            **asdict(self.job),
            "setting": dict(self.job.setting),
            "wall": self.wall,
            "right": self.evidence.right.astype(int).tolist(),
            "tokens": self.evidence.tokens.tolist(),
            "forwards": self.evidence.forwards.tolist(),
            "seconds": self.evidence.seconds.tolist(),
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> Measurement:
        """The measurement of a line. Raises ValueError."""
        line = _Line.model_validate(values)
        done = job(line.task, line.split, line.setting, line.first, line.stop, line.repetition)
        lists = line.right, line.tokens, line.forwards, line.seconds
        if {len(values) for values in lists} != {done.stop - done.first}:
            raise ValueError("not a value a problem")
        evidence = Measurements(
            np.array(line.right, dtype=bool),
            np.array(line.tokens, dtype=np.int64),
            np.array(line.forwards, dtype=np.int64),
            np.array(line.seconds, dtype=np.float64),
        )
        return Measurement(done, evidence, line.wall)


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Line(BaseModel):
    """A measurement as `Measurement.to_json` writes it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    task: str
    split: Literal["tuning", "heldout"]
    setting: dict[str, int | float]
    first: _Count
    stop: _Count
    repetition: _Count
    wall: _Seconds
    right: list[Literal[0, 1]]
    tokens: list[_Count]
    forwards: list[_Count]
    seconds: list[_Seconds]


class Ledger:
    """The measurements in the file at `path` of the run described by `run`.

    Opening reads what is there and changes nothing; `torn` says that a half-written last line was
    left out, it is dropped with the next write. Raises InputError if the file cannot be used or
    holds another run.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = Path(os.path.realpath(path))
        check_place(self.path, "--output")
        self.header = {"run": json.loads(json.dumps(run))}
        self.done: dict[Job, Measurement] = {}
        self.torn = False
        self._whole = False  # the file is there and ends with a line
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if data:
            self._read(data)

    def _read(self, data: bytes) -> None:
        first, *lines = data.split(b"\n")
        try:
            there = dict(parse(first, nan=True)["run"])
        except NOT_OURS as error:
            raise InputError(
                f"{self.path} exists and is not a ledger of this command; nothing was written"
            ) from error
        refuse_another_run(self.path, there, self.header["run"])
        self.torn = not lines or bool(lines.pop())
        for number, line in enumerate(lines, 2):
            try:
                measurement = Measurement.from_json(parse(line, nan=True))
                if measurement.job in self.done:
                    raise ValueError("measured twice")
            except NOT_OURS as error:
                raise InputError(
                    f"{self.path}, line {number} is not a measurement of this run, or its second "
                    "one"
                ) from error
            self.done[measurement.job] = measurement
        self._whole = not self.torn

    def spent(self, task: str) -> float:
        """Seconds that the search of a task has measured, over all runs."""
        return sum(m.wall for j, m in self.done.items() if (j.task, j.split) == (task, "tuning"))

    def write(self, measurement: Measurement) -> None:
        """Add a measurement, on disk before this returns. Raises OutputError."""
        if not self._whole:
            lines = [self.header, *(m.to_json() for m in self.done.values())]
            write_beside(self.path, "".join(map(json_line, lines)))
            self._whole = True
        with GrowingFile(self.path) as file:
            file.write(json_line(measurement.to_json()), sync=True)
        self.done[measurement.job] = measurement
