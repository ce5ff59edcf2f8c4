"""Measuring: one job's problems decoded and judged, unless the ledger has it already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from weakref import WeakKeyDictionary

from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task
from decode.cluster.workers import Crew
from decode.commands.task_problems import encode_problems
from decode.decoders import Decoder
from decode.evaluation.judged import decode_and_judge
from decode.reporting.measurements import Measurements
from decode.tuning.space import Space
from decode.tuning.tuning_ledger import JobDone, TuningJob, TuningLedger
from decode.tuning.tuning_run import Tuning

Problems = dict[tuple[str, str], list[Problem]]
"""By task and split."""
Asked = tuple[Task, Decoder, list[Problem]]
"""What a job decodes, and how."""
_WARM: WeakKeyDictionary[DiffusionModel, set[tuple[object, ...]]] = WeakKeyDictionary()


class Bench:
    """Does jobs with a crew, each once: what is in the ledger is not measured again.

    on_done: told of each job done, measured or found.
    """

    def __init__(
        self,
        crew: Crew,
        space: Space,
        problems: Problems,
        ledger: TuningLedger,
        *,
        tasks: Sequence[Task],
        batch_size: int,
        on_done: Callable[[JobDone], None],
    ):
        self.crew, self.space, self.problems, self.ledger = crew, space, problems, ledger
        self.tasks = {task.name: task for task in tasks}
        self.batch_size = batch_size
        self.on_done = on_done

    def measure(self, job: TuningJob) -> Measurements:
        """What the job gives. Raises NonFiniteLogitsError."""
        self._add([job])
        self.on_done(self.ledger.done[job])
        return self.ledger.done[job].measured

    def measure_ahead(self, jobs: Iterable[TuningJob]) -> None:
        """Let several workers do jobs at a time that `measure` will ask for; one does each when it
        is asked for."""
        if self.crew.count > 1:
            self._add(jobs)

    def _add(self, jobs: Iterable[TuningJob]) -> None:
        new = [(job, self._asked(job)) for job in jobs if job not in self.ledger.done]
        work = partial(measure_jobs, batch_size=self.batch_size)
        for _, done in self.crew.spread(work, new, 1):
            self.ledger.add(done)

    def _asked(self, job: TuningJob) -> Asked:
        task = self.tasks[job.task]
        problems = self.problems[job.task, job.split][job.first : job.stop]
        return task, self.space.build(dict(job.setting), task), problems


def measure_jobs(
    model: DiffusionModel, jobs: Iterable[tuple[TuningJob, Asked]], *, batch_size: int
) -> Iterator[tuple[TuningJob, JobDone]]:
    """Each job, measured. A setting decodes one problem of a task untimed before its first job on
    this model in this process."""
    warm = _WARM.setdefault(model, set())
    for job, (task, decoder, problems) in jobs:
        began = time.perf_counter()
        # The warm-up counts in `wall`, by which the budget is spent, and in no measured second.
        if (job.task, job.setting) not in warm:
            decode_and_judge(model, decoder, task, problems[:1], batch_size=batch_size)
            warm.add((job.task, job.setting))
        judged = decode_and_judge(model, decoder, task, problems, batch_size=batch_size)
        yield job, JobDone(job, judged.measurements(), time.perf_counter() - began)


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
