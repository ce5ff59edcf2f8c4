"""Trajectories of a decoder on problems that it solves, to train on."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase
from tyro.conf import Suppress, arg

from d2f import command as command_line
from d2f import noise
from d2f.checkpoint import parse as parse_trajectories
from d2f.config import Section
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.quiet import quiet
from d2f.tasks import Problem, Task, before_stop
from decode.cli import (
    DecoderSettings,
    OneProcessModel,
    TaskOptions,
    WorkerOptions,
    check_least,
    command,
    decoder_flags,
    options_by_name,
)
from decode.decoders import DECODERS, Decoder
from decode.decoders.base import common_options
from decode.engine.engine import Engine
from decode.engine.request import Request
from decode.jobs import draw_problems, encode_problems
from decode.ledger import Ledger, check_place, refuse_early
from decode.step import Event, Result
from distill.config import Data
from distill.data import Sample, Stream

if TYPE_CHECKING:
    from decode.workers import Crew


# python -m distill.rollouts --model tiny-teacher --decoder wino --output rollouts.jsonl
#
# Decodes training problems of the tiny tasks and keeps the responses that the checker accepts, each
# with the forward that decided every token for good: what `objective: wino_plus` trains on. The
# file
# is written line by line in the order of the problems; the same command again goes on where it
# stopped. `--decoder d2f` records the pipeline, with the forward that each block was there from.
#
# All of the response is decoded, not only up to its end token, as in WINO+'s own collection. A
# problem whose answer is wrong is decoded again at the next of `--temperatures`, if there is one.

RECORDED = ("wino", "d2f")
_NOT_TAKEN = ("max_new_tokens", "early_exit", "lossless")  # all of a task's response is decoded


def run(options: Options) -> None:
    """Collect what the options say. Raises InputError before any work."""
    check_place(Path(options.output))
    _run(options)


def _run(options: Options) -> None:
    from decode.cli import DecoderSettings, check_options, outline
    from decode.jobs import give_notices
    from decode.workers import workers

    given = options.given
    # All of the response is wanted, also what follows the end token.
    settings = DecoderSettings(options.decoder, given | {"early_exit": False})
    settings.check([task.response_length for task in options.chosen])
    check_options(options)
    shape = outline(options.model, options.adapter)
    jobs = make_jobs(shape, settings, options.chosen, options.problems, options.seed)
    early = describe(options, shape, "", jobs)
    refuse_early(options.output, early, key="unique_id", header="rollouts")
    give_notices(options.chosen)
    with (
        workers(options) as crew,
        RolloutLedger(options.output, crew.ask(describe, jobs)) as file,
    ):
        _collect(options, crew, jobs, file)
    for task in options.chosen:
        kept = sum(name.startswith(f"{task.name}-") for name in file.rows)
        print(f"{task.name:<10} {kept} of {options.problems} right and kept")


def _collect(options: Options, crew: Crew, jobs: list[TrajectoryJob], file: RolloutLedger) -> None:
    """Collect what the file does not have."""
    from rich.console import Console

    from decode.display import ShownProgress
    from decode.workers import chunk_size

    order = {job.name: number for number, job in enumerate(jobs)}
    places = [order.get(name, -1) for name in file.rows]
    # Rollouts are written in the order of the problems: the last one says how far the run was.
    if -1 in places or places != sorted(places):
        raise InputError(f"{file.path}: its rollouts are not problems of this run in their order")
    first = places[-1] + 1 if places else 0
    if first:
        print(f"{file.path}: going on after {[*file.rows][-1]}", file=sys.stderr)
    work = partial(
        collect,
        temperatures=options.ladder,
        seed=options.seed,
        batch_size=options.batch_size,
    )
    left = [*enumerate(jobs)][first:]
    size = chunk_size(options.batch_size, len(left), crew.count)
    waiting: dict[int, Rollout | None] = {}
    display = ShownProgress(Console(stderr=True) if sys.stderr.isatty() else None, "problems")
    file.start()
    with display:
        display.begin(len(jobs))
        display.advance(first)
        for number, rollout in crew.spread(work, left, size):
            # None for a problem that no temperature solved: it takes its turn and leaves no line.
            waiting[number] = rollout
            display.advance()
            # Requests finish in any order; one is written when all before it are written or have
            # failed.
            while first in waiting:
                found = waiting.pop(first)
                if found is not None:
                    file.add_rollout(found)
                first += 1


def describe(
    options: Options, model: DiffusionModel, weights: str, jobs: list[TrajectoryJob]
) -> dict[str, Any]:
    """What decides a run's rollouts, and what their reader checks."""
    from d2f import __version__
    from decode.decoders.base import mask_kind

    assert model.tokenizer is not None
    mask = "block-causal" if options.decoder == "d2f" else mask_kind(model.contract)
    return {
        "version": __version__,
        "model": options.model,
        "adapter": options.adapter,
        "weights": weights,
        "tokenizer": tokenizer_hash(model.tokenizer),
        "mask_id": model.mask_id,
        "mask": mask.replace("-", "_"),
        "dtype": model.precision,
        "device": model.device.type,
        "compiled": model.is_compiled,
        "decoder": options.decoder,
        "options": asdict(jobs[0].decoder) | {"max_new_tokens": None},
        "tasks": [task.identity for task in options.chosen],
        "problems": options.problems,
        "seed": options.seed,
        "temperatures": options.ladder,
    }


@dataclass(kw_only=True)
class TeacherOptions(OneProcessModel):
    """Whose answers are collected."""

    model: Annotated[str, arg(metavar="NAME")] = field()
    """folder, hub name or bundled model"""


@dataclass(kw_only=True)
class CollectOptions:
    """What is collected."""

    decoder: Literal["wino", "d2f"] = "wino"
    """whose answers; d2f records the forward that each block was there from, too"""
    problems: int = 1000
    """training problems a task"""
    output: str
    """JSONL file of the rollouts"""
    temperatures: str = "0"
    """tried in this order until an answer is right (0: greedy alone; the official collection takes
    0,0.1,0.2,0.3,0.4,0.5)"""
    seed: int = 0
    """of problems and sampling"""
    batch_size: int = 32
    """problems a forward"""
    given: Suppress[dict[str, Any]] = field(default_factory=dict)

    @property
    def ladder(self) -> list[float]:
        """The numbers of --temperatures."""
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


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    kinds = [DECODERS[name] for name in RECORDED]
    names = [
        name for name in options_by_name(kinds) if name not in (*_NOT_TAKEN, *common_options())
    ]
    more = {CollectOptions: decoder_flags(kinds, names)}
    return command_line.parse(Options, arguments, usual="python -m distill.rollouts", more=more)


@command(interrupted="interrupted: the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options)


# Trajectories of decoding, and the states on their way, which WINO+ trains on.
#
# A rollout is a verified response with the step (forward, from 0) that decided each token for good:
# ``t_l = min{t : y_l is the final token after every forward j >= t}``. Its states are what the
# decoder saw before each forward that decided something for good: the tokens with ``t_l < t``
# revealed, the others masked. Four tokens a b c d with steps 0 2 1 1 have three states (M: masked):
#
#     before step 0    M M M M    a is decided now, the others later
#     before step 1    a M M M    c and d now, b later
#     before step 2    a M c d    b now
#
# `distill.rollouts` writes the file that is read here.

Count = Annotated[int, Field(ge=0)]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
NO_ROLLOUTS = "is not a file of distill.rollouts: line 1 says no run"


class Rollout(Section):
    """A verified response and how it was decoded.

    unique_id, source: the problem and its task. generated_ids: every decided token, not cut at the
    first end token. trajectory_accepted: t_l of each. trajectory_proposed: the first step that
    decided its final token, which is earlier where that was taken back in between. append_steps:
    the first step that a block was there in, one a block of `block_size` (all 0 where the response
    is there from the start). decoding_steps: forwards. used_temperature: the first of the ladder
    that gave a right answer. text: the answer that was checked.
    """

    unique_id: str
    source: str
    prompt_ids: Annotated[tuple[Count, ...], Field(min_length=1)]
    generated_ids: Annotated[tuple[Count, ...], Field(min_length=1)]
    trajectory_accepted: tuple[Count, ...]
    trajectory_proposed: tuple[Count, ...]
    append_steps: tuple[Count, ...]
    block_size: Annotated[int, Field(gt=0)]
    decoding_steps: Annotated[int, Field(gt=0)]
    used_temperature: Annotated[float, Field(ge=0)]
    text: str

    @model_validator(mode="after")
    def _consistent(self) -> Rollout:
        length = len(self.generated_ids)
        for name in ("trajectory_accepted", "trajectory_proposed"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} must have a step for each of the {length} generated ids, "
                    f"got {len(getattr(self, name))}"
                )
        accepted, blocks = np.array(self.trajectory_accepted), -(-length // self.block_size)
        if accepted.max() >= self.decoding_steps:
            raise ValueError(
                f"trajectory_accepted must lie below decoding_steps {self.decoding_steps}, "
                f"got {accepted.max()}"
            )
        # The step that decided a token for good may be a later one, never an earlier one.
        if (np.array(self.trajectory_proposed) > accepted).any():
            raise ValueError("trajectory_proposed must not exceed trajectory_accepted")
        appended = np.array(self.append_steps)
        if len(appended) != blocks or (np.diff(appended) < 0).any():
            raise ValueError(
                f"append_steps must be {blocks} steps that do not decrease, got {self.append_steps}"
            )
        if (np.repeat(appended, self.block_size)[:length] > accepted).any():
            raise ValueError("append_steps: a token was decided before its block was there")
        return self


def read_rollouts(path: str | Path) -> tuple[dict[str, Any], list[Rollout]]:
    """The settings of the run that collected a file, and its rollouts.

    Raises InputError, naming file and line, for anything that is not a line of such a file.
    """
    try:
        first, *lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        run = dict(parse_trajectories(first.decode())["rollouts"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} {NO_ROLLOUTS}") from error
    # Behind the last newline there is nothing, unless the collecting command was killed.
    torn = bool(lines and lines.pop())
    found = [parse_rollout(line, f"{path}, line {n}") for n, line in enumerate(lines, 2)]
    if torn:
        raise InputError(
            f"{path}, line {len(found) + 2} is cut short: "
            "the command that collects the rollouts, given again, goes on there"
        )
    if not found:
        raise InputError(f"{path}: expected at least one rollout, got none")
    return run, found


def parse_rollout(line: bytes, where: str) -> Rollout:
    """The rollout of a line. Raises InputError that begins with `where`."""
    try:
        return Rollout.model_validate_json(line)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = ".".join(map(str, wrong["loc"])) or "rollout"
        raise InputError(f"{where}: {key}: {wrong['msg']}") from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identity of a tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def random_steps(steps: Ints, block_size: int, rng: np.random.Generator) -> Ints:
    """The paper's ablation: each block's steps given to random positions of it, every step to at
    least one; so the block has the same states in number, decided in no sensible order. A block's
    steps 0 0 2 1 may become 2 0 1 1."""
    mixed = np.empty_like(steps)
    for start in range(0, len(steps), block_size):
        values = np.unique(steps[start : start + block_size])
        length = len(steps[start : start + block_size])
        # Every value once, the rest drawn: no state of the block may vanish.
        drawn = np.concatenate([values, rng.choice(values, length - len(values))])
        mixed[start : start + block_size] = rng.permutation(drawn)
    return mixed


@dataclass(frozen=True)
class State(Sample):
    """The state before step t; all ``[response]``. masked: hidden from the model. now: decided at t
    (A_t). later: decided after t, in blocks that are there at t (B_t). deferrable: those of B_t
    that the defer term looks at."""

    masked: Bools
    now: Bools
    later: Bools
    deferrable: Bools


def state_at(
    rollout: Rollout, steps: Ints, t: int, settings: Any, end_ids: tuple[int, ...], index: int
) -> State:
    """The state of a rollout before step t, whose tokens are decided at `steps`.

    The response ends with the last block that is there at t, which a block-causal student could
    not see beyond anyway; it is whole where a bidirectional teacher sees it too.
    """
    position = np.arange(len(steps))
    block = position // rollout.block_size
    # bool [response]: the pipeline had appended the token's block before step t.
    there = np.array(rollout.append_steps)[block] <= t
    answer = answer_length(rollout, end_ids)
    counted = there & (settings.tail | (position < answer))
    now, later = counted & (steps == t), counted & (steps > t)
    # The block of the first token of A_t, as the official code limits R_t (`scope: block`).
    current = block == block[np.argmax(now)]
    # What is cut off is all masked and seen by nobody, so it would only take room in a row.
    kept = len(steps) if settings.kl_weight else int(there.sum())
    return State(
        index,
        list(rollout.prompt_ids),
        list(rollout.generated_ids[:kept]),
        min(answer, kept),
        masked=(steps >= t)[:kept],
        now=now[:kept],
        later=later[:kept],
        deferrable=(later & (current | (settings.scope == "all")))[:kept],
    )


def answer_length(rollout: Rollout, end_ids: tuple[int, ...]) -> int:
    """Generated tokens up to and with the first end token."""
    ends = [i for i, token in enumerate(rollout.generated_ids) if token in end_ids]
    return ends[0] + 1 if ends else len(rollout.generated_ids)


class StateStream(Stream):
    """Every state of every rollout once an epoch, in an order of the epoch's own. `sample(i)` does
    not depend on any other call. chosen: numbers of the rollouts that it has, by default all."""

    def __init__(
        self,
        data: Data,
        rollouts: list[Rollout],
        settings: Any,
        end_ids: tuple[int, ...],
        seed: int,
        chosen: Collection[int] | None = None,
    ):
        self.data, self.rollouts, self.settings, self.seed = data, rollouts, settings, seed
        self.end_ids = end_ids
        self.chosen = range(len(rollouts)) if chosen is None else chosen
        self.steps = [self._steps(i, rollout) for i, rollout in enumerate(rollouts)]
        self.states = [
            # Distinct steps only: a forward that decided nothing for good leaves no state.
            (i, int(t))
            for i, (rollout, steps) in enumerate(zip(rollouts, self.steps, strict=True))
            if i in self.chosen
            for t in np.unique(steps if settings.tail else steps[: answer_length(rollout, end_ids)])
        ]
        self._order = (-1, np.zeros(0, dtype=np.int64))
        for number, rollout in enumerate(rollouts, 2):
            tokens = len(rollout.prompt_ids) + len(rollout.generated_ids)
            if tokens > data.row_length:
                raise InputError(
                    f"{data.file}, line {number} has {tokens} tokens, data.row_length is "
                    f"{data.row_length}"
                )

    def sample(self, index: int) -> State:
        """State `index`."""
        i, t = self._state(index)
        return state_at(self.rollouts[i], self.steps[i], t, self.settings, self.end_ids, index)

    @property
    def epoch(self) -> int:
        return len(self.states)

    @property
    def epoch_samples(self) -> int:
        return len(self.states)

    def where(self, index: int) -> str:
        i, t = self._state(index)
        return f"{self.data.file}, line {i + 2}, before step {t}"

    def report(self) -> str:
        return f"{len(self.states)} states of {len(self.chosen)} rollouts"

    def _state(self, index: int) -> tuple[int, int]:
        """(rollout, step) of state `index`."""
        epoch, place = divmod(index, len(self.states))
        if epoch != self._order[0]:
            rng = noise.sample_rng(self.seed, epoch, noise.ORDER)
            self._order = (epoch, rng.permutation(len(self.states)))
        return self.states[self._order[1][place]]

    def _steps(self, number: int, rollout: Rollout) -> Ints:
        steps = np.array(rollout.trajectory_accepted)
        if self.settings.trajectory == "recorded":
            return steps
        rng = noise.sample_rng(self.seed, number, noise.RATIOS)
        return random_steps(steps, rollout.block_size, rng)


# Decoding training problems for their trajectories: many requests a batch; what the checker
# accepts is kept with the forward that decided every token for good. The command is
# `distill.rollouts`.


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


# The file of a run that collects rollouts: its settings, then a line a rollout, in the order of
# the problems.


class RolloutLedger(Ledger):
    """The rollouts by the names of their problems."""

    def __init__(self, path: str | Path, run: dict[str, Any]):
        super().__init__(path, run, key="unique_id", header="rollouts")

    def add_rollout(self, rollout: Rollout) -> None:
        """Append a rollout. Raises OutputError."""
        self.add(rollout.model_dump(mode="json"))
