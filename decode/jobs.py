"""What a command decodes: held-out problems or prompts, each checked, with its decoder; and what it
says of each result."""

from __future__ import annotations

import hashlib
import json
import os
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
from d2f.errors import InputError, one_line
from d2f.files import write_beside
from d2f.tasks import Problem, Task
from decode.cli import DecoderSettings, ModelOptions
from decode.decoders import Decoder, qualified_name
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS
from decode.ledger import Ledger, check_place
from decode.step import Event, Result

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

Prompt = str | list[int] | list[dict[str, Any]]
"""Text, token ids, or chat messages."""


@dataclass(frozen=True)
class Source:
    """A prompt as it was given.

    id: its name in the output.
    where: its name in messages.
    problem, task: what it is of, None for a prompt of one's own.
    """

    id: int | str
    where: str
    prompt: Prompt
    problem: Problem | None = None
    task: Task | None = None

    @property
    def question(self) -> str | None:
        """What is asked, as a person reads it; None where it was given as ids."""
        if self.problem is not None:
            return self.problem.question
        last = self.prompt if isinstance(self.prompt, str) else self.prompt[-1]
        return (
            last["content"] if isinstance(last, dict) else last if isinstance(last, str) else None
        )


@dataclass(frozen=True)
class PromptJob:
    """A prompt that is checked and ready to decode: its ids, and the decoder with its length and
    seed."""

    source: Source
    ids: list[int]
    decoder: Decoder


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
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: {error}") from error
    sources: dict[int | str, Source] = {}
    # Not splitlines: JSON text may hold U+2028 and other characters that it would break at.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            source = _read_line(line, number, f"{name}, line {number}")
            if source.id in sources:
                raise InputError(
                    f"{source.where}: the id {source.id!r} is that of {sources[source.id].where}"
                )
            sources[source.id] = source
    if not sources:
        raise InputError(f"{name}: expected at least one line, got none")
    return list(sources.values())


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


def known_lengths(sources: list[Source], settings: DecoderSettings) -> list[int]:
    """Return the response lengths that the run asks for, as far as no model is needed for it."""
    if "max_new_tokens" in settings.given:
        return [settings.given["max_new_tokens"]]
    lengths = {s.task.response_length if s.task else DEFAULT_MAX_NEW_TOKENS for s in sources}
    return sorted(lengths)


def make_jobs(
    model: DiffusionModel, sources: list[Source], settings: DecoderSettings, *, raw: bool, n: int
) -> list[PromptJob]:
    """Return each prompt's ids and decoder, n times, with the seeds of `decode.generate`. raw: text
    is taken without the chat template. Raises InputError for the first prompt that cannot be
    decoded."""
    from decode.engine.prompts import check, encode, fitted

    jobs = []
    for place, source in enumerate(sources):
        # Text that a task gives is the whole prompt: it said itself whether it wants a template.
        given = source.problem.given if source.problem is not None else None
        ids = encode(model, source.prompt, source.where, raw=raw or isinstance(given, str))
        if source.task is not None:
            decoder = settings.for_task(model, source.task)
        else:
            decoder = fitted(model, ids, settings.decoder(model), source.where)
        decoder.check(model.contract)
        check(model, ids, decoder, source.where)
        for sample in range(n):
            own = source if n == 1 else replace(source, id=f"{source.id}#{sample + 1}")
            jobs.append(PromptJob(own, ids, decoder.sampled(place, sample)))
    # An id of the file may look like one made here, such as a#2.
    name, count = Counter(job.source.id for job in jobs).most_common(1)[0]
    if count > 1:
        raise InputError(
            f"{n} samples a prompt: two samples would have the id {name!r}; give other ids"
        )
    return jobs


def refuse_equal_samples(flag: str, n: int, jobs: list[PromptJob]) -> None:
    """Raise InputError where several samples of a prompt would be one and the same answer."""
    if n > 1 and any(job.decoder.sampling.greedy for job in jobs):
        raise InputError(
            f"{flag} {n}: greedy answers of one problem are all the same: give a --temperature"
        )


# What decides a run's results: the first line of its file of results.


def header(
    options: Any, model: DiffusionModel, weights: str, jobs: list[PromptJob]
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
    """Return what decides a run's results of its model."""
    return {
        "version": __version__,
        "model": options.model,
        "adapter": options.adapter,
        "merged": options.adapter is not None and options.merge,
        "weights": weights,
        "family": model.family,
        "dtype": model.precision,
        "device": model.device.type,
    }


class Trace:
    """Collect events and write them at the end; meant for a few prompts, it is kept in memory.

    The file: ``run`` (the settings) and ``requests``, each with id, prompt (ids), tokens, and
    ``forwards``: rows fed, rows already cached, blocks (response positions ``[start, end)``, state,
    tokens, null where masked) and what was revealed (position, token, confidence).
    """

    def __init__(self, path: str):
        self.path = Path(os.path.realpath(path))
        check_place(self.path, "--trace")
        self._requests: dict[int | str, dict[str, Any]] = {}

    def add(self, job: PromptJob, event: Event) -> None:
        """Take one forward of a request."""
        name, result = job.source.id, event.result
        entry = self._requests.setdefault(name, {"id": name, "prompt": job.ids, "forwards": []})
        entry["forwards"].append(
            {
                "forward": event.forward,
                "blocks": [asdict(block) for block in event.blocks],
                "revealed": [asdict(revealed) for revealed in event.revealed],
            }
        )
        if result is not None:
            for forward, (fed, cached) in zip(entry["forwards"], result.calls, strict=True):
                forward |= {"fed": fed, "cached": cached}
            for key in ("tokens", "raw_tokens", "finish_reason"):
                entry[key] = getattr(result, key)

    def write(self, run: dict[str, Any]) -> None:
        """Write the file, whole or not at all."""
        content = {"run": run, "requests": list(self._requests.values())}
        write_beside(self.path, json.dumps(content) + "\n")


# One result as the command reports it, and the totals over many.


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

    @property
    def group(self) -> str:
        return self.task or "prompts"

    @property
    def verdict(self) -> str:
        """right or wrong; for a prompt of one's own, why the response ended."""
        if self.right is None:
            return {"end": "ended", "stop": "stopped", "length": "cut off"}[self.finish_reason]
        return "right" if self.right else "wrong"

    @property
    def numbers(self) -> str:
        """Tokens, speed and forwards."""
        tokens = len(self.tokens)
        return (
            f"{tokens} tokens  {tokens / self.seconds:.1f} tokens/s  {self.forwards} forwards  "
            f"{tokens / self.forwards:.2f} tokens/forward"
        )

    @property
    def shown(self) -> str:
        """The response as text, or as ids for a model without a tokenizer."""
        return self.text if self.text is not None else " ".join(map(str, self.tokens))

    @property
    def line(self) -> str:
        """All of it in one line, without control characters."""
        name, text = one_line(str(self.id)), one_line(self.shown)
        return f"{name}  {self.verdict}  {self.numbers}  {text}"


class Output(Ledger):
    """The file of --output. done: its records, by the ids of their prompts."""

    def __init__(self, path: str | Path, run: dict[str, Any]):
        super().__init__(path, run)
        self.done = {key: Record(**row) for key, row in self.rows.items()}

    def add_record(self, record: Record) -> None:
        """Append a record. Raises OutputError."""
        self.add(asdict(record))
        self.done[record.id] = record


def make_record(job: PromptJob, result: Result, seconds: float, right: bool | None) -> Record:
    """Make the record of a result. right: the judgement of its text."""
    problem = job.source.problem
    return Record(
        id=job.source.id,
        task=problem.task if problem else None,
        question=job.source.question,
        text=result.text,
        right=right,
        finish_reason=result.finish_reason,
        prompt_tokens=result.prompt_tokens,
        max_new_tokens=job.decoder.length,
        forwards=result.forwards,
        rows=sum(rows for rows, _ in result.calls),
        counts=result.counts,
        seconds=seconds,
        tokens=result.tokens,
        raw_tokens=result.raw_tokens,
    )


def totals(records: Sequence[Record], *, batch_size: int) -> list[str]:
    """Write a line for each task: right k of n, tokens/s, tokens/forward."""
    # In a batch the seconds of requests overlap, so this is what each of them had.
    speed = "tokens/s" if batch_size == 1 else "tokens/s a prompt"
    lines = []
    for group in dict.fromkeys(record.group for record in records):
        part = [record for record in records if record.group == group]
        tokens = sum(len(record.tokens) for record in part)
        forwards = sum(record.forwards for record in part)
        seconds = sum(record.seconds for record in part)
        judged = [record.right for record in part if record.right is not None]
        what = f"right {sum(judged)} of {len(judged)}" if judged else f"{len(part)} decoded"
        lines.append(
            f"{group:<10} {what:<16} {tokens / seconds:.1f} {speed}  "
            f"{tokens / forwards:.2f} tokens/forward"
        )
    return lines
