"""Print the script by which a shell completes `d2f`: d2f --tyro-print-completion bash."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from importlib import import_module

import tyro

from d2f.command import COMMANDS, command
from d2f.errors import InputError, not_one_of
from d2f.flags import CONFIG, command_line

SHELLS = ("bash", "zsh", "fish")


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command: print what completes the commands, their flags and values."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 1 or words[0] not in SHELLS:
        raise InputError(f"--tyro-print-completion: {not_one_of(' '.join(words), SHELLS)}")
    commands = {}
    for name, (module, *_) in COMMANDS.items():
        options = vars(import_module(module)).get("Options")
        # The flags of lm-eval are another library's.
        commands[name] = command_line(options, ()) if options else make_dataclass("Other", [])
    words = ["--tyro-print-completion", *words]
    tyro.extras.subcommand_cli_from_dict(commands, prog="d2f", args=words, config=CONFIG)
