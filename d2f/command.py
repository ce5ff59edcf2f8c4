"""The command `d2f`, one name before every command, and how each of them ends.

Each command is a module with a `main`, imported when it is asked for; `python -m MODULE` is the
same command.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import ParamSpec

import d2f
from d2f.device import rank
from d2f.errors import (
    InputError,
    NonFiniteLogitsError,
    RankError,
    did_you_mean,
    out_of_memory,
    repr_of,
)

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130  # exit statuses
SECONDS_TO_SPEAK = 60.0  # the other ranks leave the first one so long to say what is wrong
COMMANDS = {  # name: its module, its group, and what it does
    "decode": ("decode.pipeline", "Decode", "prompts or held-out problems, shown live"),
    "batch": ("decode.batch", "Decode", "every row of a file or data set"),
    "evaluate": ("decode.evaluate", "Measure", "accuracy and forwards on held-out problems"),
    "compare": ("decode.compare.__main__", "Measure", "decoders beside vLLM and transformers"),
    "serve": ("decode.serve", "Decode", "over HTTP, as OpenAI's interface"),
    "tune": ("decode.tune", "Measure", "a decoder's settings: search, choose, check"),
    "lm-eval": ("decode.lm_eval", "Measure", "the tasks of lm-evaluation-harness"),
    "train": ("distill.train", "Train", "or distil a model from a configuration"),
    "convert": ("distill.convert", "Models", "bring one into another form, upload it"),
    "info": ("distill.info", "Models", "what a checkpoint is and what it can do"),
    "data": ("distill.data.__main__", "Train", "look at what a training run will see"),
    "rollouts": ("distill.rollouts", "Train", "collect a decoder's right answers to train on"),
    "configs": ("d2f.shipped", "Models", "list the configurations that ship with this"),
}
HELP = """\
usage: d2f COMMAND [options]

Decode, distil and measure diffusion language models.
{}
d2f COMMAND --help shows examples and options; d2f --version;
d2f --tyro-print-completion bash prints what bash (zsh, fish) completes d2f by."""
Arguments = ParamSpec("Arguments")

_called_as: str | None = None


def program(usual: str) -> str:
    """Return how the running command was called: `d2f NAME`, or `usual`, its own form."""
    return _called_as or usual


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Run the command that the first argument names; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in ([], ["-h"], ["--help"]):
        groups: dict[str, str] = {}
        for name, (_, group, does) in COMMANDS.items():
            groups[group] = f"{groups.get(group, '')}  {name:<10}{does}\n"
        print(HELP.format("".join(f"\n{group}\n{lines}" for group, lines in groups.items())))
        return DONE if given else BAD_INPUT
    if given == ["--version"]:
        print(f"d2f-toolkit {d2f.__version__}")
        return DONE
    name = given[0]
    modules = {name: module for name, (module, *_) in COMMANDS.items()}
    modules["--tyro-print-completion"] = "d2f.completion"
    if name not in modules:
        hint = did_you_mean(name, COMMANDS)
        return say(f"error: no command {repr_of(name)}{hint} (d2f --help lists them)", BAD_INPUT)
    global _called_as
    _called_as = f"d2f {name}"
    sys.argv[1:] = given[1:]  # a command reads its own arguments there, as under python -m
    status: int | None = import_module(modules[name]).main()
    return status


# The end of a command: what went wrong is a line on standard error and an exit status.


def command(
    *bad_input: type[Exception], interrupted: str, needs_less: str = ""
) -> Callable[[Callable[Arguments, int | None]], Callable[Arguments, int]]:
    """Make a command's main of the function that does its work.

    InputError and the errors of `bad_input` end it with 2; numbers that are not finite, a rank that
    has ended, too little memory (with what `needs_less`) and a full disk with 1; Ctrl-C with 130
    and the line `interrupted`. A reader of standard output who left ends it without a word.
    """

    bad: tuple[type[Exception], ...] = (InputError, *bad_input)

    def decorate(work: Callable[Arguments, int | None]) -> Callable[Arguments, int]:
        @functools.wraps(work)
        def main(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            try:
                status = work(*args, **kwargs) or DONE
                print(end="", flush=True)  # at Python's end a failure would be a traceback
                return status
            except bad as error:
                if rank() > 0:  # the first rank says it: torchrun ends all when one has ended
                    time.sleep(SECONDS_TO_SPEAK)
                return say(f"error: {error}", BAD_INPUT)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return FAILED
            except (FloatingPointError, NonFiniteLogitsError, RankError, OSError) as error:
                return say(f"error: {error}", FAILED)
            except KeyboardInterrupt:
                return INTERRUPTED if rank() > 0 else say(interrupted, INTERRUPTED)
            except Exception as error:
                said = out_of_memory(error)
                if said is None:
                    raise
                return say(f"error: {said}{needs_less and '; ' + needs_less}", FAILED)

        return main

    return decorate


def require_extra(extra: str, purpose: str, *modules: str, otherwise: str = "") -> None:
    """Raise InputError unless the modules of an extra are installed. otherwise: what else helps."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise InputError(
            f"{purpose} needs {', '.join(missing)}, not installed: "
            f"pip install 'd2f-toolkit[{extra}]'{otherwise}"
        )


def say(message: str, status: int = DONE) -> int:
    """Print a message on standard error; return the exit status given."""
    print(message, file=sys.stderr, flush=True)
    return status
