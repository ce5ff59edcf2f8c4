"""Decoding training problems for their trajectories: many requests a batch; what the checker
accepts is kept with the forward that decided every token for good. The command is
`distill.rollouts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task, before_stop
from decode.commands.decoder_settings import DecoderSettings
from decode.commands.task_problems import draw_problems, encode_problems
from decode.decoders import Decoder
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.engine.result import Event, Result
from distill.rollouts.trajectories import Rollout


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
    """Which forwards decided what, from a request's events.

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
        """The rollout of a request that is done and whose answer is right."""
        place = range(len(result.raw_tokens))
        tokens = tuple(self.tokens[i] for i in place)
        # What the events showed adds up to the result.
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
    """(number, rollout) of each job, given with its number, as they finish; None where no
    temperature gave a right answer. What a job gives depends on its number, its problem and the
    seed alone."""
    numbered = dict(jobs)
    # Any job fits beside any others.
    sizes = (job.decoder.begin(job.ids, model.contract).slots for job in numbered.values())
    slots = max(sizes, default=1)
    at_once = min(batch_size, len(numbered))
    engine = Engine(model, batch_size=batch_size, slots=slots * max(at_once, 1))
    under_way: dict[int, Trajectory] = {}

    def submit(number: int, rung: int) -> None:
        job = numbered[number]
        # By the job's number, so that what it draws does not depend on where a run was resumed.
        decoder = replace(job.decoder, temperature=temperatures[rung], seed=seed + number)
        # One number that says which problem at which temperature; `divmod` below takes it apart.
        index = number * len(temperatures) + rung
        under_way[index] = Trajectory(decoder.name == "d2f")
        engine.submit(Request(index, job.ids, decoder, model.contract, model.tokenizer))

    rest = iter(numbered)
    while True:
        # Only as many wait as may enter next: each has a session, and the problems may be
        # thousands.
        while len(engine.waiting) < batch_size and (number := next(rest, None)) is not None:
            submit(number, 0)
        if not (engine.waiting or engine.running):
            return
        for event in engine.advance():
            if event.error is not None:
                raise event.error
            trajectory = under_way[event.request]
            trajectory.add(event)
            if event.result is None:
                continue
            del under_way[event.request]
            number, rung = divmod(event.request, len(temperatures))
            job = numbered[number]
            text = before_stop(event.result.text or "", job.task.stop)
            if job.task.right(job.problem, text):
                temperature = temperatures[rung]
                yield number, trajectory.rollout(job, event.result, temperature)
            elif rung + 1 < len(temperatures):
                submit(number, rung + 1)
            else:
                yield number, None


def make_jobs(
    model: DiffusionModel, settings: DecoderSettings, tasks: Sequence[Task], count: int, seed: int
) -> list[TrajectoryJob]:
    """`count` distinct training problems of each task, encoded and checked. Raises InputError."""
    if model.tokenizer is None:
        raise InputError(f"{model.path}: the tasks need a tokenizer, the checkpoint has none")
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
