"""The decoding of a run: a warm-up, then every job, with times that count decoding alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice

from d2f.errors import NonFiniteLogitsError
from d2f.model import DiffusionModel
from decode.api import stream
from decode.commands.live_display import Silent
from decode.commands.prompt_jobs import PromptJob
from decode.commands.trace_file import Trace
from decode.engine.result import Event, Result
from decode.evaluation.judge_pool import JudgePool
from decode.reporting.record import Output, Record, make_record

WARM_UP_FORWARDS = 2
Finished = tuple[PromptJob, Result, float]
"""A job, its result, and the seconds that it was decoded."""


def decode(
    model: DiffusionModel,
    jobs: list[PromptJob],
    *,
    batch_size: int,
    display: Silent,
    output: Output | None = None,
    trace: Trace | None = None,
    judges: JudgePool | None = None,
) -> tuple[list[Record], float]:
    """The records of the jobs as they were finished, and the seconds that the decoding took.

    The output and the display are opened after the checks and the warm-up. judges: what judges
    several responses at a time, while no decoding is timed: those of a task that allows it wait
    until there are as many. Raises InputError
    before any work, RequestError that names what was being decoded.
    """
    prompts, decoders = [job.ids for job in jobs], [job.decoder for job in jobs]
    # All prompts and decoders are checked here; nothing is decoded before the first event is asked
    # for.
    events = stream(model, prompts, decoders, batch_size=batch_size, on_error="return")
    if jobs:
        _warm_up(model, jobs[0])
    records: list[Record] = []
    watch = Stopwatch()
    waiting: list[Finished] = []

    def settle() -> None:
        """Judge and keep the responses that wait."""
        for (job, result, seconds), right in zip(waiting, _verdicts(waiting, judges), strict=True):
            record = make_record(job, result, seconds, right)
            records.append(record)
            if output is not None:
                output.add(record)
            display.finish(job, record)
        waiting.clear()

    # Opened this late, so that neither bad input nor a failing warm-up leaves a file.
    if output is not None:
        output.start()
    with display:
        for event, seconds in watch.over(events):
            job = jobs[event.request]
            if event.error is not None:
                # One failed request ends the command; the records written before it stay in the
                # output.
                settle()
                raise type(event.error)(
                    f"{job.source.where}: {event.error}; no token was taken from it"
                ) from event.error
            if trace is not None:
                trace.add(job, event)
            display.show(job, event)
            if event.result is not None:
                waiting.append((job, event.result, seconds))
                task = job.source.task
                waits = judges is not None and task is not None and task.judging_seconds is not None
                if judges is None or not waits or len(waiting) >= judges.jobs:
                    settle()
        settle()
    return records, watch.seconds


def _verdicts(finished: list[Finished], judges: JudgePool | None) -> list[bool | None]:
    """Whether each response is right, None for a prompt of one's own."""
    asked = {
        place: (job.source.task, job.source.problem, result.text or "")
        for place, (job, result, _) in enumerate(finished)
        if job.source.task is not None and job.source.problem is not None
    }
    if judges is None:
        right = [task.right(problem, text) for task, problem, text in asked.values()]
    else:
        right = judges.right(list(asked.values()))
    by_place = dict(zip(asked, right, strict=True))
    return [by_place.get(place) for place in range(len(finished))]


def _warm_up(model: DiffusionModel, job: PromptJob) -> None:
    """The first forwards of a job, not timed: they pay for what is done only once."""
    try:
        for _ in islice(stream(model, [job.ids], job.decoder), WARM_UP_FORWARDS):
            pass
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError(f"{error} of the warm-up; no token was taken from it") from error


class Stopwatch:
    """Times decoding without what its consumer does between events (showing, writing, pausing).

    seconds: of decoding so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
        """Each event with the seconds that its request has been decoded, 0.0 until its result.
        Exact for one request at a time; of several, each counts at most one forward's showing too
        much."""
        began, paused = time.perf_counter(), 0.0
        entered: dict[int, float] = {}
        for event in events:
            # Pauses before a request's first event are not in its own seconds.
            entered.setdefault(event.request, paused)
            own = 0.0
            if event.result is not None:
                # The engine's clock of a request runs on while the consumer holds this generator.
                own = event.result.seconds - (paused - entered.pop(event.request))
            left = time.perf_counter()
            self.seconds = left - began - paused
            yield event, own
            paused += time.perf_counter() - left
