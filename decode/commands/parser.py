"""What the command lines have in common; imports no torch."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from d2f.command import CommandParser
from d2f.errors import InputError
from d2f.models import names
from d2f.tasks.registry import TASKS

DEFAULT_MODEL = "tiny-d2f"
Group = argparse.ArgumentParser | argparse._ArgumentGroup


class Parser(CommandParser):
    """Reports a bad command line as an InputError."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the options)")


def add_verbose(parser: Group) -> None:
    """Add -v, which every command has: `d2f.quiet.quiet` takes it."""
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="show the notices, warnings and progress bars of the libraries underneath, too",
    )


_MODEL_FLAGS: dict[str, dict[str, Any]] = {
    "adapter": {"metavar": "NAME", "help": "LoRA adapter for it: folder or hub name"},
    "merge": {
        "action": argparse.BooleanOptionalAction,
        "help": "fold the adapter into the weights (default), or keep it beside them",
    },
    "family": {
        "metavar": "NAME",
        "help": "llada, dream, sdar, wedlm or causal (default: what the checkpoint says)",
    },
    "dtype": {
        "metavar": "TYPE",
        "help": "float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 elsewhere)",
    },
    "device": {
        "metavar": "NAME",
        "help": "cpu, cuda, cuda:1, ... (default: cuda where there is one)",
    },
    "compile": {
        "action": "store_true",
        "help": "run the model through torch.compile: takes some seconds at the start and a C++ "
        "compiler on a CPU, then each forward costs less; it needs a merged adapter",
    },
}


def add_model(
    group: Group, *more: str, default: str | None = DEFAULT_MODEL, several: str = ""
) -> None:
    """Add --model, --adapter, --dtype, --device, and of --merge, --family, --compile those that
    `more` names; the others have their defaults, so `load_model.load` takes every command's
    options. default: of --model, None where it must be given. several: said of a --model that may
    be given more than once; then it is a list, None where it was not given."""
    bundled = f"folder, hub name or bundled model ({', '.join(names()) or 'none is bundled'}"
    end = f"; default {default})" if default else ")"
    reading: dict[str, Any] = {"default": default, "required": default is None}
    if several:  # argparse would add to a default
        reading = {"action": "append"}
    group.add_argument("--model", metavar="NAME", help=bundled + end + several, **reading)
    for name, flag in _MODEL_FLAGS.items():
        if name in ("adapter", "dtype", "device", *more):
            group.add_argument(f"--{name}", **flag)
    group.set_defaults(family=None, merge=True, compile=False)


def add_tasks(group: Group, more: str = "") -> None:
    """Add --tasks; `task_list` reads it. more: said in its help."""
    every = ",".join(TASKS)
    group.add_argument("--tasks", default=every, metavar="NAMES", help=f"default {every}{more}")


def task_list(text: str) -> list[str]:
    """The tasks of --tasks, names with commas between them. Raises InputError."""
    tasks = text.split(",")
    if set(tasks) - set(TASKS) or len(set(tasks)) < len(tasks):
        raise InputError(f"--tasks must be some of {','.join(TASKS)}, each once, got {text!r}")
    return tasks


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Raise InputError for an option below its least value; None is not given."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least {bound}, got {value}")
