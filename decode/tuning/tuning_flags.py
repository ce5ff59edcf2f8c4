"""The command line of `python -m decode.tune`; parsing it does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from decode.commands.decoder_flags import (
    Kind,
    add_flag,
    help_of,
    offered,
    options_by_name,
    summaries,
)
from decode.commands.parser import (
    Parser,
    add_model,
    add_tasks,
    add_verbose,
    add_workers,
    check_workers,
    chosen_tasks,
)
from decode.decoders.base import searchable
from decode.decoders.options import default_grid
from decode.reporting.extras import require_matplotlib

_DESCRIPTION = """\
python -m decode.tune --tasks story --output runs/tune

Searches the settings of a decoder on the tuning split of a task, draws the frontier of accuracy
against tokens per second, chooses the fastest setting that is accurate enough, measures it on
held-out problems, and writes it as YAML for `python -m decode.pipeline --config`.
"""
_EPILOG = """\
The same command again goes on where it stopped. docs/tuning.md says how it chooses.
exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any work;
130 interrupted, what was measured stays.
"""
Number = int | float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; `tasks` is the list of tasks, `lists` the values by option
    that were given.

    Raises InputError for a bad command line, SystemExit after --help.
    """
    kinds = offered(arguments)
    options = _parser(kinds).parse_args(arguments)
    check_workers(options)
    options.tasks = chosen_tasks(options)
    given = {name: getattr(options, name) for kind in kinds for name in searchable(kind)}
    options.lists = {name: values for name, values in given.items() if values is not None}
    if options.figures:
        require_matplotlib("--no-figures")
    return options


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.tune",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    group = parser.add_argument_group("model and tasks")
    add_model(group, "family", "compile")
    add_tasks(group, "; each is tuned on its own")
    settings = parser.add_argument_group(
        "settings to search",
        "Lists, with commas; every combination is a setting. An option that the decoder does not "
        "have is an error.",
    )
    _add_search(parser.add_argument_group("search and choice"))
    _add_output(parser.add_argument_group("final measurement and output"))
    _add_settings(settings, kinds)
    return parser


def _add_settings(group: argparse._ArgumentGroup, kinds: list[Kind]) -> None:
    about = f"default d2f; {summaries()}"
    group.add_argument("--decoder", default="d2f", metavar="NAME", help=about)
    for name, having in options_by_name(kinds).items():
        kinds_having = [(kind, option) for kind, option in having if name in searchable(kind)]
        if kinds_having:
            reads = _numbers(float if having[-1][1].kind is float else int)
            tried = [
                f"{kind.name} {','.join(f'{value:g}' for value in default_grid(kind)[name])}"
                for kind, _ in kinds_having
                if name in default_grid(kind)
            ]
            said = f"; searched by default: {'; '.join(tried)}" if tried else ""
            text = f"{help_of(kinds_having, len(kinds))}{said}"
            add_flag(group, kinds_having, text, type=reads, metavar="LIST")


def _add_search(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--search",
        default="halving",
        choices=("halving", "grid"),
        help="halving: all settings on few problems, the best on more (default); grid: all on all",
    )
    group.add_argument(
        "--problems",
        type=int,
        default=200,
        metavar="N",
        help="tuning problems at the last rung (default 200)",
    )
    group.add_argument(
        "--eta", type=int, default=3, metavar="N", help="halving: 1/N go on (default 3)"
    )
    group.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="of measuring in the search, over all runs into this output, shared equally by the "
        "tasks: after a first look at every setting, which it always takes, those that promise "
        "most go on, as many as there are seconds for (default: no limit)",
    )
    bound = group.add_mutually_exclusive_group()
    bound.add_argument(
        "--within",
        type=float,
        default=1.0,
        metavar="POINTS",
        help="choose the fastest setting within so many percentage points of the most accurate "
        "one (default 1)",
    )
    bound.add_argument(
        "--min-accuracy",
        type=float,
        metavar="SHARE",
        help="choose the fastest setting with at least this accuracy, in [0, 1]",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="problems decoded together; speed is that of such batches (default 1)",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the problems and draws (default 0)"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--heldout",
        type=int,
        default=500,
        metavar="N",
        help="held-out problems of the final measurement (default 500)",
    )
    group.add_argument(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="of the final measurement, for its timing (default 3)",
    )
    group.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder for measurements.jsonl, the frontier, the report and a YAML a task",
    )
    group.add_argument(
        "--figures",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw frontier.png and frontier.svg, which needs matplotlib (default)",
    )
    add_workers(group)
    add_verbose(group)


def _numbers(kind: type[int] | type[float]) -> Callable[[str], list[Number]]:
    """Reads numbers with commas between them; none for an empty text, which is refused later."""

    def read(text: str) -> list[Number]:
        return [kind(part) for part in text.split(",")] if text.strip() else []

    read.__name__ = f"list of {kind.__name__}"
    return read
