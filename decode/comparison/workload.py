"""The prompts of a comparison, in one order for every entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError
from d2f.tasks import Problem, make_problems
from d2f.tasks import check as judge
from d2f.tasks.registry import RESPONSE_LENGTH
from decode.comparison.comparison_config import CompareConfig
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS

if TYPE_CHECKING:
    from decode.engine.prompts import Prompt

OWN_PROMPTS = "prompts"  # the name of the workload that a prompts file is


@dataclass(frozen=True)
class Item:
    """One prompt. problem: None where nothing can judge the answer."""

    id: str
    prompt: Any  # decode.engine.prompts.Prompt
    problem: Problem | None = None

    def right(self, text: str) -> bool | None:
        """Whether text solves the problem, None without one."""
        return None if self.problem is None else judge(self.problem, text)


@dataclass(frozen=True)
class Workload:
    """Prompts that share their rules. timed: the first of items that speed is measured on."""

    name: str
    items: list[Item]
    timed: int
    max_new_tokens: int
    stop: tuple[str, ...]

    @property
    def task(self) -> str | None:
        return None if self.name == OWN_PROMPTS else self.name


def make_workloads(config: CompareConfig) -> list[Workload]:
    """One a task, or the prompts file's. Raises InputError."""
    stop = config.stop
    if config.prompts_file is not None:
        items = _read(config.prompts_file)
        length = config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        return [Workload(OWN_PROMPTS, items, len(items), length, stop)]
    workloads = []
    for task in config.tasks:
        count = max(config.problems, config.accuracy_problems)
        try:
            problems = make_problems(task, config.split, count, config.seed)
        except ValueError as error:
            raise InputError(f"{task}: {count} problems: {error}") from error
        items = [
            Item(f"{task}-{n}", [{"role": "user", "content": problem.question}], problem)
            for n, problem in enumerate(problems, 1)
        ]
        length = config.max_new_tokens or RESPONSE_LENGTH[task]
        workloads.append(Workload(task, items, config.problems, length, stop))
    return workloads


def _read(path: str) -> list[Item]:
    from decode.commands.prompt_jobs import read_prompts

    items = []
    for source in read_prompts(path):
        prompt: Prompt = source.prompt
        if isinstance(prompt, str):  # one user message, as decode.pipeline takes it
            prompt = [{"role": "user", "content": prompt}]
        items.append(Item(str(source.id), prompt))
    return items


def visible(text: str, stop: tuple[str, ...]) -> str:
    """Text before the first stop string: what a reader gets."""
    cuts = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(cuts)] if cuts else text
