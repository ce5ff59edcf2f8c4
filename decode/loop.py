"""The decoding of a run: a warm-up, then every job, with times that count decoding alone."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

from d2f.errors import InputError, NonFiniteLogitsError
from d2f.tasks import Problem, Task
from decode.decoders import Decoder
from decode.display import Silent
from decode.jobs import Output, PromptJob, Record, Trace, make_record
from decode.step import Event, Result
from decode.workers import Crew, OneWorker, chunk_size, cores_here

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

# Judging in processes of its own, several responses at a time.
#
#     decoding --- finished responses ---> JudgePool --- one each ---> process, process, process
#                                              <--- right or wrong, in the order they came in
#
# A process is there for what one response may do to it: a judge that hangs or takes its process
# down
# has judged that response wrong, and the next one finds a new process.

Asked = tuple[Task, Problem, str]
"""A task, a problem of it, and the text of a response."""
MOST_BY_DEFAULT = 8
STOP_SECONDS = 2.0


def default_jobs() -> int:
    """As many as there are cores, some at most: each is a Python of its own."""
    return min(cores_here(), MOST_BY_DEFAULT)


class JudgePool:
    """At most `jobs` processes, started when they are first needed and ended on exit. Tasks without
    `judging_seconds` are judged in this process."""

    def __init__(self, jobs: int):
        self.jobs = jobs
        self.failed = 0
        """Judgements that ended without a verdict; they count as wrong."""
        self._idle: list[_Process] = []

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._idle:
            self._idle.pop().stop()

    def right(self, asked: Sequence[Asked]) -> list[bool]:
        """The verdicts, in the order of what is asked. Raises InputError where a judge raises."""
        found: dict[int, bool] = {}
        todo: deque[int] = deque()
        for number, (task, problem, text) in enumerate(asked):
            if task.judging_seconds is None:
                found[number] = task.right(problem, text)
            else:
                todo.append(number)
        busy: dict[Connection, tuple[_Process, int]] = {}
        try:
            while todo or busy:
                while todo and len(busy) < self.jobs:
                    process = self._free()
                    busy[process.connection] = process, todo[0]
                    process.ask(asked[todo.popleft()])
                first = min(process.deadline for process, _ in busy.values())
                ready = wait(list(busy), max(0.0, first - time.monotonic()))
                for connection, (process, number) in list(busy.items()):
                    if connection not in ready and time.monotonic() < process.deadline:
                        continue
                    verdict = process.verdict() if connection in ready else None
                    del busy[connection]
                    found[number] = bool(verdict)
                    if verdict is None:
                        self.failed += 1
                        process.stop()
                    else:
                        self._idle.append(process)
        finally:  # interrupted, or a judge raised
            for process, _ in busy.values():
                process.stop()
        return [found[number] for number in range(len(asked))]

    def _free(self) -> _Process:
        """One that waits, else a new one; one that ended meanwhile would fail what it is asked."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.stop()
        return _Process()


class _Process:
    """The parent's end of one."""

    def __init__(self) -> None:
        # Spawned: a forked one would hold this one's threads and CUDA.
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()  # the child has its own: were this one open, its death would go unseen
        self.deadline = 0.0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, asked: Asked) -> None:
        with suppress(OSError):  # it has ended, which `verdict` will find
            self.connection.send(asked)
        self.deadline = time.monotonic() + (asked[0].judging_seconds or 0.0)

    def verdict(self) -> bool | None:
        """What it said, None where it has ended. Raises InputError."""
        try:
            said: bool | str = self.connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(said, str):
            raise InputError(said)
        return said

    def stop(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection) -> None:
    """The process: judge until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    signal.signal(signal.SIGTERM, _leave)
    with suppress(EOFError, OSError):
        while True:
            connection.send(_verdict(*connection.recv()))


def _verdict(task: Task, problem: Problem, text: str) -> bool | str:
    try:
        return task.right(problem, text)
    except Exception as error:  # crosses the pipe as text: it may not unpickle there
        what = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        return f"{task.name}: {what}{error}"


def _leave(*_: Any) -> None:
    """What it has started, and its files, are cleared away on the way out."""
    sys.exit(1)


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
    """The records of the jobs as they were finished, and the seconds that the decoding took: of
    several workers, whose events come when a request is done, all that passed.

    The output and the display are opened after the checks and the warm-up. judges: what judges
    several responses at a time, while no decoding is timed: those of a task that allows it wait
    until there are as many. Raises InputError
    before any work, RequestError that names what was being decoded.
    """
    records: list[Record] = []
    watch = Stopwatch()
    if not isinstance(crew, OneWorker):
        timed = watch.over_workers(_spread(crew, jobs, batch_size))
    else:
        from decode.api import stream

        prompts, decoders = [job.ids for job in jobs], [job.decoder for job in jobs]
        # All prompts and decoders are checked here; nothing is decoded before the first event is
        # asked for.
        events = stream(crew.model, prompts, decoders, batch_size=batch_size, on_error="return")
        if jobs:
            _warm_up(crew.model, jobs[0])
        timed = watch.over(events)
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

    # Opened this late, so that neither bad input nor a failing warm-up leaves a file.
    if output is not None:
        output.start()
    with display:
        for event, seconds in timed:
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


def _spread(crew: Crew, jobs: list[PromptJob], batch_size: int) -> Iterator[Event]:
    """The last event of each job."""
    items = ((place, (job.ids, job.decoder)) for place, job in enumerate(jobs))
    size = chunk_size(batch_size, len(jobs), crew.count)
    for place, result in crew.spread(partial(results, batch_size=batch_size), items, size):
        yield Event(place, result.forwards, [], result=result)


def results(
    model: DiffusionModel, items: Iterable[tuple[Key, EncodedPrompt]], *, batch_size: int
) -> Iterator[tuple[Key, Result]]:
    """The result of each prompt, by its key, as it is done; one that failed has its error."""
    from decode.api import stream

    given = list(items)
    ids, decoders = [ids for _, (ids, _) in given], [decoder for _, (_, decoder) in given]
    for event in stream(model, ids, decoders, batch_size=batch_size, on_error="return"):
        if event.result is not None:
            yield given[event.request][0], event.result


def _warm_up(model: DiffusionModel, job: PromptJob) -> None:
    """The first forwards of a job, not timed: they pay for what is done only once."""
    from decode.api import stream

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

    def over_workers(self, events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
        """Last events from elsewhere, each with its result's own seconds. What the consumer does
        meanwhile is no pause: the workers go on."""
        began = time.perf_counter()
        for event in events:
            assert event.result is not None
            self.seconds = time.perf_counter() - began
            yield event, event.result.seconds
