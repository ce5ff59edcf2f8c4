"""Collect rollouts: d2f rollouts.

Decodes training problems of tasks and keeps the responses that the judge accepts, each with the
forward that decided every token for good: what `objective: {name: wino_plus}` trains on
(`distill.objectives.wino_plus` reads them).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional, Suppress

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import InputError
from d2f.flags import check_least
from d2f.quiet import quiet
from d2f.tasks import Problem, Task, before_stop
from decode.cli import (
    DecoderSettings,
    OneProcessModel,
    TaskOptions,
    WorkerOptions,
    decoder_flag,
)
from decode.decoders import DECODERS, Decoder
from decode.decoders.base import common_options, options_of
from decode.jobs import draw_problems, encode_problems
from decode.ledger import Ledger, check_place, refuse_early
from decode.step import Event, Result

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from distill.objectives.wino_plus import Rollout

RECORDED = ("wino", "d2f")
_NOT_TAKEN = ("max_new_tokens", "early_exit", "lossless")  # all of a task's response is decoded


@dataclass(kw_only=True)
class TeacherOptions(OneProcessModel):
    """The model whose answers are collected."""

    model: Positional[str] = field()
    """folder, hub name or bundled model"""


@dataclass(kw_only=True)
class CollectOptions:
    """The rollouts to collect."""

    decoder: Literal["wino", "d2f"] = "wino"
    """whose answers; d2f records the forward that each block was there from, too"""
    problems: int = 1000
    """training problems a task"""
    output: Positional[str]
    """JSONL file of the rollouts"""
    temperatures: str = "0"
    """tried in this order until an answer is right (0: greedy alone; the official collection takes
    0,0.1,0.2,0.3,0.4,0.5)"""
    seed: int = 0
    """of problems and sampling"""
    batch_size: int = 32
    """problems a forward"""
    given: Suppress[dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def more(cls, words: Sequence[str]) -> list[Any]:
        """Make flags of the options of the two decoders."""
        options = {o.name: o for name in RECORDED for o in options_of(DECODERS[name])}
        left_out = (*_NOT_TAKEN, *common_options())
        return [decoder_flag(o, words) for name, o in options.items() if name not in left_out]

    @property
    def ladder(self) -> list[float]:
        """Parse the numbers of --temperatures."""
        try:
            ladder = [float(part) for part in self.temperatures.split(",")]
        except ValueError:
            ladder = []
        if not ladder or not all(0 <= t < float("inf") for t in ladder):
            raise InputError(
                f"--temperatures must be numbers of 0 or more, got {self.temperatures!r}"
            )
        return ladder

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, problems=1, batch_size=1, seed=0)
        _ = self.ladder


@dataclass(kw_only=True)
class Options(TeacherOptions, TaskOptions, CollectOptions, WorkerOptions):
    """Decode training problems of tasks and keep the responses that the checker accepts, each with
    the forward that decided every token for good: what `objective: wino_plus` trains on.

    All of the response is decoded, not only up to its end token, as in WINO+'s own collection. A
    problem whose answer is wrong is decoded again at the next of --temperatures, if there is one.
    The file is written line by line in the order of the problems; the same command again goes on
    where it stopped.
    """

    examples = (
        "d2f rollouts tiny-teacher rollouts.jsonl --tasks story",
        "d2f rollouts my-model rollouts.jsonl --decoder d2f --temperatures 0,0.2,0.4",
    )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m distill.rollouts")


@command(interrupted="interrupted: the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and return its exit status."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options)


def run(options: Options) -> None:
    """Collect what the options say. Raises InputError before any work."""
    from rich.console import Console

    from decode.cli import checked_outline
    from decode.display import ShownProgress
    from decode.jobs import give_notices
    from decode.workers import chunk_size, workers
    from distill.objectives.wino_plus import HEADER

    check_place(Path(options.output))
    # All of the response is wanted, also what follows the end token.
    settings = DecoderSettings(options.decoder, options.given | {"early_exit": False})
    settings.check([task.response_length for task in options.chosen], options)
    shape = checked_outline(options)
    jobs = make_jobs(shape, settings, options.chosen, options.problems, options.seed)
    ledger: dict[str, Any] = {"key": "unique_id", "header": HEADER}
    refuse_early(options.output, describe(options, shape, "", jobs), **ledger)
    give_notices(options.chosen)
    display = ShownProgress(Console(stderr=True) if sys.stderr.isatty() else None, "problems")
    with (
        workers(options) as crew,
        Ledger(options.output, crew.ask(describe, jobs), **ledger) as file,
    ):
        # The last rollout says how far the run was.
        order = {job.name: number for number, job in enumerate(jobs, 1)}
        first = order[next(reversed(file.rows))] if file.rows else 0
        if first:
            print(f"{file.path}: going on after {jobs[first - 1].name}", file=sys.stderr)
        left = [*enumerate(jobs)][first:]
        work = partial(
            collect,
            temperatures=options.ladder,
            seed=options.seed,
            batch_size=options.batch_size,
        )
        waiting: dict[int, Rollout | None] = {}
        file.start()
        with display:
            display.begin(len(jobs))
            display.advance(first)
            size = chunk_size(options.batch_size, len(left), crew.count)
            for number, rollout in crew.map(work, left, size):
                # None for a problem that no temperature solved: it takes its turn and leaves no
                # line.
                waiting[number] = rollout
                display.advance()
                # Requests finish in any order; one is written when all before it are written or
                # have failed.
                while first in waiting:
                    found = waiting.pop(first)
                    if found is not None:
                        file.add(found.model_dump(mode="json"))
                    first += 1
    for task in options.chosen:
        kept = sum(name.startswith(f"{task.name}-") for name in file.rows)
        print(f"{task.name:<10} {kept} of {options.problems} right and kept")


def describe(
    options: Options, model: DiffusionModel, weights: str, jobs: list[TrajectoryJob]
) -> dict[str, Any]:
    """Describe what decides a run's rollouts; their reader checks it."""
    from decode.decoders.session import mask_kind
    from decode.jobs import model_header
    from distill.objectives.wino_plus import tokenizer_hash

    assert model.tokenizer is not None
    mask = "block-causal" if options.decoder == "d2f" else mask_kind(model.contract)
    return {
        **model_header(options, model, weights),
        "tokenizer": tokenizer_hash(model.tokenizer),
        "mask": mask.replace("-", "_"),
        "compiled": model.is_compiled,
        "decoder": options.decoder,
        "options": asdict(jobs[0].decoder) | {"max_new_tokens": None},
        "tasks": [task.identity for task in options.chosen],
        "problems": options.problems,
        "seed": options.seed,
        "temperatures": options.ladder,
    }


def make_jobs(
    model: DiffusionModel, settings: DecoderSettings, tasks: Sequence[Task], count: int, seed: int
) -> list[TrajectoryJob]:
    """Draw `count` distinct training problems of each task, encode and check them. Raises
    InputError."""
    jobs = []
    for task in tasks:
        # Without its stop strings, which would end a response before all of it is decided.
        decoder = settings.decoder(model, task.response_length)
        decoder.check(model.contract)
        problems = draw_problems(task, "train", count, seed)
        prompts = encode_problems(model, problems, decoder)
        for number, (problem, ids) in enumerate(zip(problems, prompts, strict=True), 1):
            jobs.append(TrajectoryJob(f"{task.name}-{number}", task, problem, ids, decoder))
    return jobs


@dataclass(frozen=True)
class TrajectoryJob:
    """A problem to decode: its name in the file, task, prompt ids, and decoder at temperature 0."""

    name: str
    task: Task
    problem: Problem
    ids: list[int]
    decoder: Decoder


@dataclass
class Trajectory:
    """Record which forward decided each token, from a request's events.

    pipelined: whether blocks are appended while decoding; else all are there from the start.
    appended: first step of each block by its start. tokens, accepted: of each position, the token
    that it holds and the step that decided it. proposed: the first step that gave a position a
    token. Steps count forwards from 0.
    """

    pipelined: bool
    block_size: int = 0
    appended: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)
    proposed: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take the next event. It shows what its forward decided, and the blocks of the forward to
        come; the first block is there from the start."""
        # Events count forwards from 1, trajectories from 0, as the official code's files do.
        step = event.forward - 1
        self.block_size = self.block_size or event.blocks[0].end
        for view in event.blocks:
            there = step + 1 if self.pipelined and view.start else 0
            self.appended.setdefault(view.start, there)
            for position, token in enumerate(view.tokens, view.start):
                if token is None:
                    # Taken back: when it is decided again, also as the same token, that is a new
                    # decision.
                    self.tokens.pop(position, None)
                elif self.tokens.get(position) != token:
                    self.tokens[position] = token
                    self.accepted[position] = step
                    # By token: a token that comes back after a revocation keeps its first step.
                    self.proposed.setdefault((position, token), step)

    def rollout(self, job: TrajectoryJob, result: Result, temperature: float) -> Rollout:
        """Make the rollout of a request that is done and whose answer is right."""
        from distill.objectives.wino_plus import Rollout

        place = range(len(result.raw_tokens))
        tokens = tuple(self.tokens[i] for i in place)
        # The events add up to the result.
        assert list(tokens) == result.raw_tokens
        return Rollout(
            unique_id=job.name,
            source=job.problem.task,
            prompt_ids=tuple(job.ids),
            generated_ids=tokens,
            trajectory_accepted=tuple(self.accepted[i] for i in place),
            trajectory_proposed=tuple(self.proposed[i, tokens[i]] for i in place),
            append_steps=tuple(self.appended[start] for start in sorted(self.appended)),
            block_size=self.block_size,
            decoding_steps=result.forwards,
            used_temperature=float(temperature),
            text=result.text or "",
        )


def collect(
    model: DiffusionModel,
    jobs: Iterable[tuple[int, TrajectoryJob]],
    *,
    temperatures: Sequence[float],
    seed: int = 0,
    batch_size: int = 32,
) -> Iterator[tuple[int, Rollout | None]]:
    """Yield (number, rollout) of each job, given with its number, as they finish; None where no
    temperature gave a right answer. What a job gives depends on its number, its problem and the
    seed alone."""
    from decode.api import stream

    rest = iter(jobs)
    # Some batches at a time: each job has a session, and there may be many thousands.
    while left := dict(islice(rest, 4 * batch_size)):
        for temperature in temperatures:
            tried = [*left.items()]
            # Seeded by the job's number: what it draws does not depend on where a run was resumed.
            decoders = [
                replace(job.decoder, temperature=temperature, seed=seed + number)
                for number, job in tried
            ]
            trajectories = [Trajectory(job.decoder.name == "d2f") for _, job in tried]
            prompts = [job.ids for _, job in tried]
            for event in stream(model, prompts, decoders, batch_size=batch_size):
                number, job = tried[event.request]
                trajectories[event.request].add(event)
                if event.result is None:
                    continue
                text = before_stop(event.result.text or "", job.task.stop)
                if job.task.right(job.problem, text):
                    del left[number]
                    rollout = trajectories[event.request].rollout(job, event.result, temperature)
                    yield number, rollout
            if not left:
                break
        yield from ((number, None) for number in left)


if __name__ == "__main__":
    sys.exit(main())
