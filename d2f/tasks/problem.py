"""What a problem is, what a task has to draw to make one, and text made of a row by a template."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jinja2 import StrictUndefined, Template, TemplateError, UndefinedError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from d2f.data import BadRecord
from d2f.errors import InputError

Item = TypeVar("Item")
Message = dict[str, Any]
"""`role` and `content`; a last one of the assistant's with `prefix` true is the beginning of the
answer (as in Mistral's and DeepSeek's API), which `d2f.tokenizer` leaves open."""


@dataclass(frozen=True)
class Problem:
    """Hold a question with its answer.

    task: the task's name. question: the user's message. answer: of a generated problem the full
    worked response, else the reference that a judge compares with. key: the problem's identity
    without its wording; equal keys are the same problem. given: what the model is given, where that
    is not the question alone: text as it is, or chat messages. row: the row of data that it was
    made of.
    """

    task: str
    question: str
    answer: str
    key: str
    given: str | Sequence[Message] | None = None
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> str | list[Message]:
        """Text to be taken as it is, or chat messages."""
        if self.given is None:
            return [{"role": "user", "content": self.question}]
        return self.given if isinstance(self.given, str) else list(self.given)


class Draft(NamedTuple):
    """A problem drawn but not yet put into words: enough to know its split.

    write: make question and answer; the random numbers choose the words.
    """

    key: str
    write: Callable[[np.random.Generator], tuple[str, str]]


def pick(rng: np.random.Generator, items: Sequence[Item]) -> Item:
    """Pick one item, each as likely; several times quicker than rng.choice."""
    return items[int(rng.random() * len(items))]


def pick_integer(rng: np.random.Generator, low: int, high: int) -> int:
    """Pick an integer of low..high, both included, each as likely."""
    return low + int(rng.random() * (high - low + 1))


# Text made of a row of data, by a template in Jinja's sandbox: ``Question: {{ question }}``.

SECONDS, MEGABYTES, BITS = 2.0, 512, 10_000


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # A long operation on one large number cannot be interrupted.
        factor = right if operator == "**" else 1
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * factor > BITS:
            raise OverflowError(f"{operator}: the number is too large")
        return super().call_binop(context, operator, left, right)


# A template is kept to the letter: the line end of its last line is part of the prompt.
_ENVIRONMENT = _Environment(undefined=StrictUndefined, keep_trailing_newline=True)


def columns_of(template: str) -> set[str]:
    """List the columns that a template reads. Raises InputError for a bad template."""
    try:
        return set(meta.find_undeclared_variables(_ENVIRONMENT.parse(template)))
    except (TemplateError, RecursionError) as error:
        raise InputError(f"the template {template[:60]!r} cannot be read: {error}") from error


def render(template: str, row: Mapping[str, Any]) -> str:
    """Render a template with a row. Raises BadRecord."""
    try:
        with bounded():
            text = _compiled(template).render(row)
        text.encode()
    except Exception as error:  # of the template's own arithmetic too
        why = str(error) or type(error).__name__
        if isinstance(error, UndefinedError):
            why += f", there are {', '.join(map(str, row))}"
        raise BadRecord(f"the template {template[:60]!r}: {why}") from error
    return text


@lru_cache(1000)
def _compiled(template: str) -> Template:
    return _ENVIRONMENT.from_string(template)


_ONE_AT_A_TIME = threading.Lock()  # the limit of memory is that of the process


@contextmanager
def bounded() -> Iterator[float]:
    """Bound what a task file's templates and patterns take, in any thread: TimeoutError after
    SECONDS of Python code, MemoryError beyond MEGABYTES more than there are. Yields SECONDS, for
    code that is not Python's."""

    def stop(*_: object) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError(f"takes more than {SECONDS:g} seconds")
        return stop

    with _ONE_AT_A_TIME, ExitStack() as stack:
        if sys.platform == "linux":
            limits = resource.getrlimit(resource.RLIMIT_AS)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + MEGABYTES * 2**20
            finite = [limit for limit in (most, *limits) if limit != resource.RLIM_INFINITY]
            stack.callback(resource.setrlimit, resource.RLIMIT_AS, limits)
            resource.setrlimit(resource.RLIMIT_AS, (min(finite), limits[1]))
        # Called before each line that this thread runs; a signal would come to the main one alone.
        stack.callback(sys.settrace, sys.gettrace())
        deadline = time.monotonic() + SECONDS
        sys.settrace(stop)
        yield SECONDS
