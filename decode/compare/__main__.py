"""Measure decoders beside vLLM, an endpoint and transformers: d2f compare."""

from __future__ import annotations

import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from d2f.command import parse_known, program
from d2f.errors import InputError
from d2f.files import locked
from d2f.quiet import quiet
from decode.cli import DONE, FAILED, Verbose, command, require_matplotlib, say
from decode.compare.config import CompareConfig, Workload
from decode.compare.entries import Contestant, wait_for_calm
from decode.compare.report import ComparisonReport, Key, Record, RunsLedger, judge, number
from decode.display import ShownProgress, standard_output


@dataclass(kw_only=True)
class Options:
    """Compare decoders of this project with an autoregressive model served by vLLM (or any OpenAI-
    compatible endpoint) and with transformers' generate: the same prompts, the same stopping rules,
    the same checker, greedy. Print a table and write report.json (every raw measurement), report.md
    and figures into the configuration's `output`.

    Every key of the configuration can be given: --concurrency '[1, 4]' --problems 16, and a key of
    an entry by the entry's name or place: --entries.0.model DIR --entries.D2F.options.tau_conf
    0.95.

    Exit status: 0 done; 1 done, but requests failed, and who they were sent to is not ranked; 2 bad
    input, or an entry that failed altogether; 130 interrupted. What was measured until then is in
    the report, and the same command goes on.
    """

    config: Annotated[str, arg(metavar="NAME")]
    """YAML file, or a name of comparison in `d2f configs`"""
    verbose: Verbose = False


@command(
    interrupted="interrupted; what was measured is in the report, the same command goes on",
)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    usual = "python -m decode.compare"
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, overrides = parse_known(Options, given, usual=usual)
    with _interruptible(), quiet(options.verbose):
        from decode.compare.config import read_config

        config = read_config(options.config, overrides)
        report = run(config, f"{program(usual)} {shlex.join(given)}", verbose=options.verbose)
    for found in report.failures:
        say(
            f"error: {found.workload}: {found.failed} of {found.requests} requests of "
            f"{found.entry} failed, it is not ranked, e.g. {found.example}"
        )
    return FAILED if report.failures else DONE


def run(config: CompareConfig, command: str, *, verbose: bool = False) -> ComparisonReport:
    """Measure what the configuration says, write the report, return it. verbose: the entries'
    processes show what the libraries underneath say, too.

    Raises InputError for bad input before any work, and where an entry failed; the report then
    holds what was measured until then, as it does after an interrupt.
    """
    with locked(Path(config.output)) as folder:
        return _run(config, command, folder, verbose)


def _run(config: CompareConfig, command: str, folder: Path, verbose: bool) -> ComparisonReport:
    from decode.compare.config import Endpoint, identity, make_workloads
    from decode.compare.entries import Worker, check_entries, make_ready, tokenizer_of
    from decode.compare.report import ComparisonReport, RunsLedger
    from decode.compare.server import VllmServer
    from decode.jobs import give_notices

    # While this file is there the comparison is under way, and the same command goes on with it.
    path = folder / "measurements.jsonl"  # goes when all of it is in a report
    if (folder / "report.json").exists() and not path.exists():
        raise InputError(f"{folder} holds a report: expected another --output, or none there")
    reference = config.reference
    named = reference.tokenizer if isinstance(reference, Endpoint) else reference.model
    if config.figures:
        require_matplotlib("--figures false")
    workloads = make_workloads(config)
    tokenizer = tokenizer_of(config.tokenizer or named)
    about = _about(config, command, config.tokenizer or named)
    ledger = RunsLedger(path, identity(config, workloads, about))
    check_entries(config, workloads)
    give_notices(config.chosen)
    # Only now is it written: what is above looks, and may still refuse.
    ledger.begin([entry.name for entry in config.entries])
    about["resumed"] = ledger.resumed
    console = standard_output(PLAIN_WIDTH)
    display = ShownProgress(console, "runs")
    if ledger.found:
        say_resumed(display, ledger)
    contestants: list[Contestant] = []
    started: dict[str, VllmServer | Worker] = {}
    try:
        with ledger, ExitStack() as stack:
            for entry in config.entries:
                display.say(f"starting {entry.name} ({entry.kind}: {entry.model})")
                logs = folder / "logs"
                contestant = make_ready(
                    entry, config, workloads, logs, started, stack, verbose=verbose
                )
                contestants.append(contestant)
                about["entries"][entry.name] |= contestant.facts
            runs = plan(config, contestants, workloads, ledger.done)
            with display:
                display.begin(len(runs))
                measure(runs, tokenizer, ledger, partial(show_run, display))
    except BaseException as error:
        # Also an interrupt: what was measured until now is reported below, the error goes on.
        about["cut_short"] = str(error).splitlines()[0] if str(error) else "interrupted"
        raise
    finally:
        report = ComparisonReport(about, ledger.records)
        if ledger.records:
            report.save(folder)
            if config.figures:
                from decode.compare.report import draw

                draw(report, folder)
    # Only after report.json is written; a kill before leaves the measurements to go on from.
    ledger.path.unlink()
    show_report(console, report, folder)
    return report


def _about(config: CompareConfig, command: str, tokenizer: str) -> dict[str, Any]:
    """What the report says beside the measurements."""
    import os
    import platform

    import numpy
    import torch
    import transformers

    from d2f import __version__
    from decode.report import processor

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "device": (f"{gpu}, " if gpu else "") + f"{processor()}, {os.cpu_count()} cores",
        "versions": {
            "d2f-toolkit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
            "Python": platform.python_version(),
        },
        "baseline": config.reference.name,
        "tokenizer": tokenizer,
        "config": config.model_dump(mode="json"),
        "entries": {e.name: {"kind": e.kind, "model": e.model} for e in config.entries},
        "cut_short": None,
        "resumed": [],
    }


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let a termination be an interrupt: servers are stopped and what was measured is kept."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# The order of the runs: warm-up apart, repetitions interleaved between the entries.


@dataclass(frozen=True)
class Planned:
    """One run to come: a warm-up, which leaves no record, a timed repetition, or where repetition
    is None the pass that only judges."""

    workload: Workload
    contestant: Contestant
    concurrency: int
    count: int
    repetition: int | None
    warmup: bool = False


def plan(
    config: CompareConfig,
    contestants: Sequence[Contestant],
    workloads: Sequence[Workload],
    done: Collection[Key] = (),
) -> list[Planned]:
    """Every run that is not done, in order: for each workload and concurrency all entries once a
    repetition, each run after a warm-up of its own, because a process that has waited for the
    others finds its caches cold; at last a pass over all problems that only judges. Each repetition
    has an order of its own, the same in every comparison of these entries: who came always behind
    the same neighbour would be measured with what it leaves behind."""
    judging = config.accuracy_concurrency or config.concurrency[-1]
    runs = []
    for workload in workloads:
        for concurrency in config.concurrency:
            # At least as many as run at once, so that the warm-up is as wide as the timed run.
            warm = min(len(workload.items), max(config.warmup, concurrency))
            timed = workload.timed(concurrency)
            for repetition in range(config.repetitions):
                order = random.Random(f"{workload.name} {concurrency} {repetition}")
                for c in order.sample(contestants, len(contestants)):
                    if (workload.name, concurrency, repetition, c.entry.name) in done:
                        continue
                    runs.append(Planned(workload, c, concurrency, warm, None, True))
                    runs.append(Planned(workload, c, concurrency, timed, repetition))
        # The timed answers are judged too: a pass that only judges is for the problems beyond them.
        if len(workload.items) > workload.timed(config.concurrency[-1]):
            runs += [
                Planned(workload, c, judging, len(workload.items), None)
                for c in contestants
                if (workload.name, judging, None, c.entry.name) not in done
            ]
    return runs


def measure(
    runs: Sequence[Planned],
    tokenizer: Any,
    ledger: RunsLedger,
    show: Callable[[Planned, Record | None], None],
) -> None:
    """Do the runs, those of an entry once what the one before it left running is over; show is
    called before each with None and after each with its record. Raises
    InputError where an entry has failed: as it says itself, or because it answers nothing."""
    last = None
    for planned in runs:
        show(planned, None)
        if planned.contestant is not last:
            wait_for_calm()
        last = planned.contestant
        entry = planned.contestant.entry.name
        run = planned.contestant.run(planned.workload, planned.count, planned.concurrency)
        errors = [answer.error for answer in run.answers if answer.error is not None]
        # Some failed requests are reported and leave the entry unranked; none answered is a failed
        # entry, and going on would measure nothing.
        if len(errors) == len(run.answers):
            raise InputError(
                f"entry {entry} has failed: not one of {len(errors)} requests was answered, e.g. "
                f"{errors[0]}"
            )
        if planned.warmup:
            continue
        record = judge(
            run,
            planned.workload,
            tokenizer,
            entry=entry,
            concurrency=planned.concurrency,
            repetition=planned.repetition,
        )
        ledger.add_record(record)
        show(planned, record)


# What the terminal shows of a comparison: a line a run, and the tables at the end.

PLAIN_WIDTH = 140  # columns where standard output is no terminal


def say_resumed(display: ShownProgress, ledger: RunsLedger) -> None:
    """What is there already is not measured again."""
    last = ledger.resumed[-1]
    note = f"; {last['dropped']} of a repetition that was cut short come again"
    more = note if last["dropped"] else ""
    display.say(f"{last['kept']} runs are already in {ledger.path}{more}")


def show_run(display: ShownProgress, planned: Planned, record: Record | None) -> None:
    """Before a run (record None) and after it; a warm-up has no after."""
    where = f"{planned.workload.name}, concurrency {planned.concurrency}, "
    name = planned.contestant.entry.name
    if record is None:
        if planned.repetition is not None:
            what = f"repetition {planned.repetition + 1}"
        else:
            what = "warm-up" if planned.warmup else "accuracy"
        display.advance(1, f"{where}{what}: {name}")
        return
    failed = [answer for answer in record.answers if answer.error is not None]
    note = f", {len(failed)} of {len(record.answers)} failed" if failed else ""
    if planned.repetition is None:
        right = sum(bool(answer.right) for answer in record.answers)
        display.say(f"{where}{name}: {right} of {len(record.answers)} right{note}")
    else:
        display.say(f"{where}{name}: {record.tokens / record.seconds:,.0f} tokens/s{note}")
    for answer in failed[:1]:
        display.say(f"  e.g. request {answer.item}: {answer.error}")


def show_report(console: Console, report: ComparisonReport, folder: Path) -> None:
    """The tables, who won, and where the rest is."""
    for workload in report.workloads:
        table = Table(title=workload, title_justify="left")
        for name in ("concurrency", "entry"):
            table.add_column(name)
        for name in ("tokens/s", f"x {report.baseline}", "first, ms", "answer, ms",
                     "tokens/forward", "right", "MiB", "failed"):  # fmt: skip
            table.add_column(name, justify="right")
        for speed in report.speeds:
            if speed.workload != workload:
                continue
            ratio, found = report.speedup(speed), report.accuracy(speed.entry, workload)
            table.add_row(
                str(speed.concurrency),
                speed.entry,
                f"{speed.throughput:,.0f}",
                number(ratio, 2),
                number(speed.first and 1e3 * speed.first, 1),
                number(speed.finished and 1e3 * speed.finished, 1),
                number(speed.tokens_per_forward, 2),
                "-" if found is None else f"{found.right / found.problems:.1%}",
                number(speed.peak_bytes and speed.peak_bytes / 2**20),
                str(speed.failed),
            )
        console.print(table)
        for line in report.verdict(workload):
            console.print(line.replace("**", ""))
    console.print(f"report.md, report.json and figures: {folder}")


if __name__ == "__main__":
    sys.exit(main())
