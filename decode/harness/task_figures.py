"""What decoding and scoring cost, task by task, for lm-eval's results file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.engine.result import Result
from decode.harness.monte_carlo import Score


@dataclass
class TaskFigures:
    """Of one task and kind of request, what was computed in this run and not read from a cache.

    requests: how many, an answer that is asked for again as another. tokens: of responses, visible
    ones (before the first end id or stop string); of likelihoods, those that were scored. forwards:
    calls of the model that each request was in, added. seconds: wall time of the task's requests of
    this kind, of several processes the longest. truncated: requests whose prompt lost tokens at its
    left, for the model's context. standard_errors: of likelihoods, by (document, request of it);
    empty where they are exact.
    """

    requests: int = 0
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    truncated: int = 0
    standard_errors: dict[tuple[int, int], float | None] = field(default_factory=dict)

    def add(self, other: TaskFigures) -> None:
        """Take in those of another process, which ran at the same time."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.seconds = max(self.seconds, other.seconds)
        self.truncated += other.truncated
        self.standard_errors |= other.standard_errors

    def add_result(self, result: Result) -> None:
        """Count a response."""
        self.requests += 1
        self.tokens += len(result.tokens)
        self.forwards += result.forwards

    def add_scores(self, place: tuple[int, int], tokens: int, scores: Sequence[Score]) -> float:
        """Count a text's likelihood, found as one score or as those of its windows, of `tokens`
        tokens together; the sum of its scores. place: (document, request of it)."""
        self.requests += 1
        self.tokens += tokens
        self.forwards += sum(score.forwards for score in scores)
        errors = [score.standard_error for score in scores]
        if any(error != 0 for error in errors):  # windows are drawn apart: their variances add up
            known = None if None in errors else sum(error**2 for error in errors if error) ** 0.5
            self.standard_errors[place] = known
        return sum(score.loglikelihood for score in scores)

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.tokens} tokens in {self.forwards} forwards "
            f"({self.per_forward:.2f} a forward) and {self.seconds:.1f} s "
            f"({self.per_second:.1f} a second)"
        )

    @property
    def per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def report(self) -> dict[str, Any]:
        """As the results file has it."""
        found: dict[str, Any] = {
            "requests": self.requests,
            "tokens": self.tokens,
            "forwards": self.forwards,
            "seconds": self.seconds,
            "tokens_per_forward": self.per_forward,
            "tokens_per_second": self.per_second,
            "truncated_prompts": self.truncated,
        }
        if self.standard_errors:
            errors: dict[str, list[float | None]] = {}
            for (document, _), error in sorted(self.standard_errors.items()):
                short = None if error is None else float(f"{error:.4g}")
                errors.setdefault(str(document), []).append(short)
            known = [error for error in self.standard_errors.values() if error is not None]
            found["mean_standard_error"] = sum(known) / len(known) if known else None
            found["standard_errors"] = errors  # of each document's requests, in their order
        return found


Figures = dict[tuple[str, str], TaskFigures]  # (task, kind of request)


def together(processes: Iterable[Figures]) -> Figures:
    """The figures of several processes as one."""
    found: Figures = {}
    for figures in processes:
        for key, one in figures.items():
            found.setdefault(key, TaskFigures()).add(one)
    return found


def reports(figures: Figures) -> dict[str, dict[str, Any]]:
    """Task: kind of request: its figures."""
    found: dict[str, dict[str, Any]] = {}
    for (task, kind), one in sorted(figures.items()):
        found.setdefault(task, {})[kind] = one.report()
    return found
