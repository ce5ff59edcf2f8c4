"""What is to be decoded: held-out problems or prompts, checked and with their decoders."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f import __version__
from d2f.errors import InputError, one_line
from d2f.files import write_beside
from d2f.tasks import Problem, Task
from decode.cli import DecoderSettings, say
from decode.decoders import Decoder, qualified_name
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS
from decode.ledger import Ledger, check_place
from decode.step import Event, Result

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

# Problems of tasks as prompts.

DEFAULT_PROBLEMS = 2


def draw_problems(
    task: Task, split: str, count: int | None, seed: int = 0, option: str = "--problems"
) -> list[Problem]:
    """`count` problems of a split, None for all. Raises InputError, naming the option that they
    were asked for with, for more than there are."""
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
    """The prompts' ids; no weights are needed for it. of: said after a problem's number. Raises
    InputError for the first that the decoder cannot decode."""
    from decode.engine.prompts import check, encode

    found = []
    for number, problem in enumerate(problems, 1):
        where = f"{problem.task} {number}{of}"
        found.append(encode(model, problem.prompt, where, raw=True))
        check(model, found[-1], decoder, where)
    return found


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


def read_sources(options: Any) -> list[Source]:
    """The prompts or held-out problems of a command line. Raises InputError."""
    if options.prompt is not None:
        source = Source("prompt", "--prompt", options.prompt)
        _check_text(source)
        return [source]
    if options.prompts_file is not None:
        return read_prompts(options.prompts_file)
    count = DEFAULT_PROBLEMS if options.problems is None else options.problems
    return [
        source
        for task in options.chosen
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
        values = json.loads(line)
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


# What decides a run's results: the first line of its file of results.


def header(
    options: Any, model: DiffusionModel, weights: str, jobs: list[PromptJob]
) -> dict[str, Any]:
    """What decides a run's results: the resolved settings, and the hashes of weights and prompts.
    max_new_tokens and stop of the decoder are null where they differ between prompts."""
    decoder = asdict(jobs[0].decoder)
    for name in ("max_new_tokens", "stop"):
        if len({getattr(job.decoder, name) for job in jobs}) > 1:
            decoder[name] = None
    return {
        **model_header(options, model, weights),
        "batch_size": options.batch_size,
        "decoder": qualified_name(type(jobs[0].decoder)),
        "options": decoder,
        "prompts": prompts_hash(jobs),
        "count": len(jobs),
    }


def model_header(options: Any, model: DiffusionModel, weights: str) -> dict[str, Any]:
    """What decides a run's results of its model."""
    return {
        "version": __version__,
        "model": options.model,
        "adapter": options.adapter,
        "merged": options.adapter is not None and options.merge,
        "weights": weights,
        "family": model.family,
        "dtype": short_dtype(model),
        "device": model.device.type,
    }


def short_dtype(model: DiffusionModel) -> str:
    """As float32, or with quantised weights as float32 int8."""
    return model.precision


# The trace file: every forward of every request, as JSON.


class Trace:
    """Collects events and writes them at the end; meant for a few prompts, it is kept in memory.

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
        entry = self._requests.setdefault(
            job.source.id, {"id": job.source.id, "prompt": job.ids, "forwards": []}
        )
        entry["forwards"].append(
            {
                "forward": event.forward,
                "blocks": [asdict(block) for block in event.blocks],
                "revealed": [asdict(revealed) for revealed in event.revealed],
            }
        )
        if event.result is not None:
            for forward, (fed, cached) in zip(entry["forwards"], event.result.calls, strict=True):
                forward |= {"fed": fed, "cached": cached}
            entry |= {
                "tokens": event.result.tokens,
                "raw_tokens": event.result.raw_tokens,
                "finish_reason": event.result.finish_reason,
            }

    def write(self, run: dict[str, Any]) -> None:
        """Write the file, whole or not at all."""
        content = {"run": run, "requests": list(self._requests.values())}
        write_beside(self.path, json.dumps(content) + "\n")


# One result as the command reports it, and the totals over many.


@dataclass(frozen=True)
class Record:
    """A line of the output.

    task, right: None for a prompt of one's own. tokens: visible ids, cut before the end token or
    stop string. rows: fed in all forwards. counts: what the decoder counted, by name. seconds:
    decoding alone, without what the command does between forwards.
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
    def tokens_per_forward(self) -> float:
        return len(self.tokens) / self.forwards

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


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
    """A result with the judgement of its text, None for a prompt of one's own."""
    problem = job.source.problem
    return Record(
        id=job.source.id,
        task=problem.task if problem else None,
        question=problem.question if problem else next(reversed(job.source.texts), None),
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


def verdict(record: Record) -> str:
    """right or wrong; for a prompt of one's own, why the response ended."""
    if record.right is None:
        return {"end": "ended", "stop": "stopped", "length": "cut off"}[record.finish_reason]
    return "right" if record.right else "wrong"


def numbers(record: Record) -> str:
    """Tokens, speed and forwards of a result."""
    return (
        f"{len(record.tokens)} tokens  {record.tokens_per_second:.1f} tokens/s  "
        f"{record.forwards} forwards  {record.tokens_per_forward:.2f} tokens/forward"
    )


def plain_line(record: Record) -> str:
    """A result in one line."""
    name, text = one_line(str(record.id)), one_line(shown_text(record))
    return f"{name}  {verdict(record)}  {numbers(record)}  {text}"


def shown_text(record: Record) -> str:
    """The response as text, or as ids for a model without a tokenizer."""
    return record.text if record.text is not None else " ".join(map(str, record.tokens))


def totals(records: Sequence[Record], *, batch_size: int) -> list[str]:
    """A line a task: right k of n, tokens/s, tokens/forward."""
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
