"""Raw measurements: one record a run, and how they are written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from d2f.tasks import before_stop
from decode.comparison.answers import Run
from decode.comparison.entry_prompts import count_tokens
from decode.comparison.workload import Workload

COLUMNS = (
    "item", "submitted", "prefill", "first", "finished", "first_tokens", "tokens", "own_tokens",
    "forwards", "rows", "attempts", "right", "text", "error", "counts",
)  # fmt: skip

Key = tuple[str, int, int | None, str]  # workload, concurrency, repetition, entry of a run


@dataclass(frozen=True)
class Judged:
    """An answer as it counts. tokens: visible ones, by the common tokenizer, 0 where the request
    failed; right: None where nothing judges. The others are as in `Answer`."""

    item: int
    submitted: float
    prefill: float | None
    first: float | None
    finished: float | None
    first_tokens: int
    tokens: int
    own_tokens: int | None
    forwards: int | None
    rows: int | None
    attempts: int
    right: bool | None
    text: str
    error: str | None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One run of one entry. repetition: from 0; None for the pass that only judges."""

    entry: str
    workload: str
    concurrency: int
    repetition: int | None
    seconds: float
    calls: int | None
    peak_bytes: int | None
    answers: list[Judged]

    @property
    def key(self) -> Key:
        return self.workload, self.concurrency, self.repetition, self.entry

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


_RECORD = TypeAdapter(Record)


def judge(
    run: Run,
    workload: Workload,
    tokenizer: Any,
    *,
    entry: str,
    concurrency: int,
    repetition: int | None,
) -> Record:
    """Count and judge the answers of a run; a failed request has no tokens and is wrong, and none
    has more tokens than were asked for."""
    texts = ["" if a.error else before_stop(a.text, workload.stop) for a in run.answers]
    answers = []
    for answer, text, tokens in zip(
        run.answers, texts, count_tokens(tokenizer, texts), strict=True
    ):
        tokens = min(tokens, workload.max_new_tokens)  # by another tokenizer than its own
        right = workload.items[answer.item].right(text)
        answers.append(
            Judged(
                **vars(answer)
                | {
                    "first_tokens": min(answer.first_tokens, tokens),
                    "tokens": tokens,
                    "right": False if answer.error and right is not None else right,
                    "text": text,
                }
            )
        )
    return Record(
        entry, workload.name, concurrency, repetition, run.seconds, run.calls, run.peak_bytes,
        answers,
    )  # fmt: skip


def as_json(records: list[Record]) -> dict[str, Any]:
    """Records as plain values: answers are lists under common columns, equal texts are kept
    once."""
    texts: dict[str, int] = {}
    runs = []
    for record in records:
        answers = []
        for answer in record.answers:
            values = dict(vars(answer))
            # Repetitions mostly give the same text: written once, and referred to by number.
            values["text"] = texts.setdefault(answer.text, len(texts))
            answers.append([_short(values[column]) for column in COLUMNS])
        runs.append({**vars(record), "seconds": _short(record.seconds), "answers": answers})
    return {"columns": list(COLUMNS), "texts": list(texts), "runs": runs}


def from_json(values: dict[str, Any]) -> list[Record]:
    """The records that `as_json` wrote. Raises ValueError, LookupError or TypeError."""
    records = []
    for run in values["runs"]:
        answers = []
        for row in run["answers"]:
            fields = dict(zip(values["columns"], row, strict=True))
            answers.append(fields | {"text": values["texts"][fields["text"]]})
        records.append(_RECORD.validate_json(json.dumps(run | {"answers": answers}), strict=True))
    return records


def _short(value: Any) -> Any:
    """Times to the microsecond."""
    return round(value, 6) if isinstance(value, float) else value
