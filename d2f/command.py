"""The command `d2f`: one name before every command of the toolkit.

Each command is a module with a `main`, which is imported when it is asked for; `python -m MODULE`
is the same command.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

import d2f
from d2f.errors import brief

# The toolkit's packages lie beside each other; a user's file of the same name can hide one.

HERE = os.path.dirname(os.path.abspath(__file__))  # links as they are: those of an editable install


class HiddenPackageError(ImportError):
    """Python finds something else by the name of one of the toolkit's packages."""


def require(*names: str) -> None:
    """Raise HiddenPackageError, naming what hides what, where Python would import something else
    by the name of one of these packages. Imports none of them; one that is not there at all is
    for the import to report."""
    for name in names:
        spec = find_spec(name)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or ())
        place = places[0] if places else str(spec.origin)  # of a package its folder, else the file
        own = os.path.join(os.path.dirname(HERE), name)
        if os.path.realpath(place) != os.path.realpath(own):
            raise HiddenPackageError(hides(place, name, own))


def hides(place: object, name: str, own: object) -> str:
    """What to say of a file or folder `place` that hides the package `name`, which is at `own`."""
    return (
        f"{place} hides the package {name} of d2f-toolkit ({own}): rename it, or call the command "
        "d2f, which does not look in the working folder"
    )


BAD_INPUT = 2
# Name: its module, and what it does.
COMMANDS = {
    "decode": ("decode.pipeline", "decode held-out problems or prompts, and show it live"),
    "batch": ("decode.batch", "answer every row of a file or data set"),
    "evaluate": ("decode.evaluate", "accuracy and forwards of a model on held-out problems"),
    "compare": ("decode.compare", "measure decoders beside vLLM, an endpoint, transformers"),
    "serve": ("decode.serve", "serve models through OpenAI's HTTP interface"),
    "tune": ("decode.tune", "search a decoder's settings for a model and a task"),
    "lm-eval": ("decode.lm_eval", "score models on the tasks of lm-evaluation-harness"),
    "train": ("distill.train", "train or distil a model"),
    "convert": ("distill.convert", "bring a model into another form"),
    "data": ("distill.data.__main__", "show what a training run will see"),
    "rollouts": ("distill.rollouts", "collect a decoder's right answers to train on"),
    "configs": ("d2f.shipped", "list the configurations that --config takes by name"),
}

_called_as: str | None = None


def program(usual: str) -> str:
    """How the running command was called: `d2f NAME`, or `usual`, its own form."""
    return _called_as or usual


class CommandParser(argparse.ArgumentParser):
    """A command line whose help shows the name by which the command was called.

    usual: the command's own form, e.g. `python -m decode.tune`, with which its description opens.
    """

    def __init__(self, usual: str, *, description: str | None, **others: Any) -> None:
        name = program(usual)
        super().__init__(
            prog=name,
            description=(description or "").replace(usual, name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **others,
        )

    def error(self, message: str) -> NoReturn:
        super().error(brief(message))


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that the first argument names; its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        return _without_command(given)
    # Before the import: a user's decode.py in the working folder would be run in its place.
    try:
        require("decode", "distill", "triton_kernels")
    except HiddenPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    global _called_as
    _called_as = f"d2f {given[0]}"
    sys.argv[1:] = given[1:]  # a command reads its own arguments there, as under python -m
    status: int | None = import_module(COMMANDS[given[0]][0]).main()
    return status


def _without_command(given: list[str]) -> int:
    """--help, --version, or an error."""
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="d2f",
        usage="d2f COMMAND [options]",
        description="Decode, distil and measure diffusion language models.\n\ncommands:\n"
        + "\n".join(f"  {name:<{width}}  {does}" for name, (_, does) in COMMANDS.items()),
        epilog="d2f COMMAND --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"d2f-toolkit {d2f.__version__}")
    _, unknown = parser.parse_known_args(given)
    if not unknown:
        parser.error("expected a command, see d2f --help")
    close = difflib.get_close_matches(unknown[0], COMMANDS, n=1)
    meant = f"; did you mean {close[0]}?" if close else ""
    parser.error(brief(f"expected one of {', '.join(COMMANDS)}, got {unknown[0]!r}{meant}"))
