"""Measure decoders beside vLLM, an endpoint and transformers: d2f compare."""

from __future__ import annotations

import os
import platform
import random
import shlex
import signal
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from d2f.command import DONE, FAILED, command, program, require_extra, say
from d2f.errors import InputError
from d2f.files import locked
from d2f.flags import Verbose, parse_known
from d2f.quiet import quiet
from decode.cli import require_matplotlib
from decode.display import ShownProgress, standard_output
from decode.jobs import give_notices
from decode.ledger import Ledger, check_folder

if TYPE_CHECKING:
    from decode.compare.config import CompareConfig, Workload
    from decode.compare.entries import Contestant
    from decode.compare.report import Report


@dataclass(kw_only=True)
class Options:
    """Measure decoders beside vLLM, another OpenAI-compatible endpoint and transformers' generate:
    the same prompts, the same stopping rules, the same checker, greedy. Print a table and write
    summary.json, report.md, figures and measurements.jsonl (every raw measurement) into the
    configuration's `output`.

    Every key of the configuration can be given: --concurrency '[1, 4]' --problems 16, and a key of
    an entry by the entry's name or place: --entries.0.model DIR --entries.D2F.options.tau_conf
    0.95.

    Exit status: 0 done; 1 done, but requests failed, and who they were sent to is not ranked; 2 bad
    input, or an entry that failed altogether; 130 interrupted. What was measured until then is in
    the report, and the same command goes on.
    """

    examples = (
        "d2f compare compare-tiny",
        "d2f compare my-comparison.yaml --concurrency '[1, 4]' --problems 16",
    )

    config: Positional[str]
    """YAML file, or a name of comparison in `d2f configs`"""
    verbose: Verbose = False


@command(
    interrupted="interrupted; what was measured is in the report, the same command goes on",
)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
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
    from decode.compare.config import Endpoint, identity, make_workloads
    from decode.compare.entries import make_ready, prepare_entries
    from decode.compare.local import tokenizer_of

    if config.figures:
        require_matplotlib("--figures false")
    with ExitStack() as stack:
        folder = stack.enter_context(locked(check_folder(config.output)))
        reference = config.reference
        own = reference.tokenizer if isinstance(reference, Endpoint) else reference.model
        about = _about(config, command, config.tokenizer or own)
        counter = tokenizer_of(about["tokenizer"])
        workloads = make_workloads(config)
        prepared = prepare_entries(config, workloads)
        give_notices(config.chosen)
        display = ShownProgress(standard_output(), "runs")
        path, run_of = folder / "measurements.jsonl", identity(config, workloads, about)
        ledger = stack.enter_context(Ledger(path, run_of, sync=True))
        if ledger.rows:
            display.say(f"what is already in {path} is not measured again")
        try:
            if steps := plan(config, workloads, ledger.rows):
                contestants = make_ready(
                    config, prepared, folder / "logs", stack, verbose=verbose, say=display.say
                )
                start = time.strftime("%Y-%m-%d %H:%M:%S %z")
                facts = {name: contestant.facts for name, contestant in contestants.items()}
                # Numbered: two goes may begin within a second.
                ledger.add({"id": f"start {len(ledger.rows)}", "start": start, "entries": facts})
                with display:
                    display.begin(sum(len(step.entries) for step in steps))
                    measure(steps, contestants, counter, ledger, display, config.warmup)
        except BaseException as error:
            # Also an interrupt: what was measured until now is reported below, the error goes on.
            about["cut_short"] = str(error) or "interrupted"
            raise
        finally:
            report = write_report(about, list(ledger.rows.values()), folder, config.figures)
    for workload in report.workloads:
        table = report.speed_table(workload, brief=True)
        print("\n".join(["", workload, *table, *report.verdict(workload)]))
    print(f"report.md, summary.json, measurements.jsonl and figures: {folder}")
    return report


def _about(config: CompareConfig, command: str, tokenizer: str) -> dict[str, Any]:
    """Collect what the report says beside the measurements."""
    import numpy
    import torch
    import transformers

    from d2f import __version__
    from decode.report import processor

    versions = {m.__name__: m.__version__ for m in (torch, transformers, numpy)}
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": command,
        "device": f"{gpu}{processor()}, {os.cpu_count()} cores",
        "versions": {"d2f-toolkit": __version__, **versions, "Python": platform.python_version()},
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
    from decode.compare.results import Run

    for row in (row for row in rows if "start" in row):
        about["starts"].append(row["start"])
        for name, facts in row["entries"].items():
            about["entries"][name] |= facts
    report = Report.of(about, [Run.from_json(r) for row in rows for r in row.get("runs", ())])
    if report.speeds or report.accuracies:
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
    """List the steps left to do, in order: for each workload and concurrency the repetitions, then
    a pass over all problems that only judges. Each repetition has an order of the entries of its
    own, the same in every comparison of these entries: behind the same neighbour each time, an
    entry would be measured with what that leaves behind."""
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
        workload, concurrency = step.workload, step.concurrency
        what = "accuracy" if step.repetition is None else f"repetition {step.repetition + 1}"
        where = f"{workload.name}, concurrency {concurrency}"
        records = []
        for name in step.entries:
            display.advance(1, f"{where}, {what}: {name}")
            if name != last:
                wait_for_calm()
            last = name
            # At least as many as run at once, so that the warm-up is as wide as the timed run.
            warm = min(len(workload.items), max(warmup, concurrency))
            for count in [step.count] if step.repetition is None else [warm, step.count]:
                run = contestants[name].run(workload, count, concurrency)
                errors = [answer.error for answer in run.answers if answer.error is not None]
                # Some failed requests are reported; where all fail nothing would be measured.
                if len(errors) == len(run.answers):
                    raise InputError(
                        f"entry {name} has failed: not one of {len(errors)} requests was "
                        f"answered, e.g. {errors[0]}"
                    )
            record = judge(run, workload, counter, name, concurrency, step.repetition)
            records.append(record)
            right = sum(bool(answer.right) for answer in record.answers)
            said = f"{record.tokens / record.seconds:,.0f} tokens/s"
            if step.repetition is None:
                said = f"{right} of {step.count} right"
            if errors:
                said += f", {len(errors)} of {step.count} failed, e.g. {errors[0]}"
            display.say(f"{where}: {name}: {said}")
        ledger.add({"id": step.id, "runs": [record.to_json() for record in records]})


if __name__ == "__main__":
    sys.exit(main())
