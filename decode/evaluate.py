"""Decode problems of tasks with one model and one decoder, and say how right and how fast the
answers are: d2f evaluate."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from tyro.conf import arg

from d2f import flags as command_line
from d2f.command import command, say
from d2f.errors import InputError, OutputError
from d2f.files import locked, write_beside
from d2f.flags import check_least
from d2f.quiet import quiet
from d2f.tasks import Problem, Task
from decode.cli import (
    BatchOptions,
    DecoderOptions,
    ModelOptions,
    TaskOptions,
    WorkerOptions,
    check_samples,
    checked_outline,
    followed,
    read_settings,
)
from decode.decoders import Decoder
from decode.display import Display, ShownProgress, standard_output
from decode.jobs import (
    Job,
    Record,
    draw_problems,
    encode_problems,
    give_notices,
    header,
    make_jobs,
    task_sources,
)
from decode.judging import JudgePool, default_jobs
from decode.ledger import Ledger, check_folder, check_place, refuse_early
from decode.loop import decode_jobs
from decode.report import Measurements, doubt_of, environment, wilson
from decode.step import Result, p_cache_of
from decode.workers import workers

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

ANSWERS = "answers.jsonl"  # in the folder of --output


@dataclass(kw_only=True)
class ProblemOptions:
    """Choose problems, and how often each is answered."""

    split: Annotated[Literal["tuning", "heldout", "all"], arg(metavar="NAME")] = "heldout"
    """tuning, heldout or all, of data every row"""
    problems: Annotated[int | None, arg(metavar="N")] = None
    """of each task (default: 500 generated ones, all of data)"""
    samples: Annotated[int, arg(metavar="N")] = 1
    """answers a problem; several need a --temperature"""
    pass_at: Annotated[str, arg(metavar="LIST")] = ""
    """1,10: the chance that one of so many samples is right"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, problems=1)
        check_samples("--samples", self.samples)
        _ = self.passes

    @property
    def passes(self) -> list[int]:
        """The numbers of --pass-at."""
        given = self.pass_at.split(",") if self.pass_at else []
        found = [int(part) if part.strip().isdecimal() else 0 for part in given]
        if len(set(found)) < len(found) or not all(1 <= k <= self.samples for k in found):
            raise InputError(
                f"--pass-at must be whole numbers from 1 to --samples {self.samples}, each once, "
                f"as 1,10: got {self.pass_at!r}"
            )
        return found


@dataclass(kw_only=True)
class OutputOptions(BatchOptions):
    """Run it, and write results."""

    output: Annotated[str | None, arg(metavar="DIR")] = None
    """folder for the answers as they come, where the same command again goes on, and report.json"""
    json: Annotated[Path | None, arg(metavar="FILE")] = None
    """file for the numbers alone"""
    judge_jobs: Annotated[int | None, arg(metavar="N")] = None
    """processes of the judges python and math (default: one a core)"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        super().check()
        check_least(self, judge_jobs=1)


@dataclass(kw_only=True)
class Options(
    ModelOptions, TaskOptions, ProblemOptions, DecoderOptions, OutputOptions, WorkerOptions
):
    """Decode problems of tasks and say for each: accuracy with its 95 % interval, forwards, visible
    tokens (before the first end token) and tokens per forward; of several samples pass@k and the
    majority vote.

    Exit status: 0 done; 1 NaN or infinite logits; 2 bad input, found before any work; 130
    interrupted, the same command goes on.
    """

    examples = (
        "d2f evaluate --tasks story,sudoku --problems 200 --json numbers.json",
        "d2f evaluate --data problems.jsonl --judge numeric --output runs/mine",
    )


@command(interrupted="interrupted; the answers in an --output stay, the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    with quiet(options.verbose):
        if followed(options):
            return
        if options.json is not None:
            check_place(options.json, "--json")
        report = run(options)
    if options.json is not None:
        _keep(report, options.json)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m decode.evaluate")


def run(options: Options) -> dict[str, Any]:
    """Return the report: settings, environment and what was measured of each task.

    Raises InputError before any decoding, NonFiniteLogitsError.
    """
    with ExitStack() as stack:
        folder = None
        if options.output is not None:
            folder = stack.enter_context(locked(check_folder(options.output)))
        # Cheap checks come first: flags, data, the model's shape, which run the folder is of.
        settings = read_settings(options)
        settings.check((task.response_length for task in options.chosen), options)
        sources = {}
        for task in options.chosen:
            problems = draw_problems(task, options.split, options.problems or task.default_count)
            sources[task] = task_sources(task, problems)
        shape, samples = checked_outline(options), ("--samples", options.samples)
        jobs = [make_jobs(shape, s, settings, raw=False, samples=samples) for s in sources.values()]
        every = [job for some in jobs for job in some]
        if folder is not None:
            refuse_early(folder / ANSWERS, describe(options, shape, "", every)[0])
        give_notices(options.chosen)
        for task, those in sources.items():
            if (kept := task.kept_back(options.split)) and options.problems is None:
                say(
                    f"notice: {task.name}: the {options.split} split has {len(those)} of its "
                    f"{len(those) + kept} problems; --split all takes every one"
                )
        crew = stack.enter_context(workers(options))
        settled, around, doubt = crew.ask(describe, every)
        if doubt is not None:
            say(f"notice: {doubt}")
        ledger = None
        if folder is not None:
            ledger = stack.enter_context(Ledger(folder / ANSWERS, settled))
            ledger.say_what_is_there(len(every), "answers")
        judges = stack.enter_context(JudgePool(options.judge_jobs or default_jobs()))
        shown = stack.enter_context(ShownProgress(standard_output(), "answers"))
        rows = []
        for task, its in zip(options.chosen, jobs, strict=True):
            decoded = decode_jobs(
                crew,
                its,
                batch_size=options.batch_size,
                max_rows=options.max_rows,
                ledger=ledger,
                judges=judges,
                displays=[_Counting(shown, task.name)],
            )
            records = decoded.records
            row = score(task, records, samples=options.samples, pass_at=options.passes) | {
                "split": options.split,
                "batch_size": options.batch_size,
                "workers": crew.count,
                # Of this run alone: where all answers were there nothing was timed.
                "decoded": len(decoded.new),
                "seconds": decoded.seconds if decoded.new else None,
                "max_new_tokens": records[0].max_new_tokens,
            }
            shown.say(line(row))
            rows.append(row)
        if judges.failed:
            wrong = f"{judges.failed} responses were judged wrong"
            say(f"notice: {wrong} because their judge did not end")
        report = {
            "model": options.model,
            "adapter": settled["adapter"],
            "decoder": every[0].decoder.name,
            "settings": settings.given,
            "environment": around,
            "rows": rows,
        }
        if folder is not None:
            _keep(report, folder / "report.json")
    return report


def describe(
    options: Options, model: DiffusionModel, weights: str, jobs: Sequence[Job]
) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Return what decides a run's answers and verdicts, the environment, and a warning."""
    settled = {
        **header(options, model, weights, jobs),
        "tasks": {task.name: task.identity for task in options.chosen},
        "split": options.split,
        "samples": options.samples,
    }
    return settled, environment(model), doubt_of(model, jobs[0].decoder)


def _keep(report: dict[str, Any], path: Path) -> None:
    """Write the report; where that fails, print it: it may be hours of work."""
    text = json.dumps(report, indent=2) + "\n"
    try:
        write_beside(path, text)
    except OutputError as error:
        print(text, end="", flush=True)
        raise OutputError(f"{error}; the numbers are above instead") from error


class _Counting(Display):
    """Show how many responses are done, and how many of them are right."""

    def __init__(self, shown: ShownProgress, name: str):
        self.shown, self.name = shown, name
        self.done = self.right = 0

    def begin(self, total: int) -> None:
        self.shown.begin(total, self.name)

    def finish(self, job: Job, record: Record) -> None:
        self.done, self.right = self.done + 1, self.right + bool(record.right)
        self.shown.advance(1, f"{self.name}: {self.right} of {self.done} right")


def score(
    task: Task, records: Sequence[Record], *, samples: int = 1, pass_at: Sequence[int] = ()
) -> dict[str, Any]:
    """Sum up a task's responses, `samples` for each problem, problem after problem.

    accuracy is the share of right responses; its interval is over problems, as the samples of one
    are alike. forwards adds the calls that each request was in, so tokens_per_forward is that of a
    request alone. p_cache is there where the decoder counts what it is made of.
    """
    groups = [records[i : i + samples] for i in range(0, len(records), samples)]
    right = [sum(bool(record.right) for record in group) for group in groups]
    forwards = sum(record.forwards for record in records)
    tokens = sum(len(record.tokens) for record in records)
    counts = dict(sum((Counter(record.counts) for record in records), Counter()))
    found: dict[str, Any] = {
        "task": task.name,
        "problems": len(groups),
        "samples": samples,
        "right": sum(right),
        # Problem by problem, to compare with another model or decoder on the same problems.
        **({"right_by_problem": "".join(map(str, right))} if samples == 1 else {}),
        **_share([count / samples for count in right]),
        "visible_tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "rows_per_forward": sum(record.rows for record in records) / forwards,
        "unfinished": sum(record.finish_reason == "length" for record in records),
        "counts": counts,
    }
    if (p_cache := p_cache_of(tokens, counts)) is not None:
        found["p_cache"] = p_cache
    if pass_at:
        found["pass_at"] = {
            str(k): _share([pass_at_k(samples, count, k) for count in right]) for k in pass_at
        }
    votes = [majority(task, group) for group in groups] if samples > 1 else []
    if any(vote is not None for vote in votes):
        found["majority"] = _share([float(vote is True) for vote in votes])
    return found


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the chance that one of k samples is right, of which `right` of `samples` are: the
    unbiased estimator 1 - C(n-c, k) / C(n, k) of Chen et al., 2021 (HumanEval), equation 1."""
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(task: Task, group: Sequence[Record]) -> bool | None:
    """Judge the answer that most samples of a problem give, of equally many the first; None where
    no sample has an answer that can be counted."""
    answers = [task.answer(record.text or "") for record in group]
    counted = Counter(answer for answer in answers if answer is not None)
    if not counted:
        return None
    chosen, _ = counted.most_common(1)[0]
    return bool(group[answers.index(chosen)].right)


def _share(values: Sequence[float]) -> dict[str, float]:
    """Return the mean of a value in [0, 1] for each problem, with its 95 % interval."""
    low, high = wilson(sum(values), len(values))
    return {"accuracy": sum(values) / len(values), "accuracy_low": low, "accuracy_high": high}


def line(row: dict[str, Any]) -> str:
    """Format what was measured of a task, a line for each figure."""

    def share(of: dict[str, Any]) -> str:
        return f"{of['accuracy']:6.1%} (95 % {of['accuracy_low']:.1%} to {of['accuracy_high']:.1%})"

    responses = row["problems"] * row["samples"]
    first = (
        f"{row['task']:<10} {row['right']:>4} of {responses} right {share(row)}  "
        f"{row['tokens_per_forward']:5.2f} visible tokens a forward  "
        f"{row['forwards'] / responses:6.1f} forwards a problem"
    )
    first += "" if row["seconds"] is None else f"  {row['seconds']:6.1f} s"
    first += f"  p_cache {row['p_cache']:.2f}" if "p_cache" in row else ""
    more = {f"pass@{k}": found for k, found in row.get("pass_at", {}).items()}
    if "majority" in row:
        more[f"majority of {row['samples']}"] = row["majority"]
    return "\n".join(
        [first, *(f"{'':<10} {name} {share(of).lstrip()}" for name, of in more.items())]
    )


def decode_and_judge(
    model: DiffusionModel,
    decoder: Decoder,
    task: Task,
    problems: Sequence[Problem],
    *,
    batch_size: int,
) -> tuple[list[Result], Measurements]:
    """Decode the problems and judge the responses; the time of the judging is not counted."""
    from decode.api import generate

    began = time.perf_counter()
    ids = encode_problems(model, problems, decoder)
    results = generate(model, ids, decoder, batch_size=batch_size)
    seconds = time.perf_counter() - began
    right = [task.right(p, r.text or "") for p, r in zip(problems, results, strict=True)]
    own = np.array([result.seconds for result in results])
    return results, Measurements(
        np.array(right, dtype=bool),
        np.array([len(result.tokens) for result in results], dtype=np.int64),
        np.array([result.forwards for result in results], dtype=np.int64),
        # Requests of a batch overlap: scaled, their seconds add up to the time that passed.
        own * (seconds / own.sum()),
    )


if __name__ == "__main__":
    sys.exit(main())
