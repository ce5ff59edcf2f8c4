"""The decoding of a run: a warm-up, then every job, with times that count decoding alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from d2f.errors import NonFiniteLogitsError
from decode.decoders import Decoder
from decode.display import Silent
from decode.jobs import Output, PromptJob, Record, Trace, make_record
from decode.judging import JudgePool
from decode.step import Event, Result
from decode.workers import Crew, OneWorker, chunk_size

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

WARM_UP_FORWARDS = 2
Key = TypeVar("Key")
EncodedPrompt = tuple[list[int], Decoder]
Finished = tuple[PromptJob, Result, float]
"""A job, its result, and the seconds that it was decoded."""


def decode(
    crew: Crew,
    jobs: list[PromptJob],
    *,
    batch_size: int,
    display: Silent,
    output: Output | None = None,
    trace: Trace | None = None,
    judges: JudgePool | None = None,
) -> tuple[list[Record], float]:
    """Decode the jobs; return their records as they were finished, and the seconds that it took: of
    several workers, whose events come when a request is done, all that passed.

    output, display: opened after the checks and the warm-up, so that neither bad input nor a
        failing warm-up leaves a file.
    judges: judges several responses at a time, while no decoding is timed: those of a task that
        allows it wait until there are as many.

    Raises InputError before any work, RequestError that names what was being decoded.
    """
    records: list[Record] = []
    waiting: list[Finished] = []

    def settle() -> None:
        """Judge and keep the responses that wait."""
        for (job, result, seconds), right in zip(waiting, _verdicts(waiting, judges), strict=True):
            record = make_record(job, result, seconds, right)
            records.append(record)
            if output is not None:
                output.add_record(record)
            display.finish(job, record)
        waiting.clear()

    watch = Stopwatch()
    if isinstance(crew, OneWorker):
        timed = watch.over(_events(crew.model, jobs, batch_size))
        if jobs:
            _warm_up(crew.model, jobs[0])
    else:
        timed = watch.over_workers(_spread(crew, jobs, batch_size))
    if output is not None:
        output.start()
    with display:
        for event, seconds in timed:
            job = jobs[event.request]
            if event.error is not None:
                settle()  # the records before it stay in the output
                raise type(event.error)(
                    f"{job.source.where}: {event.error}; no token was taken from it"
                ) from event.error
            if trace is not None:
                trace.add(job, event)
            display.show(job, event)
            if event.result is not None:
                waiting.append((job, event.result, seconds))
                task = job.source.task
                may_wait = task is not None and task.judging_seconds is not None
                if judges is None or not may_wait or len(waiting) >= judges.jobs:
                    settle()
        settle()
    return records, watch.seconds


def _verdicts(finished: list[Finished], judges: JudgePool | None) -> list[bool | None]:
    """Judge the responses; None for a prompt of one's own."""
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


def _events(model: DiffusionModel, jobs: list[PromptJob], batch_size: int) -> Iterator[Event]:
    """Begin the jobs, which checks them all; nothing is decoded before the first event is asked
    for."""
    from decode.api import stream

    prompts, decoders = [job.ids for job in jobs], [job.decoder for job in jobs]
    return stream(model, prompts, decoders, batch_size=batch_size, on_error="return")


def _warm_up(model: DiffusionModel, job: PromptJob) -> None:
    """Decode the first forwards of a job, not timed: they pay for what is done only once."""
    from decode.api import stream

    try:
        for _ in islice(stream(model, [job.ids], job.decoder), WARM_UP_FORWARDS):
            pass
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError(f"{error} of the warm-up; no token was taken from it") from error


def _spread(crew: Crew, jobs: list[PromptJob], batch_size: int) -> Iterator[Event]:
    """Decode on several workers; yield the last event of each job."""
    items = ((place, (job.ids, job.decoder)) for place, job in enumerate(jobs))
    size = chunk_size(batch_size, len(jobs), crew.count)
    for place, result in crew.map(partial(results, batch_size=batch_size), items, size):
        yield Event(place, result.forwards, [], result=result)


def results(
    model: DiffusionModel, items: Iterable[tuple[Key, EncodedPrompt]], *, batch_size: int
) -> Iterator[tuple[Key, Result]]:
    """Yield the result of each prompt, by its key, as it is done; one that failed has its error."""
    from decode.api import stream

    given = list(items)
    ids, decoders = [ids for _, (ids, _) in given], [decoder for _, (_, decoder) in given]
    for event in stream(model, ids, decoders, batch_size=batch_size, on_error="return"):
        if event.result is not None:
            yield given[event.request][0], event.result


class Stopwatch:
    """Time decoding without what its consumer does between events (showing, writing, pausing).

    seconds: of decoding so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
        """Yield each event with the seconds that its request has been decoded, 0.0 until its
        result. Exact for one request at a time; of several, each counts at most one forward's
        showing too much."""
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

    def over_workers(self, events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
        """Yield last events from elsewhere, each with its result's own seconds. What the consumer
        does meanwhile is no pause: the workers go on."""
        began = time.perf_counter()
        for event in events:
            assert event.result is not None
            self.seconds = time.perf_counter() - began
            yield event, event.result.seconds
