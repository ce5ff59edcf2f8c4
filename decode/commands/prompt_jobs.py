"""What is to be decoded: held-out problems or prompts, checked and with their decoders."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from d2f.errors import InputError
from d2f.json_file import parse
from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task
from decode.commands.decoder_settings import DecoderSettings
from decode.commands.parser import check_least, chosen_tasks
from decode.commands.pipeline_flags import DEFAULT_PROBLEMS
from decode.commands.task_problems import draw_problems
from decode.decoders import Decoder
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS
from decode.engine.prompts import check, encode, fitted

_KINDS = ("prompt", "messages", "ids")


@dataclass(frozen=True)
class Source:
    """A prompt as it was given. id: its name in the output; where: its name in messages. problem,
    task: what it is of, None for a prompt of one's own."""

    id: int | str
    where: str
    prompt: str | list[int] | list[dict[str, str]]
    problem: Problem | None = None
    task: Task | None = None

    @property
    def texts(self) -> list[str]:
        """The prompt as text, message by message; empty where it was given as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [message["content"] for message in self.prompt if not isinstance(message, int)]


@dataclass(frozen=True)
class PromptJob:
    """A prompt that is checked and ready to decode: its ids, and the decoder with its length and
    seed."""

    source: Source
    ids: list[int]
    decoder: Decoder


def read_sources(options: argparse.Namespace) -> list[Source]:
    """The prompts or held-out problems of a command line. Raises InputError."""
    if options.prompt is not None:
        if not options.prompt:
            raise InputError("--prompt is empty: expected at least one token")
        source = Source("prompt", "--prompt", options.prompt)
        _check_text(source)
        return [source]
    if options.prompts_file is not None:
        return read_prompts(options.prompts_file)
    check_least(options, problems=1)
    count = DEFAULT_PROBLEMS if options.problems is None else options.problems
    return [
        source
        for task in chosen_tasks(options)
        for source in task_sources(task, draw_problems(task, "heldout", count))
    ]


def task_sources(task: Task, problems: list[Problem]) -> list[Source]:
    """The prompts of a task's problems. A question alone is a user's message where the model has a
    chat template, as text of one's own is."""
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


def read_prompts(path: str) -> list[Source]:
    """The prompts of a JSONL file, - for standard input. Raises InputError naming the line."""
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        # A byte order mark is no part of the first line.
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: {error}") from error
    sources: dict[int | str, Source] = {}
    # Not splitlines: JSON text may hold U+2028 and other characters that it would break at.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
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
        values = parse(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(values, dict) or sum(kind in values for kind in _KINDS) != 1:
        raise InputError(
            f"{where}: expected an object with one of {', '.join(_KINDS)}, got {line[:60]!r}"
        )
    unknown = sorted(set(values) - {*_KINDS, "id"})
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}; expected id, {', '.join(_KINDS)}")
    name = values.get("id", number)
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise InputError(f"{where}: id must be text or a whole number, got {name!r}")
    kind = next(kind for kind in _KINDS if kind in values)
    if not _is_prompt(kind, values[kind]):
        expected = {
            "prompt": "text",
            "messages": "a list of objects with role and content, both text",
            "ids": "a list of whole numbers",
        }
        raise InputError(f"{where}: {kind} must be {expected[kind]}, got {line[:60]!r}")
    if not values[kind]:
        raise InputError(f"{where}: {kind} is empty: expected at least one token")
    source = Source(name, where, values[kind])
    _check_text(source)
    return source


def _check_text(source: Source) -> None:
    """Raise InputError for half of a surrogate pair, which no tokenizer takes."""
    try:
        "".join(source.texts).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{source.where} is not Unicode text: {error}") from error


def _is_prompt(kind: str, value: Any) -> bool:
    if kind == "prompt":
        return isinstance(value, str)
    if not isinstance(value, list):
        return False
    if kind == "ids":
        return all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    return all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in value
    )


def known_lengths(sources: list[Source], settings: DecoderSettings) -> list[Any]:
    """The response lengths that the run asks for, as far as they are known without a model."""
    if "max_new_tokens" in settings.given:
        return [settings.given["max_new_tokens"]]
    lengths = {s.task.response_length if s.task else DEFAULT_MAX_NEW_TOKENS for s in sources}
    return sorted(lengths)


def make_jobs(
    model: DiffusionModel, sources: list[Source], settings: DecoderSettings, *, raw: bool, n: int
) -> list[PromptJob]:
    """Each prompt's ids and decoder, n times, with the seeds of `decode.generate`. raw: text is
    taken without the chat template.

    Raises InputError for the first prompt that cannot be decoded.
    """
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
    names = Counter(job.source.id for job in jobs)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise InputError(
            f"{n} samples a prompt: two samples would have the id {twice[0]!r}; give other ids"
        )
    return jobs


def refuse_equal_samples(flag: str, n: int, jobs: list[PromptJob]) -> None:
    """Raise InputError where several samples of a prompt would be one and the same answer."""
    if n > 1 and any(job.decoder.sampling.greedy for job in jobs):
        raise InputError(
            f"{flag} {n}: greedy answers of one problem are all the same: give a --temperature"
        )


def prompts_hash(jobs: list[PromptJob]) -> str:
    """Identity of the prompts, their order and their response lengths."""
    # Settings that all prompts share are in the run's header by name; lengths may differ by prompt.
    content = [[job.source.id, job.ids, job.decoder.max_new_tokens] for job in jobs]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
