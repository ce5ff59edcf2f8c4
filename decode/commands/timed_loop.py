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
from decode.engine.result import Event
from decode.reporting.record import Output, Record, make_record

WARM_UP_FORWARDS = 2


def decode(
    model: DiffusionModel,
    jobs: list[PromptJob],
    *,
    batch_size: int,
    display: Silent,
    output: Output | None = None,
    trace: Trace | None = None,
) -> tuple[list[Record], float]:
    """The records of the jobs as they were finished, and the seconds that the decoding took.

    The output and the display are opened after the checks and the warm-up. Raises InputError
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
    # Opened this late, so that neither bad input nor a failing warm-up leaves a file.
    if output is not None:
        output.start()
    with display:
        for event, seconds in watch.over(events):
            job = jobs[event.request]
            if event.error is not None:
                # One failed request ends the command; the records written before it stay in the
                # output.
                raise type(event.error)(
                    f"{job.source.where}: {event.error}; no token was taken from it"
                ) from event.error
            if trace is not None:
                trace.add(job, event)
            display.show(job, event)
            if event.result is not None:
                record = make_record(job, event.result, seconds)
                records.append(record)
                if output is not None:
                    output.add(record)
                display.finish(job, record)
    return records, watch.seconds


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
