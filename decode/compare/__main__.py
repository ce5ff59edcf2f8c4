"""Measure decoders beside vLLM, an endpoint and transformers: d2f compare."""

from __future__ import annotations

import random
import shlex
import signal
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from d2f.command import DONE, FAILED, command, program, say
from d2f.errors import InputError
from d2f.files import locked
from d2f.flags import Verbose, parse_known
from d2f.quiet import quiet
from decode.cli import require_extra, require_matplotlib
from decode.display import ShownProgress, standard_output
from decode.ledger import Ledger, check_folder

if TYPE_CHECKING:
    from decode.compare.client import Run
    from decode.compare.config import CompareConfig, Workload
    from decode.compare.entries import Contestant
    from decode.compare.report import Report
    from decode.compare.results import Record


@dataclass(kw_only=True)
class Options:
    """Compare decoders of this project with an autoregressive model served by vLLM (or any OpenAI-
    compatible endpoint) and with transformers' generate: the same prompts, the same stopping rules,
    the same checker, greedy. Print a table and write summary.json, report.md, figures and
    measurements.jsonl (every raw measurement) into the configuration's `output`.

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
    for number in (signal.SIGTERM, signal.SIGHUP):  # servers are stopped, what was measured is kept
        signal.signal(number, signal.default_int_handler)
    with quiet(options.verbose):
        from decode.compare.config import read_config

        config = read_config(options.config, overrides)
        report = run(config, f"{program(usual)} {shlex.join(given)}", verbose=options.verbose)
    for found in report.failures:
        say(
            "error: {workload}: {failed} of {requests} requests of {entry} failed, it is not "
            "ranked, e.g. {example}".format(**found)
        )
    return FAILED if report.failures else DONE


def run(config: CompareConfig, command: str, *, verbose: bool = False) -> Report:
    """Measure what the configuration says, write the report, return it.

    verbose: the entries' processes show what the libraries underneath say, too. Raises InputError
    for bad input before any work, and where an entry failed; the report then holds what was
    measured until then, as it does after an interrupt.
    """
    require_extra("compare", "a comparison", "openai")
    with locked(check_folder(config.output)) as folder:
        return _run(config, command, folder, verbose)


def _run(config: CompareConfig, command: str, folder: Path, verbose: bool) -> Report:
    from decode.compare.config import Endpoint, identity, make_workloads
    from decode.compare.entries import check_entries, make_ready
    from decode.compare.local import tokenizer_of
    from decode.jobs import give_notices

    if config.figures:
        require_matplotlib("--figures false")
    reference = config.reference
    named = reference.tokenizer if isinstance(reference, Endpoint) else reference.model
    counter = tokenizer_of(config.tokenizer or named)
    workloads = make_workloads(config)
    about = _about(config, command, config.tokenizer or named)
    check_entries(config, workloads)
    give_notices(config.chosen)
    path = folder / "measurements.jsonl"
    display = ShownProgress(standard_output(), "runs")
    run_of = identity(config, workloads, about)
    with Ledger(path, run_of, sync=True) as ledger, ExitStack() as stack:
        if ledger.rows:
            display.say(f"what is already in {path} is not measured again")
        steps = plan(config, workloads, ledger.rows)
        try:
            if steps:
                contestants = make_ready(
                    config, workloads, folder / "logs", stack, verbose=verbose, say=display.say
                )
                start = time.strftime("%Y-%m-%d %H:%M:%S %z")
                facts = {name: contestant.facts for name, contestant in contestants.items()}
                ledger.add({"id": f"start {start}", "start": start, "entries": facts})
                with display:
                    display.begin(sum(len(step.entries) for step in steps))
                    measure(steps, contestants, counter, ledger, display, config.warmup)
        except BaseException as error:
            # Also an interrupt: what was measured until now is reported below, the error goes on.
            about["cut_short"] = str(error).splitlines()[0] if str(error) else "interrupted"
            raise
        finally:
            report = write_report(about, list(ledger.rows.values()), folder, config.figures)
    show(report, folder)
    return report


def _about(config: CompareConfig, command: str, tokenizer: str) -> dict[str, Any]:
    """Collect what the report says beside the measurements."""
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
        "starts": [],
    }


def write_report(
    about: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path, figures: bool
) -> Report:
    """Make the report of a ledger's rows, and write it if anything was measured."""
    from decode.compare.report import Report, draw
    from decode.compare.results import Record

    for row in rows:
        if "start" in row:
            about["starts"].append(row["start"])
            for name, facts in row["entries"].items():
                about["entries"][name] |= facts
    records = [Record.from_json(run) for row in rows for run in row.get("runs", ())]
    report = Report.of(about, records)
    if records:
        report.save(folder)
        if figures:
            draw(report, folder)
    return report


# The runs: warm-up apart, repetitions interleaved between the entries.


@dataclass(frozen=True)
class Step:
    """Runs that are in the ledger together or not at all: one repetition of every entry, which are
    compared with each other; or where repetition is None the pass of one entry that only judges.
    count: of the workload's prompts."""

    workload: Workload
    concurrency: int
    repetition: int | None
    count: int
    entries: tuple[str, ...]

    @property
    def id(self) -> str:
        last = f"judged {self.entries[0]}" if self.repetition is None else str(self.repetition)
        return f"{self.workload.name} {self.concurrency} {last}"


def plan(
    config: CompareConfig, workloads: Sequence[Workload], done: Container[str] = ()
) -> list[Step]:
    """Every step that is not done, in order: for each workload and concurrency the repetitions,
    at last a pass over all problems that only judges. Each repetition has an order of the entries
    of its own, the same in every comparison of these entries: who came always behind the same
    neighbour would be measured with what it leaves behind."""
    judging = config.accuracy_concurrency or config.concurrency[-1]
    names = [entry.name for entry in config.entries]
    steps = []
    for workload in workloads:
        for concurrency in config.concurrency:
            for repetition in range(config.repetitions):
                order = random.Random(f"{workload.name} {concurrency} {repetition}")
                turns = tuple(order.sample(names, len(names)))
                count = workload.timed(concurrency)
                steps.append(Step(workload, concurrency, repetition, count, turns))
        # The timed answers are judged too: a pass that only judges is for the problems beyond them.
        every = len(workload.items)
        if every > workload.timed(config.concurrency[-1]):
            steps += [Step(workload, judging, None, every, (name,)) for name in names]
    return [step for step in steps if step.id not in done]


def measure(
    steps: Sequence[Step],
    contestants: Mapping[str, Contestant],
    counter: Any,
    ledger: Ledger,
    display: ShownProgress,
    warmup: int,
) -> None:
    """Do the steps, each entry's runs once what the one before it left running is over, and each
    timed run after a warm-up of its own: a process that has waited for the others finds its caches
    cold. counter: the tokenizer that counts. Raises InputError where an entry has failed: as it
    says itself, or because it answers nothing."""
    from decode.compare.entries import wait_for_calm
    from decode.compare.results import judge

    last = None
    for step in steps:
        records = []
        for name in step.entries:
            contestant, workload, concurrency = contestants[name], step.workload, step.concurrency
            what = "accuracy" if step.repetition is None else f"repetition {step.repetition + 1}"
            where = f"{workload.name}, concurrency {concurrency}"
            display.advance(1, f"{where}, {what}: {name}")
            if name != last:
                wait_for_calm()
            last = name
            if step.repetition is not None:
                # At least as many as run at once, so that the warm-up is as wide as the timed run.
                warm = min(len(workload.items), max(warmup, concurrency))
                _check(name, contestant.run(workload, warm, concurrency))
            run = contestant.run(workload, step.count, concurrency)
            _check(name, run)
            record = judge(run, workload, counter, name, concurrency, step.repetition)
            records.append(record)
            display.say(f"{where}: {name}: {_summary(record)}")
        ledger.add({"id": step.id, "runs": [record.to_json() for record in records]})


def _check(entry: str, run: Run) -> None:
    """Raise InputError where not one request was answered: going on would measure nothing. Some
    failed requests are reported and leave the entry unranked."""
    errors = [answer.error for answer in run.answers if answer.error is not None]
    if len(errors) == len(run.answers):
        raise InputError(
            f"entry {entry} has failed: not one of {len(errors)} requests was answered, e.g. "
            f"{errors[0]}"
        )


def _summary(record: Record) -> str:
    """Say in a line how a run went."""
    errors, count = record.errors, len(record.answers)
    note = f", {len(errors)} of {count} failed, e.g. {errors[0]}" if errors else ""
    if record.repetition is None:
        return f"{sum(bool(answer.right) for answer in record.answers)} of {count} right{note}"
    return f"{record.tokens / record.seconds:,.0f} tokens/s{note}"


def show(report: Report, folder: Path) -> None:
    """Print the speeds, who won, and where the rest is."""
    for workload in report.workloads:
        table = report.speed_table(workload, brief=True)
        print("\n".join(["", workload, *table, *report.verdict(workload)]))
    print(f"report.md, summary.json, measurements.jsonl and figures: {folder}")


if __name__ == "__main__":
    sys.exit(main())
