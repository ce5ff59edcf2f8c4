"""A sample, and its place in a packed row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One prompt with its response. answer: response tokens up to and with the first end token
    (all of them where the response was cut); what follows is the tail of end tokens."""

    index: int
    prompt: list[int]
    response: list[int]
    answer: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class HeldOut:
    """Samples of a held-out loss, which are never trained on. said: what they are, in a line."""

    samples: list[Sample]
    said: str


@dataclass(frozen=True)
class Placed:
    """A sample in a packed row: it occupies ``[start, start + len(sample))``."""

    sample: Sample
    start: int
