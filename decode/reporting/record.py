"""One result as the command reports it, and the totals over many."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from d2f.errors import one_line
from d2f.json_file import parse
from decode.commands.prompt_jobs import PromptJob
from decode.engine.result import Result
from decode.reporting.ledger import Ledger, json_line


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

    @staticmethod
    def from_json(values: Any) -> Record:
        """The record of a line. Raises ValueError."""
        if not isinstance(values, dict) or set(values) != {f.name for f in fields(Record)}:
            raise ValueError("not the keys of a result")
        # In JSON mode, as strict validation of Python values would want a Record and not a mapping.
        record = _RECORD.validate_json(json.dumps(values), strict=True)
        if record.forwards < 1 or not record.seconds > 0:
            raise ValueError("nothing is decoded in no forward or no time")
        return record


_RECORD = TypeAdapter(Record)


class Output(Ledger[int | str, Record]):
    """The file of --output. ids: of the prompts of the run."""

    FILE = "exists and is not an output of this command"
    ENTRY = "a result of this run"

    def __init__(self, path: str | Path, run: dict[str, Any], ids: Collection[int | str]):
        self.ids = set(ids)
        super().__init__(path, run)

    def key(self, entry: Record) -> int | str:
        return entry.id

    def line(self, entry: Record) -> str:
        return json_line(asdict(entry))

    def parsed(self, line: bytes, where: str) -> Record:
        record = Record.from_json(parse(line, nan=True))
        if record.id not in self.ids:
            raise ValueError("no prompt of this run")
        return record


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
