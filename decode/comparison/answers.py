"""What one request gave, whichever entry answered it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Answer:
    """One request; times in seconds from the start of its run, None where unknown.

    item: its place in the workload. submitted: when it was sent, after waiting for its turn.
    prefill: the end of the first forward it was in, or the first piece of a streamed answer.
    first: when the first token of the final text could be shown. finished: when all was there.
    first_tokens: tokens there at `prefill`. text: what a reader gets. own_tokens: tokens as the
    entry itself counts them, its end token with it where it made one. forwards, rows: calls of the
    model that the request was in, and rows fed for it. attempts: tries that it took. error: why
    the last of them failed. counts: what its decoder counted, by name.
    """

    item: int
    submitted: float = 0.0
    prefill: float | None = None
    first: float | None = None
    finished: float | None = None
    first_tokens: int = 0
    text: str = ""
    own_tokens: int | None = None
    forwards: int | None = None
    rows: int | None = None
    attempts: int = 1
    error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """The answers of one run of a workload at one concurrency.

    seconds: wall time from the first request to the last answer. calls: calls of the model, None
    where unknown; a call that serves several requests is one. peak_bytes: most memory held
    while it ran, None where it could not be read.
    """

    answers: list[Answer]
    seconds: float
    calls: int | None = None
    peak_bytes: int | None = None
