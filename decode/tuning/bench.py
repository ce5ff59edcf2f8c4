"""Measuring: one job's problems decoded and judged, unless the ledger has it already."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task
from decode.commands.task_problems import encode_problems
from decode.evaluation.judged import decode_and_judge
from decode.reporting.measurements import Measurements
from decode.tuning.space import Space
from decode.tuning.tuning_ledger import JobDone, TuningJob, TuningLedger
from decode.tuning.tuning_run import Tuning

Problems = dict[tuple[str, str], list[Problem]]
"""By task and split."""


class Bench:
    """Does jobs on a model, each once: what is in the ledger is not measured again.

    on_done: told of each job done, measured or found. A setting decodes one problem untimed before
    its first job in this process.
    """

    def __init__(
        self,
        model: DiffusionModel,
        space: Space,
        problems: Problems,
        ledger: TuningLedger,
        *,
        tasks: Sequence[Task],
        batch_size: int,
        on_done: Callable[[JobDone], None],
    ):
        self.model, self.space, self.problems, self.ledger = model, space, problems, ledger
        self.tasks = {task.name: task for task in tasks}
        self.batch_size = batch_size
        self.on_done = on_done
        self.warm: set[tuple[object, ...]] = set()

    def measure(self, job: TuningJob) -> Measurements:
        """What the job gives. Raises NonFiniteLogitsError."""
        if job not in self.ledger.done:
            measurement = self._measure(job)
            self.ledger.add(measurement)
        self.on_done(self.ledger.done[job])
        return self.ledger.done[job].measured

    def _measure(self, job: TuningJob) -> JobDone:
        began = time.perf_counter()
        task = self.tasks[job.task]
        decoder = self.space.build(dict(job.setting), task)
        problems = self.problems[job.task, job.split][job.first : job.stop]
        # The warm-up counts in `wall`, by which the budget is spent, and in no measured second.
        if (job.task, job.setting) not in self.warm:
            decode_and_judge(self.model, decoder, task, problems[:1], batch_size=self.batch_size)
            self.warm.add((job.task, job.setting))
        judged = decode_and_judge(self.model, decoder, task, problems, batch_size=self.batch_size)
        return JobDone(job, judged.measurements(), time.perf_counter() - began)


def make_all_problems(tuning: Tuning) -> Problems:
    """The first problems of each task, so many of each split. Raises InputError for more than a
    split has."""
    problems: Problems = {}
    for task in tuning.chosen:
        for split, count in (("tuning", tuning.problems), ("heldout", tuning.heldout)):
            try:
                problems[task.name, split] = task.problems(split, count, tuning.seed)
            except InputError:
                raise  # of the data, or of the split
            except ValueError as error:
                raise InputError(f"{task.name}, split {split}: {error}") from error
    return problems


def check_prompts(model: DiffusionModel, tuning: Tuning, space: Space, problems: Problems) -> None:
    """Raise InputError unless the model can take every problem with the task's response length."""
    for task in tuning.chosen:
        decoder = space.build(space.settings[0], task)
        for split in ("tuning", "heldout"):
            some = problems[task.name, split]
            encode_problems(model, some, decoder, f" of the {split} split")
