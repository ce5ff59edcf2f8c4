"""python -m benchmarks.paper --table d2f-llada --limit 8

Measures a table of the D2F paper again: the base model, Fast-dLLM and D2F on each task, with
accuracy, TPS, latency, tokens a forward and speed-up as the paper counts and as this project does,
the published figures beside them. Writes report.json and report.md, and a file of answers for each
row; the same command goes on where it stopped. Tasks whose judge runs what the model wrote are left
out without --allow-code-execution.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from d2f.errors import InputError
from d2f.files import locked, write_beside
from d2f.quiet import quiet
from decode.cli import Parser, add_model, add_verbose, check_least, check_model, command, say
from decode.ledger import check_folder

if TYPE_CHECKING:
    from benchmarks.paper.paper_table import Table

USUAL = "python -m benchmarks.paper"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(USUAL, description=__doc__, allow_abbrev=False)
    parser.add_argument("--table", required=True, metavar="NAME", help="d2f-llada or d2f-dream")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="problems of each task, at least 1 (default: all)"
    )
    parser.add_argument("--tasks", metavar="NAMES", help="only these, with commas (default: all)")
    parser.add_argument("--methods", metavar="NAMES", help="only these, with commas (default: all)")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="TASK=FILE",
        help="rows for a task in place of the hub's data set, with its columns: JSONL, parquet, or "
        "a folder of save_to_disk; once a task",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens of a response, where the table has more: for a model with less context",
    )
    parser.add_argument(
        "--end-early",
        action="store_true",
        help="end every response at its end token or stop string; the papers' codes decode on",
    )
    parser.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run what the model writes, on this machine, with limits: mbpp and humaneval need it",
    )
    parser.add_argument(
        "--output", metavar="DIR", help="folder of the results (default runs/paper-TABLE)"
    )
    add_model(parser, "merge", "compile")
    # The table's own model and adapter, which are known once it is read; one request at a time.
    parser.set_defaults(model=None, batch_size=1)
    add_verbose(parser)
    return parser


@command(interrupted="interrupted: the answers stay, the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    check_least(options, limit=1, max_new_tokens=1)
    from benchmarks.paper.paper_report import render
    from benchmarks.paper.paper_table import read_table
    from benchmarks.paper.paper_tasks import make_task, runs_code

    table = read_table(options.table).only(options.methods, options.tasks)
    _complete(options, table)
    check_model(options)
    data = _data(options.data, list(table.tasks))
    allowed = options.allow_code_execution
    left_out = [name for name, task in table.tasks.items() if not allowed and runs_code(task)]
    tasks = {
        name: make_task(name, task, data.get(name), allow_code_execution=allowed)
        for name, task in table.tasks.items()
        if name not in left_out
    }
    if not tasks:
        raise InputError(
            f"{', '.join(left_out)}: the judge runs what the model wrote on this machine: give "
            "--allow-code-execution if that is meant"
        )
    if left_out:
        say(f"notice: {', '.join(left_out)} left out: their judge needs --allow-code-execution")
    given = sys.argv[1:] if arguments is None else list(arguments)
    output = options.output or f"runs/paper-{options.table}"
    with locked(check_folder(output)) as folder, quiet(options.verbose):
        from benchmarks.paper.run_table import run

        report = run(table, tasks, options, folder)
        report["command"] = shlex.join([*USUAL.split(), *given])
        write_beside(folder / "report.json", json.dumps(report, indent=1) + "\n")
        write_beside(folder / "report.md", render(report))
    print(render(report))


def _complete(options: argparse.Namespace, table: Table) -> None:
    """Take the table's model and adapter where none is given. Raises InputError for one that would
    be on another's base."""
    adapted = any(method.adapter for method in table.methods.values())
    if options.model is not None and options.adapter is None and adapted:
        raise InputError(
            f"--model {options.model}: the table's adapter, {table.adapter}, is for {table.model}: "
            "give the --adapter too, or --methods without it"
        )
    if options.model is None:
        options.model = table.model
    if options.adapter is None and adapted:
        options.adapter = table.adapter


def _data(given: list[str], known: list[str]) -> dict[str, str]:
    """Files by task. Raises InputError."""
    found: dict[str, str] = {}
    for text in given:
        task, sign, path = text.partition("=")
        if not sign or not path or task not in known or task in found:
            raise InputError(
                f"--data must be TASK=FILE, once a task of {', '.join(known)}, got {text!r}"
            )
        found[task] = path
    return found


if __name__ == "__main__":
    sys.exit(main())
