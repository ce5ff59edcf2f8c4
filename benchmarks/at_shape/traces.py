"""The rows that D2F's pipeline feeds, forward by forward, recorded from a small model that is
trained; what they would take at a shape whose forwards were timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import d2f
import decode
from d2f.tasks import make_problems
from d2f.tasks.task import RESPONSE_LENGTH
from decode.engine.prompts import encode


@dataclass(frozen=True)
class Trace:
    """One decoded problem. prompt: its tokens. rows: fed in each forward, the first with the
    prompt. tokens: visible ones."""

    prompt: int
    rows: tuple[int, ...]
    tokens: int


def record(name: str, task: str, problems: int) -> list[Trace]:
    """Held-out problems, one at a time, with D2F's default settings for the model."""
    model = d2f.load(name, device="cpu")
    decoder = decode.D2F(max_new_tokens=RESPONSE_LENGTH[task])
    prompts = [
        encode(model, [{"role": "user", "content": problem.question}], problem.question)
        for problem in make_problems(task, "heldout", problems)
    ]
    return [
        Trace(len(ids), tuple(rows for rows, _ in result.calls), len(result.tokens))
        for ids, result in zip(prompts, decode.generate(model, prompts, decoder), strict=True)
    ]


def pipeline_seconds(traces: Sequence[Trace], forwards: Mapping[int, float]) -> float:
    """What the recorded forwards take. forwards: milliseconds by rows; between two of them a
    straight line."""
    return sum(_milliseconds(trace.rows, forwards) for trace in traces) / 1e3


def autoregressive_seconds(traces: Sequence[Trace], forwards: Mapping[int, float]) -> float:
    """What a token a forward takes for as many tokens: the prompt, which gives the first one, then
    a row for each further one and for the end token."""
    return (
        sum(_milliseconds((trace.prompt, *[1] * trace.tokens), forwards) for trace in traces) / 1e3
    )


def _milliseconds(rows: Sequence[int], forwards: Mapping[int, float]) -> float:
    counts = sorted(forwards)
    return float(np.interp(rows, counts, [forwards[count] for count in counts]).sum())


def widest(traces: Sequence[Trace]) -> int:
    """The most rows of any forward, prompts included."""
    return max(max(*trace.rows, trace.prompt) for trace in traces)
