"""The prompts of a comparison, in one order for every entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from d2f.tasks import Problem, Task
from decode.commands.task_problems import draw_problems
from decode.comparison.comparison_config import CompareConfig
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS

if TYPE_CHECKING:
    from decode.engine.prompts import Prompt

OWN_PROMPTS = "prompts"  # the name of the workload that a prompts file is


@dataclass(frozen=True)
class Item:
    """One prompt; text is taken as it is. problem, task: None where nothing can judge the
    answer."""

    id: str
    prompt: Any  # decode.engine.prompts.Prompt
    problem: Problem | None = None
    task: Task | None = None

    def right(self, text: str) -> bool | None:
        """Whether text solves the problem, None without one."""
        if self.problem is None or self.task is None:
            return None
        return self.task.right(self.problem, text)


@dataclass(frozen=True)
class Workload:
    """Prompts that share their rules. problems, waves: as `CompareConfig` has them."""

    name: str
    items: list[Item]
    problems: int
    waves: int
    max_new_tokens: int
    stop: tuple[str, ...]

    @property
    def task(self) -> str | None:
        return None if self.name == OWN_PROMPTS else self.name

    def timed(self, concurrency: int) -> int:
        """How many of items, the first ones, speed is measured on."""
        return min(len(self.items), max(self.problems, self.waves * concurrency))


def make_workloads(config: CompareConfig) -> list[Workload]:
    """One a task, or the prompts file's. Raises InputError."""
    stop = config.stop
    if config.prompts_file is not None:
        items = _read(config.prompts_file)
        length = config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        return [Workload(OWN_PROMPTS, items, len(items), config.waves, length, stop)]
    workloads = []
    for task in config.chosen:
        items = [
            Item(f"{task.name}-{n}", problem.prompt, problem, task)
            for n, problem in enumerate(_problems(task, config), 1)
        ]
        length = config.max_new_tokens or task.response_length
        stops = (*task.stop, *stop)
        workloads.append(Workload(task.name, items, config.problems, config.waves, length, stops))
    return workloads


def _problems(task: Task, config: CompareConfig) -> list[Problem]:
    """As many as are asked for; of data that has fewer than the default, all that there are. Raises
    InputError."""
    where = f"{task.name}: problems"
    judged, in_waves = config.accuracy_problems, config.waves * config.concurrency[-1]
    if task.default_count is None:
        there = len(draw_problems(task, config.split, None, config.seed, where))
        in_waves = min(in_waves, there)
        if "accuracy_problems" not in config.model_fields_set:
            judged = min(judged, there)
    count = max(config.problems, judged, in_waves)
    return draw_problems(task, config.split, count, config.seed, where)


def _read(path: str) -> list[Item]:
    from decode.commands.prompt_jobs import read_prompts

    items = []
    for source in read_prompts(path):
        prompt: Prompt = source.prompt
        if isinstance(prompt, str):  # one user message, as decode.pipeline takes it
            prompt = [{"role": "user", "content": prompt}]
        items.append(Item(str(source.id), prompt))
    return items
