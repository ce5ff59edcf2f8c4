"""Decode the jobs of a run: a warm-up, then every job, with times that count decoding alone."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from d2f.errors import NonFiniteLogitsError
from decode.decoders import Decoder
from decode.display import Display
from decode.jobs import Job, Record
from decode.judging import JudgePool
from decode.ledger import Ledger
from decode.step import Event, Result
from decode.workers import Crew, OneWorker, chunk_size

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

WARM_UP_FORWARDS = 2
Key = TypeVar("Key")
EncodedPrompt = tuple[list[int], Decoder]


@dataclass(frozen=True)
class Decoded:
    """Hold what came of jobs.

    records: in the order of the jobs, those that the ledger had among them.
    new: decoded in this run, as they were finished.
    seconds: that the decoding took; of several workers, whose events come when a request is done,
        all that passed.
    """

    records: list[Record]
    new: list[Record]
    seconds: float


def decode_jobs(
    crew: Crew,
    jobs: Sequence[Job],
    *,
    batch_size: int,
    max_rows: int | None = None,
    ledger: Ledger | None = None,
    judges: JudgePool | None = None,
    displays: Sequence[Display] = (),
) -> Decoded:
    """Decode the jobs that the ledger does not have.

    Args:
        max_rows: rows that a forward should have (`decode.engine.engine.Engine`).
        ledger, displays: begun after the checks and the warm-up, so that neither bad input nor a
            failing warm-up leaves a file.
        judges: judge several responses at a time, while no decoding is timed: those of a task that
            allows it wait until there are as many.

    Raises InputError before any work, RequestError that names what was being decoded.
    """
    from decode.api import stream

    records = {} if ledger is None else {key: Record(**row) for key, row in ledger.rows.items()}
    pending = [job for job in jobs if job.source.id not in records]
    new: list[Record] = []
    waiting: list[tuple[Job, Result, float]] = []

    def settle() -> None:
        """Judge and keep the responses that wait."""
        asked = [
            (job.source.task, job.source.problem, result.text or "")
            for job, result, _ in waiting
            if job.source.task is not None and job.source.problem is not None
        ]
        alone = (task.right(problem, text) for task, problem, text in asked)
        right = iter(judges.right(asked)) if judges else alone
        for job, result, seconds in waiting:
            verdict = None if job.source.task is None else next(right)
            new.append(record := Record.of(job, result, seconds, verdict))
            if ledger is not None:
                ledger.add(asdict(record))
            for display in displays:
                display.finish(job, record)
        waiting.clear()

    watch = Stopwatch()
    engine: dict[str, Any] = {"batch_size": batch_size, "max_rows": max_rows}
    if isinstance(crew, OneWorker):
        ids, decoders = [job.ids for job in pending], [job.decoder for job in pending]
        # The jobs are all checked here; nothing is decoded before the first event is asked for.
        timed = watch.over(stream(crew.model, ids, decoders, **engine, on_error="return"))
        if pending:
            _warm_up(crew.model, pending[0])
    else:
        size = chunk_size(batch_size, len(pending), crew.count)
        items = enumerate((job.ids, job.decoder) for job in pending)
        timed = watch.over_workers(crew.map(partial(results, **engine), items, size))
    if ledger is not None:
        ledger.start()
    with ExitStack() as stack:
        for display in displays:
            stack.enter_context(display)
            display.begin(len(pending))
        for event, seconds in timed:
            job = pending[event.request]
            if event.error is not None:
                settle()  # the records before it stay in the ledger
                raise type(event.error)(
                    f"{job.source.where}: {event.error}; no token was taken from it"
                ) from event.error
            for display in displays:
                display.show(job, event)
            if event.result is not None:
                waiting.append((job, event.result, seconds))
                task = job.source.task
                may_wait = task is not None and task.judging_seconds is not None
                if judges is None or not may_wait or len(waiting) >= judges.jobs:
                    settle()
        settle()
    records |= {record.id: record for record in new}
    return Decoded([records[job.source.id] for job in jobs], new, watch.seconds)


def _warm_up(model: DiffusionModel, job: Job) -> None:
    """Decode the first forwards of a job, not timed: they pay for what is done only once."""
    from decode.api import stream

    try:
        for _ in islice(stream(model, [job.ids], job.decoder), WARM_UP_FORWARDS):
            pass
    except NonFiniteLogitsError as error:
        raise NonFiniteLogitsError(f"{error} of the warm-up; no token was taken from it") from error


def results(
    model: DiffusionModel, items: Iterable[tuple[Key, EncodedPrompt]], **engine: Any
) -> Iterator[tuple[Key, Result]]:
    """Yield the result of each prompt, by its key, as it is done; one that failed has its error.
    Items are drawn as requests enter. engine: batch_size and max_rows, as in `decode.stream`."""
    from decode.api import stream

    keys: list[Key] = []
    decoders: deque[Decoder] = deque()

    def prompts() -> Iterator[list[int]]:
        for key, (ids, decoder) in items:
            keys.append(key)
            decoders.append(decoder)
            yield ids

    # A prompt is drawn as its request enters, then its decoder.
    chosen = iter(decoders.popleft, None)
    for event in stream(model, prompts(), chosen, **engine, on_error="return", views=False):
        if event.result is not None:
            yield keys[event.request], event.result


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

    def over_workers(self, found: Iterable[tuple[int, Result]]) -> Iterator[tuple[Event, float]]:
        """Yield results of requests from elsewhere as their last events, each with its own seconds.
        What the consumer does meanwhile is no pause: the workers go on."""
        began = time.perf_counter()
        for request, result in found:
            self.seconds = time.perf_counter() - began
            yield Event(request, result.forwards, [], result=result), result.seconds
