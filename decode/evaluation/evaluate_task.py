"""A task's problems decoded, judged and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import Task, find_task
from decode.cluster.workers import Crew, OneWorker
from decode.commands.live_display import Silent
from decode.commands.prompt_jobs import PromptJob, task_sources
from decode.commands.task_problems import draw_problems, encode_problems
from decode.commands.timed_loop import decode
from decode.decoders import Decoder
from decode.engine.result import Event
from decode.evaluation.judge_pool import JudgePool
from decode.evaluation.scores import score
from decode.reporting.record import Output, Record
from decode.reporting.shown_progress import ShownProgress


class Counting(Silent):
    """A bar of the responses that are done, with how many of them are right."""

    def __init__(self, shown: ShownProgress, total: int, what: str):
        self.shown, self.what = shown, what
        self.done = self.right = 0
        shown.begin(total, what)

    def show(self, job: PromptJob, event: Event) -> None:
        """A forward, of which nothing is shown."""

    def finish(self, job: PromptJob, record: Record) -> None:
        self.done, self.right = self.done + 1, self.right + bool(record.right)
        self.shown.advance(1, f"{self.what}: {self.right} of {self.done} right")


def evaluate(
    model: DiffusionModel,
    decoder: Decoder,
    task: Task | str,
    count: int | None,
    *,
    split: str = "heldout",
    seed: int = 0,
    batch_size: int = 32,
) -> dict[str, Any]:
    """`count` problems of a task (None: all that there are) decoded and judged, one response each:
    what `decode.evaluation.scores.score` says, and the wall seconds of the decoding. Raises
    InputError before any decoding."""
    if count is not None and count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    task = find_task(task) if isinstance(task, str) else task
    problems = draw_problems(task, split, count, seed)
    ids = encode_problems(model, problems, decoder)
    jobs = [
        PromptJob(source, prompt, decoder.sampled(place, 0))
        for place, (source, prompt) in enumerate(
            zip(task_sources(task, problems), ids, strict=True)
        )
    ]
    return evaluate_jobs(OneWorker(model), task, jobs, split=split, batch_size=batch_size)


def evaluate_jobs(
    crew: Crew,
    task: Task,
    jobs: Sequence[PromptJob],
    *,
    split: str,
    batch_size: int,
    samples: int = 1,
    pass_at: Sequence[int] = (),
    output: Output | None = None,
    shown: ShownProgress | None = None,
    judges: JudgePool | None = None,
) -> dict[str, Any]:
    """A task's jobs, `samples` a problem, decoded but for those that `output` has already. judges:
    what judges several responses at a time; without it each is judged here.

    `seconds` is the wall time of the decoding here, None where all was there; `decoded` says how
    many responses it was for, `workers` how many processes decoded them at a time.
    """
    done = {} if output is None else output.done
    pending = [job for job in jobs if job.source.id not in done]
    display = Silent() if shown is None else Counting(shown, len(pending), task.name)
    new, seconds = decode(
        crew, pending, batch_size=batch_size, display=display, output=output, judges=judges
    )
    by_id = {**done, **{record.id: record for record in new}}
    records = [by_id[job.source.id] for job in jobs]
    return {
        **score(task, records, samples=samples, pass_at=pass_at),
        "split": split,
        "batch_size": batch_size,
        "workers": crew.count,
        "decoded": len(new),
        "seconds": seconds if new else None,
        "max_new_tokens": jobs[0].decoder.length,
    }
