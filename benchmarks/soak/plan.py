"""How questions are sent: streamed or not, who leaves and when; and what is no request at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.soak.questions import Question

LEAVING, MALFORMED = 0.2, 0.05  # shares of the requests
OK = 200


@dataclass(frozen=True)
class Planned:
    """One request. question: None for a malformed one. status: which answer is expected. leave:
    the client closes the connection after so many seconds, or before as many pieces of a stream
    have come (`leave_pieces`), whichever is first; None stays to the end."""

    number: int
    path: str
    content: str
    status: int = OK
    question: int | None = None
    stream: bool = False
    leave: float | None = None
    leave_pieces: int | None = None


def plan(questions: Sequence[Question], count: int, seed: int) -> list[Planned]:
    """The requests, the same for the same seed."""
    rng = np.random.default_rng([seed, 1])
    return [_request(rng, number, questions) for number in range(count)]


def _request(rng: np.random.Generator, number: int, questions: Sequence[Question]) -> Planned:
    asked = int(rng.integers(len(questions)))
    question = questions[asked]
    body = dict(question.body)
    if rng.random() < MALFORMED:
        return _malformed(rng, number, question.path, body)
    stream = bool(rng.random() < 0.5)
    if stream:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if rng.random() < 0.2:
            body["events"] = True
    leaves = rng.random() < LEAVING
    return Planned(
        number,
        question.path,
        json.dumps(body),
        question=asked,
        stream=stream,
        # Half of them at once or soon, the others while it runs, or when it has ended already.
        leave=float(rng.choice([0.003, 0.3]) * rng.random()) if leaves else None,
        leave_pieces=int(rng.integers(12)) if leaves and stream else None,
    )


def _malformed(rng: np.random.Generator, number: int, path: str, body: dict[str, Any]) -> Planned:
    """A request that is refused; an error of its own does not depend on the server's limits."""
    good = json.dumps(body)
    chat = path == "chat/completions"
    text = "messages" if chat else "prompt"
    wrong: list[tuple[int, str, dict[str, Any] | str]] = [
        (400, path, good[: len(good) // 2]),
        (400, path, "[1, 2]"),
        (400, path, body | {"temperature": "hot"}),
        (400, path, body | {"temperature": -1}),
        (400, path, body | {"n": 0}),
        (400, path, body | {"max_tokens": 0}),
        (400, path, body | {"decoder": "os:system"}),
        (400, path, body | {"tau_konf": 0.5}),
        (400, path, body | {"logit_bias": {"5": 1}}),
        (400, path, body | {text: []}),
        (400, path, {k: v for k, v in body.items() if k != text}),
        (404, path, body | {"model": "no-such-model"}),
        (404, "embeddings", body),
    ]
    if not chat:
        wrong += [
            (400, path, body | {"prompt": [5, 10**6]}),
            (400, path, body | {"prompt": [5] * 4000}),
            (400, path, body | {"prompt": ""}),
        ]
    status, where, content = wrong[int(rng.integers(len(wrong)))]
    content = content if isinstance(content, str) else json.dumps(content)
    return Planned(number, where, content, status)
