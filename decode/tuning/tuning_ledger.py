"""The jobs of a tuning run, and their ledger: a line for every one that is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from d2f.json_file import parse
from decode.reporting.ledger import Ledger, json_line
from decode.reporting.measurements import Measurements
from decode.tuning.space import Setting, described


@dataclass(frozen=True)
class TuningJob:
    """Problems ``[first, stop)`` of a split to decode with a setting, as (option, value) pairs.
    repetition: the same again, for its timing."""

    task: str
    split: Literal["tuning", "heldout"]
    setting: tuple[tuple[str, int | float], ...]
    first: int
    stop: int
    repetition: int = 0


def job(task: str, split: Literal["tuning", "heldout"], setting: Setting, *place: int) -> TuningJob:
    """The job of a setting. place: first, stop and, if not 0, the repetition."""
    # Sorted: the same setting is the same job, whatever order its options were given in.
    return TuningJob(task, split, tuple(sorted(setting.items())), *place)


@dataclass(frozen=True)
class JobDone:
    """A job done. wall: seconds that it took with everything around the decoding."""

    job: TuningJob
    measured: Measurements
    wall: float

    @property
    def text(self) -> str:
        """For the progress bar."""
        setting = described(dict(self.job.setting))
        return f"{self.job.task}, {setting}: {self.measured.accuracy:.0%} right"

    def to_json(self) -> dict[str, Any]:
        """A line of the ledger; lists have a value a problem."""
        return {
            **asdict(self.job),
            "setting": dict(self.job.setting),
            "wall": self.wall,
            "right": self.measured.right.astype(int).tolist(),
            "tokens": self.measured.tokens.tolist(),
            "forwards": self.measured.forwards.tolist(),
            "seconds": self.measured.seconds.tolist(),
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> JobDone:
        """The measurement of a line. Raises ValueError."""
        line = _Line.model_validate(values)
        done = job(line.task, line.split, line.setting, line.first, line.stop, line.repetition)
        lists = line.right, line.tokens, line.forwards, line.seconds
        if {len(values) for values in lists} != {done.stop - done.first}:
            raise ValueError("not a value a problem")
        measured = Measurements(
            np.array(line.right, dtype=bool),
            np.array(line.tokens, dtype=np.int64),
            np.array(line.forwards, dtype=np.int64),
            np.array(line.seconds, dtype=np.float64),
        )
        return JobDone(done, measured, line.wall)


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Line(BaseModel):
    """A measurement as `JobDone.to_json` writes it."""

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


class TuningLedger(Ledger[TuningJob, JobDone]):
    """The jobs done of a tuning run."""

    FILE = "exists and is not a ledger of this command"
    ENTRY = "a measurement of this run"
    SYNC = True

    def key(self, entry: JobDone) -> TuningJob:
        return entry.job

    def line(self, entry: JobDone) -> str:
        return json_line(entry.to_json())

    def parsed(self, line: bytes, where: str) -> JobDone:
        return JobDone.from_json(parse(line, nan=True))

    def spent(self, task: str) -> float:
        """Seconds that the search of a task has measured, over all runs."""
        return sum(m.wall for j, m in self.done.items() if (j.task, j.split) == (task, "tuning"))
