"""A table measured: every method on every task, and what is kept of it."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.paper_figures import compared, figures
from benchmarks.paper.paper_table import Table
from benchmarks.paper.paper_tasks import WholeResponse
from d2f.model import DiffusionModel
from d2f.tasks import Task
from decode.cli import check_options, load, outline, say
from decode.display import ShownProgress, standard_output
from decode.evaluate import evaluate_jobs, line
from decode.jobs import (
    Output,
    PromptJob,
    draw_problems,
    give_notices,
    header,
    known_lengths,
    make_jobs,
    task_sources,
)
from decode.loop import JudgePool, default_jobs
from decode.report import environment
from decode.workers import OneWorker

Jobs = dict[tuple[str, str], list[PromptJob]]
"""By method and task."""


def run(
    table: Table, tasks: dict[str, Task], options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Measure what is left of the table and report all of it. options: of the command line; folder:
    for a file of answers a method and task. Raises InputError before any work."""
    if not options.end_early:
        tasks = {name: WholeResponse(task) for name, task in tasks.items()}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    about: dict[str, Any] = {}
    jobs = _jobs(table, tasks, options)
    give_notices(tasks.values())
    for adapted in (False, True):
        methods = [name for name, method in table.methods.items() if method.adapter is adapted]
        if not methods:
            continue
        own = _options(options, adapted)
        model, weights = load(own)
        about = environment(model)
        for method in methods:
            for name, task in tasks.items():
                run_of = {**header(own, model, weights, jobs[method, name]), "task": task.identity}
                path = folder / f"{method}-{name}.jsonl"
                found[method, name] = _measure(
                    model,
                    task,
                    jobs[method, name],
                    path,
                    run_of,
                    cut_at_end=table.cut_at_end,
                )
        del model
        _free()
    return {
        "title": table.title,
        "source": table.source,
        "notes": list(table.notes),
        "model": options.model,
        "adapter": options.adapter,
        "end_early": options.end_early,
        "environment": about,
        "tasks": {name: _rows(table, name, found) for name in tasks},
    }


def _options(options: argparse.Namespace, adapted: bool) -> argparse.Namespace:
    """For the model with or without its adapter."""
    own = argparse.Namespace(**vars(options))
    if not adapted:
        own.adapter = None
    return own


def _jobs(table: Table, tasks: dict[str, Task], options: argparse.Namespace) -> Jobs:
    """All that is to be decoded, checked from the cheapest to the dearest: settings, rows, the
    models' shapes. Raises InputError."""
    settings = {
        (method, name): table.tasks[name]
        .rows[method]
        .settings(options.max_new_tokens, end_early=options.end_early)
        for method in table.methods
        for name in tasks
    }
    sources = {
        name: task_sources(task, draw_problems(task, "heldout", options.limit, option="--limit"))
        for name, task in tasks.items()
    }
    for (_, name), chosen in settings.items():
        chosen.check(known_lengths(sources[name], chosen))
    check_options(options)
    shapes: dict[bool, DiffusionModel] = {}
    found: Jobs = {}
    for (method, name), chosen in settings.items():
        adapted = table.methods[method].adapter
        if adapted not in shapes:
            shapes[adapted] = outline(options.model, options.adapter if adapted else None)
        found[method, name] = make_jobs(shapes[adapted], sources[name], chosen, raw=False, n=1)
    return found


def _measure(
    model: DiffusionModel,
    task: Task,
    jobs: list[PromptJob],
    path: Path,
    run_of: dict[str, Any],
    *,
    cut_at_end: bool,
) -> dict[str, Any]:
    """One method on one task; answers that are in the file already are not decoded again."""
    output = Output(path, run_of, [job.source.id for job in jobs])
    if output.done:
        say(f"notice: {len(output.done)} of {len(jobs)} answers are already in {path}")
    with ShownProgress(standard_output(), "answers") as shown, JudgePool(default_jobs()) as judges:
        row = evaluate_jobs(
            OneWorker(model),
            task,
            jobs,
            split="heldout",
            batch_size=1,
            output=output,
            shown=shown,
            judges=judges,
        )
        shown.say(f"{path.stem}: {line(row)}")
    records = [output.done[job.source.id] for job in jobs]
    cuts = task.cuts if isinstance(task, WholeResponse) else task.stop
    return {
        **row,
        "figures": figures(records, cuts, model.tokenizer, cut_at_end=cut_at_end),
        "verdicts": [bool(record.right) for record in records],
    }


def _rows(
    table: Table, task: str, found: dict[tuple[str, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of a task, each against the first."""
    base = found[next(iter(table.methods)), task]
    rows = []
    for method, kind in table.methods.items():
        own = found[method, task]
        against = compared(own["verdicts"], own["figures"], base["verdicts"], base["figures"])
        paper = table.tasks[task].rows[method].paper.model_dump()
        rows.append(
            {"method": method, "title": kind.title, **own, "against": against, "paper": paper}
        )
    return rows


def _free() -> None:
    """Give a model's memory back before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
