"""python -m distill.data --inspect --config NAME [--samples 3] [--key value ...]

Prints what the model of a training run will see: some samples with their tokens by mask state and
their block borders, the mask ratio of each block, lengths, how many rows were dropped or cut, and
what a step and an epoch hold. Of recorded trajectories it shows the states, with the tokens that
the decoder decided next. Colours on a terminal; elsewhere [masked], [+decided next] and {tail}.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from d2f.command import CommandParser
from d2f.errors import InputError
from d2f.quiet import quiet
from decode.commands.parser import add_verbose
from decode.commands.run_command import command

if TYPE_CHECKING:
    from rich.console import Console


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line: its options, and the overrides of the configuration."""
    parser = CommandParser(
        "python -m distill.data",
        description=__doc__,
        allow_abbrev=False,
        epilog="Every key of the configuration can be overridden: --data.row_length 512",
    )
    parser.add_argument("--inspect", action="store_true", required=True, help="show samples")
    parser.add_argument(
        "--config", required=True, help="YAML file, or a name of training in `d2f configs`"
    )
    parser.add_argument("--samples", type=int, default=3, help="samples to show (default 3)")
    add_verbose(parser)
    return parser.parse_known_args(arguments)


def inspect(
    options: argparse.Namespace, overrides: Sequence[str], console: Console | None = None
) -> None:
    """Show what the options ask for. Raises InputError."""
    from rich.console import Console

    from distill.config import read_config
    from distill.data.inspection import show
    from distill.objectives import OBJECTIVES
    from distill.prepare_model import prepare_model

    if options.samples < 1:
        raise InputError(f"--samples must be at least 1, got {options.samples}")
    config = read_config(options.config, overrides)
    model = prepare_model(config, "meta")  # no weights are needed to look
    objective = OBJECTIVES[config.objective](model, config)
    show(console or Console(), objective.stream(), objective, options.samples)


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status."""
    options, overrides = parse(arguments)
    with quiet(options.verbose):
        inspect(options, overrides, console)


if __name__ == "__main__":
    sys.exit(main())
