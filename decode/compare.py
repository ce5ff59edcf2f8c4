"""python -m decode.compare --config compare-tiny [--key value ...]

Compares decoders of this project with an autoregressive model served by vLLM (or any
OpenAI-compatible endpoint) and with transformers' generate: the same prompts, the same stopping
rules, the same checker, greedy. Prints a table and writes report.json (every raw measurement),
report.md and figures into the configuration's `output`.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.command import CommandParser, program
from d2f.errors import InputError
from d2f.locks import locked
from d2f.quiet import quiet
from decode.commands.parser import add_verbose
from decode.commands.run_command import DONE, FAILED, command, say
from decode.reporting.extras import require_matplotlib
from decode.reporting.shown_progress import ShownProgress, standard_output

if TYPE_CHECKING:
    from decode.comparison.comparison_config import CompareConfig
    from decode.comparison.comparison_report import ComparisonReport

_EPILOG = """\
Every key of the configuration can be given: --concurrency '[1, 4]' --problems 16, and a key of an
entry by the entry's name or place: --entries.0.model DIR --entries.D2F.options.tau_conf 0.95.

exit status: 0 done; 1 done, but requests failed, and who they were sent to is not ranked; 2 bad
input, or an entry that failed altogether; 130 interrupted. What was measured until then is in the
report, and the same command goes on.
"""


@command(
    interrupted="interrupted; what was measured is in the report, the same command goes on",
    goes_on_unread=True,
)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    usual = "python -m decode.compare"
    parser = CommandParser(usual, description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--config", required=True, help="YAML file, or a name of comparison in `d2f configs`"
    )
    add_verbose(parser)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options, overrides = parser.parse_known_args(given)
    with _interruptible(), quiet(options.verbose):
        from decode.comparison.comparison_config import read_config

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
    from decode.commands.task_problems import give_notices
    from decode.comparison.comparison_config import Endpoint
    from decode.comparison.comparison_display import (
        PLAIN_WIDTH,
        say_resumed,
        show_report,
        show_run,
    )
    from decode.comparison.comparison_identity import identity
    from decode.comparison.comparison_report import ComparisonReport
    from decode.comparison.contestants import Contestant, check_entries, make_ready
    from decode.comparison.entry_prompts import tokenizer_of
    from decode.comparison.measure import measure, plan
    from decode.comparison.runs_ledger import RunsLedger
    from decode.comparison.server import VllmServer
    from decode.comparison.worker import Worker
    from decode.comparison.workload import make_workloads

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
        with ExitStack() as stack:
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
                from decode.comparison.comparison_figures import draw

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
    from decode.reporting.environment import processor

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


if __name__ == "__main__":
    sys.exit(main())
