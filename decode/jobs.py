"""Make jobs of held-out problems or prompts, and records of their results.

Source (as it was given)  ->  Job (ids and a decoder, checked)  ->  Record (a line of --output)
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from d2f import __version__
from d2f.command import say
from d2f.config import Section, explain
from d2f.errors import InputError
from d2f.tasks import Problem, Task
from decode.cli import DecoderSettings, ModelOptions
from decode.decoders import Decoder, qualified_name
from decode.step import Result

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or chat messages."""


@dataclass(frozen=True)
class Source:
    """A prompt as it was given.

    id: its name in the output. where: its name in messages. problem, task: None for a prompt of
    one's own.
    """

    id: int | str
    where: str
    prompt: Prompt
    problem: Problem | None = None
    task: Task | None = None

    @property
    def question(self) -> str | None:
        """The question as a person reads it; None where it was given as ids."""
        if self.problem is not None:
            return self.problem.question
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]
        text = last["content"] if isinstance(last, dict) else last
        return text if isinstance(text, str) else None


@dataclass(frozen=True)
class Job:
    """A prompt that is checked and ready to decode: its ids, and the decoder with its length and
    seed."""

    source: Source
    ids: list[int]
    decoder: Decoder


@dataclass(frozen=True)
class Record:
    """A line of the output.

    task, right: None for a prompt of one's own.
    tokens: visible ids, cut before the end token or stop string.
    rows: fed in all forwards.
    counts: what the decoder counted, by name.
    seconds: decoding alone, without what the command does between forwards.
    """

    id: int | str
    task: str | None
    question: str | None
    text: str | None
    right: bool | None
    finish_reason: str
    prompt_tokens: int
    max_new_tokens: int
    forwards: int
    rows: int
    counts: dict[str, int]
    seconds: float
    tokens: list[int]
    raw_tokens: list[int]

    @staticmethod
    def of(job: Job, result: Result, seconds: float, right: bool | None) -> Record:
        """Make the record of a result. right: the verdict on its text."""
        same = ("text", "finish_reason", "prompt_tokens", "forwards", "counts", "tokens")
        return Record(
            **{name: getattr(result, name) for name in (*same, "raw_tokens")},
            id=job.source.id,
            task=job.source.problem.task if job.source.problem else None,
            question=job.source.question,
            right=right,
            max_new_tokens=job.decoder.length,
            rows=sum(rows for rows, _ in result.calls),
            seconds=seconds,
        )

    @property
    def verdict(self) -> str:
        """Say right or wrong; of a prompt of one's own, why the response ended."""
        if self.right is None:
            return {"end": "ended", "stop": "stopped", "length": "cut off"}[self.finish_reason]
        return "right" if self.right else "wrong"

    @property
    def numbers(self) -> str:
        """Give tokens, speed and forwards."""
        tokens = len(self.tokens)
        return (
            f"{tokens} tokens  {tokens / self.seconds:.1f} tokens/s  {self.forwards} forwards  "
            f"{tokens / self.forwards:.2f} tokens/forward"
        )

    @property
    def shown(self) -> str:
        """The response as text, or as ids for a model without a tokenizer."""
        return self.text if self.text is not None else " ".join(map(str, self.tokens))


# Problems of tasks.


def draw_problems(
    task: Task, split: str, count: int | None, seed: int = 0, option: str = "--problems"
) -> list[Problem]:
    """Draw `count` problems of a split, None for all. Raises InputError, naming the option that
    they were asked for with, for more than there are."""
    try:
        return task.problems(split, count, seed)
    except InputError:
        raise  # of the data, or of the split
    except ValueError as error:
        raise InputError(f"{option} {count}: {error}") from error


def give_notices(tasks: Iterable[Task]) -> None:
    """Say on standard error what a user should know before anything is judged."""
    for task in tasks:
        if task.notice is not None:
            say(f"notice: {task.notice}")


def encode_problems(
    model: DiffusionModel, problems: Sequence[Problem], decoder: Decoder, of: str = ""
) -> list[list[int]]:
    """Return the prompts' ids; no weights are needed for it. of: said after a problem's number.
    Raises InputError for the first that the decoder cannot decode."""
    from decode.engine.prompts import check, encode

    found = []
    for number, problem in enumerate(problems, 1):
        where = f"{problem.task} {number}{of}"
        found.append(encode(model, problem.prompt, where, raw=True))
        check(model, found[-1], decoder, where)
    return found


def task_sources(task: Task, problems: list[Problem]) -> list[Source]:
    """Return the prompts of a task's problems. A question alone is a user's message where the model
    has a chat template, as text of one's own is."""
    return [
        Source(
            f"{task.name}-{number}",
            f"{task.name} {number}",
            problem.question if problem.given is None else problem.prompt,
            problem,
            task,
        )
        for number, problem in enumerate(problems, 1)
    ]


# Prompts of one's own.


class _Message(BaseModel):
    role: StrictStr
    content: StrictStr


class _Line(Section):
    """A line of a file of prompts."""

    id: StrictInt | StrictStr = 0
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    ids: Annotated[list[StrictInt], Field(min_length=1)] | None = None


def read_prompts(path: str) -> list[Source]:
    """Read the prompts of a JSONL file, - for standard input. Raises InputError naming the line."""
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")  # a byte order mark is no part of the first line
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: cannot be read: {error}") from error
    # Not splitlines: JSON text may hold U+2028 and other characters that it would break at.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{name}: expected at least one line, got none")
    return [_read_line(line, number, f"{name}, line {number}") for number, line in lines]


def _read_line(line: str, number: int, where: str) -> Source:
    try:
        values = json.loads(line)
        read = _Line.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, values, 'the line', _Line)}") from error
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    given = [values[name] for name in ("prompt", "messages", "ids") if getattr(read, name)]
    if len(given) != 1:
        raise InputError(f"{where}: expected one of prompt, messages, ids, got {line[:60]!r}")
    return Source(values.get("id", number), where, given[0])


# Jobs.


def make_jobs(
    model: DiffusionModel,
    sources: list[Source],
    settings: DecoderSettings,
    *,
    raw: bool,
    samples: tuple[str, int],
) -> list[Job]:
    """Make each prompt's jobs, with the seeds of `decode.generate`. No weights are needed for it.

    raw: text is taken without the chat template. samples: how many jobs a prompt, behind the flag
    that asked for them. Raises InputError for the first prompt that cannot be decoded, and where
    several samples would be one and the same answer.
    """
    from decode.engine.prompts import check, encode, fitted

    flag, count = samples
    jobs = []
    for place, source in enumerate(sources):
        # The text of a task is the whole prompt: the task decided whether it wants a template.
        given = source.problem.given if source.problem is not None else None
        ids = encode(model, source.prompt, source.where, raw=raw or isinstance(given, str))
        if source.task is not None:
            decoder = settings.for_task(model, source.task)
        else:
            decoder = fitted(model, ids, settings.decoder(model), source.where)
        decoder.check(model.contract)
        check(model, ids, decoder, source.where)
        for sample in range(count):
            own = source if count == 1 else replace(source, id=f"{source.id}#{sample + 1}")
            jobs.append(Job(own, ids, decoder.sampled(place, sample)))
    name, most = Counter(job.source.id for job in jobs).most_common(1)[0]
    if most > 1:  # an id of the file may also look like one made here, such as a#2
        raise InputError(f"two answers would have the id {name!r}: give other ids")
    if count > 1 and any(job.decoder.greedy for job in jobs):
        raise InputError(
            f"{flag} {count}: greedy answers of one problem are all the same: give a --temperature"
        )
    return jobs


# Headers: the settings that decide a run's results, the first line of its file.


def header(
    options: Any, model: DiffusionModel, weights: str, jobs: Sequence[Job]
) -> dict[str, Any]:
    """Return what decides a run's results: the resolved settings, and the hashes of weights and
    prompts. max_new_tokens and stop are null where they differ between prompts."""
    decoder = asdict(jobs[0].decoder)
    for name in ("max_new_tokens", "stop"):
        if len({getattr(job.decoder, name) for job in jobs}) > 1:
            decoder[name] = None
    prompts = json.dumps([[job.source.id, job.ids, job.decoder.max_new_tokens] for job in jobs])
    return {
        **model_header(options, model, weights),
        "batch_size": options.batch_size,
        "decoder": qualified_name(type(jobs[0].decoder)),
        "options": decoder,
        "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
        "count": len(jobs),
    }


def model_header(options: ModelOptions, model: DiffusionModel, weights: str) -> dict[str, Any]:
    """Return what of its model decides a run's results."""
    return {
        "version": __version__,
        "model": options.model,
        "adapter": options.adapter,
        "merged": options.adapter is not None and options.merge,
        "weights": weights,
        "family": model.family,
        "mask_id": model.mask_id,
        "end_ids": list(model.end_ids),
        "dtype": model.precision,
        "device": model.device.type,
    }
